"""Log-probabilities and entropies from hidden states, slab by slab. May import `layers`; uses rft-kernels."""
