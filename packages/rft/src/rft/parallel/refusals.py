"""Refusals of the parallel strategies, for the rules of the command line. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rft_dist.strategies.registry import StrategyRefusal, refusals


def strategy_refusals(values: Mapping[str, Any]) -> Iterator[StrategyRefusal]:
    """Yield what the strategies refuse of a training run's settings, by the names of the settings."""
    yield from refusals(values)
