"""Settings with which a run fits the memory of its GPU: the same batch and the same mathematics, at less memory.

Each rung is a change that leaves every loss and gradient as it is, the cheapest first: the logits of a chunk of rows at
a time, smaller micro-batches, and activations that are computed again, the cheap ones of them or all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HEADROOM = 0.1
"""Share of the memory that is left to the libraries, and to the holes between what is allocated."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder, on top of those before it."""

    flags: str
    """Its own flags."""
    cost: str
    """What the run pays for it."""
    training_bytes: int
    """With it and with those before it that are kept."""
    kept: bool
    """Whether it lowers the peak; one that does not is left out."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The way from the settings down to the memory of the GPU."""

    limit_bytes: int
    """Memory of the GPU without the headroom."""
    rungs: list[Rung]
    flags: str
    """All flags to write; empty where none lowers the peak."""
    training_bytes: int
    """With them."""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The values behind the flags, by the names of their settings."""

    @property
    def fits(self) -> bool:
        """Return whether training fits with the flags."""
        return self.training_bytes <= self.limit_bytes


def fit_ladder(
    values: Mapping[str, Any],
    training_bytes: int,
    gpu_memory: int,
    bytes_with: Callable[[Mapping[str, Any]], int],
    *,
    has_token_head: bool = True,
    fixed: Collection[str] = (),
) -> Ladder | None:
    """Go down the rungs until training fits; None where it fits as it is.

    Args:
        values: the settings by their flat names.
        training_bytes: with these settings.
        gpu_memory: GiB of the GPU.
        bytes_with: the bytes with other values of some settings.
        has_token_head: whether the model has an output matrix, and logits.
        fixed: names of settings that no rung may change.
    """
    limit = int(gpu_memory * 2**30 * (1 - HEADROOM))
    if training_bytes <= limit:
        return None
    changed: dict[str, Any] = {}
    rungs: list[Rung] = []
    for change, cost in _rungs(values, has_token_head=has_token_head):
        if training_bytes <= limit:
            break
        if not change.keys().isdisjoint(fixed):
            continue
        found = bytes_with({**changed, **change})
        kept = found < training_bytes
        rungs.append(Rung(_flags(change), cost, found, kept))
        if kept:
            changed |= change
            training_bytes = found
    return Ladder(limit, rungs, _flags(changed), training_bytes, changed)


def _rungs(values: Mapping[str, Any], *, has_token_head: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """(the values that a rung changes, what it costs), the cheapest first."""
    if has_token_head and not values.get("fused_linear_logprob"):
        yield {"fused_linear_logprob": True}, "logits of a chunk of rows at a time; one more product with the head"
    for name, value in _micro_batches(values):
        yield {name: value}, "more and smaller forwards; the batch of a step stays"
    recomputes, mode = values["gradient_checkpointing"], values["gradient_checkpointing_mode"]
    if not recomputes:
        yield (
            {"gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"},
            "norms and activations are computed again",
        )
    if not recomputes or mode != "full":
        again = {} if recomputes else {"gradient_checkpointing": True}
        yield {**again, "gradient_checkpointing_mode": "full"}, "every layer is computed again: a third more time"


def _micro_batches(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The setting that limits a micro-batch, and smaller values of it, about half as large each."""
    packed = bool(values.get("packing_samples") and values.get("max_tokens_per_micro_batch"))
    name = "max_tokens_per_micro_batch" if packed else "micro_train_batch_size"
    value = int(values[name])
    least = 1024 if packed else 1
    while value // 2 >= least:
        value //= 2
        yield name, value


def _flags(change: Mapping[str, Any]) -> str:
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in change.items())
