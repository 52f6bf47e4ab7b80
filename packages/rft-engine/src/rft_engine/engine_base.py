"""Base class of all engines: lifecycle state, weight version, statistics of the last call; and an engine's facts."""

from __future__ import annotations

from dataclasses import dataclass

from rft_engine.completions import EngineStats
from rft_engine.lifecycle import EngineState, StateMachine


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that a started engine reports."""

    dtype: str
    """Of its weights as loaded: float32, bfloat16 or float16."""
    vocab_size: int
    is_cpu: bool
    transport: str
    """How weights reach it: direct, file, ipc or nccl."""


class EngineBase:
    """The common part of the engines; call `__init__` first."""

    def __init__(self) -> None:
        self._states = StateMachine()
        self._stats = EngineStats()

    @property
    def state(self) -> EngineState:
        return self._states.state

    @property
    def weight_version(self) -> int:
        """Version that the next completions carry; 0 until `load_weights`."""
        return self._states.weight_version

    def stats(self) -> EngineStats:
        """Figures of the last `generate`."""
        return self._stats
