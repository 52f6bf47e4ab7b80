"""Generation one token at a time: KV caches, decoders, CUDA graphs, the generation copy. May import `policy`."""
