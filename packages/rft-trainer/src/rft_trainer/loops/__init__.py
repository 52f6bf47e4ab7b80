"""The loops: reinforcement and supervised training, each one page."""
