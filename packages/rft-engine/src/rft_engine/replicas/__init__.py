"""Several engines as one. May import `native`, `process` and `weight_sync`."""
