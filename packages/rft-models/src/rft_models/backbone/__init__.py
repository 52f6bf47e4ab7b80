"""The packed forward of a decoder to hidden states, and its self-checks. May import `attention` and `vision`."""
