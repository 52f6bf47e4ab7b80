"""Training loops: reinforcement learning and supervised fine-tuning, one module each."""
