"""The packed forward of a decoder, its self-checks, and the base of all models. May import `lora` and `vision`."""
