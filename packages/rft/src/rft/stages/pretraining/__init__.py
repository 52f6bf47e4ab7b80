"""Pre-training of a language model, from nothing or from a model that exists."""
