"""Everything that names SGLang. May import `process` and `weight_sync`."""
