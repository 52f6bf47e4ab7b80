"""Pre-training of a language model, from nothing or from a model; may import `stages` and `tiny_models`."""
