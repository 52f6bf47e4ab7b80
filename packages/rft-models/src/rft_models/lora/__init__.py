"""Low-rank adapters, their files, and a base in 4 bits. May import `loading` and `layers`."""
