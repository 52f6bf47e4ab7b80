"""The in-process engine: continuous batching on a `DecodableModel`. May import `decoding` and `weight_sync`."""
