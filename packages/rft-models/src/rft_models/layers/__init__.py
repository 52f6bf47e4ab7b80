"""Layers put in place of transformers': fast linear, gradient checkpointing, MoE router. May import `families`."""
