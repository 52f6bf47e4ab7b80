"""Attention over packed rows: kernels, variable length, shared prefixes, rings of ranks. May import `families`."""
