"""Stages that a person starts: training on rewards or demonstrations, an evaluation, generation."""
