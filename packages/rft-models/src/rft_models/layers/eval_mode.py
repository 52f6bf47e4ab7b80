"""Evaluation mode of a model for a while, as checks and generation between two updates need it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def eval_mode(model: Any) -> Generator[None]:
    """Put the model in evaluation mode for the block, and back into its own mode also where the block raises."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
