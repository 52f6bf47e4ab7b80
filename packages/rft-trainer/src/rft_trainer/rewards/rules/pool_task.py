"""Loader of a rule's judgement; it runs in a scoring process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def load(path: str, name: str) -> Callable[[Mapping[str, object]], object]:
    """Return the function `judge` of the rule `name`, which has no file."""
    assert not path
    return importlib.import_module(f"rft_trainer.rewards.rules.{name}").judge
