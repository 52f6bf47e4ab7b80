"""Prompts and responses of histories: one builder for training, reinforcement learning and evaluation."""
