"""Everything that names vLLM. May import `process`, `weight_sync` and `decoding`."""
