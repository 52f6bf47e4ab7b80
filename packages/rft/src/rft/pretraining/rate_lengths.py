"""Lengths of the learning rate's rise and fall in tokens, as whole steps of a run whose tokens are counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from rft_core.errors import OptionsError
from rft_dist.settings import AdamSettings, Schedule
from rft_trainer.settings.pretraining import PretrainTrainingSettings

AdamT = TypeVar("AdamT", bound=AdamSettings)


@dataclass(frozen=True, slots=True)
class RateLengths:
    """Steps of rise and fall; None = no length in tokens is given, and the optimizer's settings say it."""

    warmup_steps: int | None = None
    decay_steps: int | None = None


def rate_lengths(
    chosen: PretrainTrainingSettings, schedule: Schedule, tokens_a_step: int, num_steps: int
) -> RateLengths:
    """Convert the lengths in tokens to steps: ceil(tokens / tokens a step).

    Args:
        chosen: has the lengths.
        schedule: a fall in tokens belongs to "wsd" alone.
        tokens_a_step: tokens that an optimizer step predicts, over all ranks.
        num_steps: of the run.

    Raises:
        OptionsError: rise and fall leave the run no step at its peak.
    """
    decay = chosen.lr_decay_tokens if schedule == "wsd" else 0
    given = {name: n for name, n in (("lr_warmup_tokens", chosen.lr_warmup_tokens), ("lr_decay_tokens", decay)) if n}
    steps = {name: -(-tokens // tokens_a_step) for name, tokens in given.items()}
    if given and sum(steps.values()) >= num_steps:
        run = num_steps * tokens_a_step
        longest = max((num_steps - 1) // len(given), 0) * tokens_a_step
        raise OptionsError(
            code="pretrain.rate_length",
            what=", ".join(f"{name} = {tokens:,} ({steps[name]:,} steps)" for name, tokens in given.items()),
            where=", ".join(f"--{name}" for name in given),
            why=f"the run has {run:,} tokens ({num_steps:,} steps of {tokens_a_step:,}), and one step at least keeps "
            "the peak of the learning rate",
            do=" ".join(f"--{name} {longest}" for name in given) if longest else f"leave {' and '.join(given)} out",
        )
    return RateLengths(steps.get("lr_warmup_tokens"), steps.get("lr_decay_tokens"))


def in_steps(adam: AdamT, lengths: RateLengths, num_steps: int) -> AdamT:
    """Return the settings of the update with these steps in the place of their own shares."""
    if lengths.warmup_steps is not None:
        adam = replace(adam, lr_warmup_steps=lengths.warmup_steps)
    if lengths.decay_steps is not None:
        adam = replace(adam, lr_decay_ratio=lengths.decay_steps / num_steps)
    return adam
