"""Agreement of routers: how often engine and trainer send a token to the same experts.

The choice of experts is discontinuous: where two of them are close, another rounding sends a token elsewhere, and its
log-prob moves further than arithmetic moves that of a dense model. With the very weights that the samples were drawn
with, on tokens of the step and over all layers,

    agreement = pairs (token, layer) whose set of experts is the same / pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.scoring.samples import flat_rollouts

EVERY = 10
"""Steps from one measurement to the next; the first step has one."""
NUM_SEQUENCES = 2
"""Sampled sequences that are measured."""
MOST_TOKENS = 1024
"""Tokens of each sequence that are measured, from its first one on."""


class RoutingPolicy(Protocol):
    """The trainer's model, with experts."""

    def routes(self, tokens: PackedTokens) -> Tensor:
        """[layers, tokens, choices] int64 in ascending order."""
        ...


class RoutingEngine(Protocol):
    """An engine that can say which experts its tokens go to."""

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """The same of the tokens of whole sequences; None where there are no experts."""
        ...


class RouterAgreement:
    """Measurement of some steps, by a forward of each model on a few sampled sequences without gradient."""

    def __init__(
        self, policy: RoutingPolicy, engine: RoutingEngine, collectives: Collectives, *, device: str = "cpu"
    ) -> None:
        """Store the models, which have the same weights when a measurement is made, and the ranks, each with both."""
        self._policy, self._engine, self._collectives, self._device = policy, engine, collectives, device

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Return `engine/router_agreement`, a share, where a step of this number, counted from 1, is measured.

        Every rank calls it with the same groups.
        """
        sequences = _sequences(groups) if (step - 1) % EVERY == 0 else []
        if not sequences:
            return {}
        theirs_LTK = self._engine.routes(sequences)
        if theirs_LTK is None:
            return {}
        segments = [torch.tensor(sequence, device=self._device) for sequence in sequences]
        ours_LTK = self._policy.routes(PackedTokens.of_segments(segments))
        same_LT = (ours_LTK == theirs_LTK.to(ours_LTK.device)).all(-1)
        # each rank has an engine of its own, and they may differ
        share = self._collectives.sum(same_LT.double().mean().cpu()) / self._collectives.world_size
        return {"engine/router_agreement": float(share)}


def _sequences(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    """Return the first sampled sequences of text, of different prompts as far as there are any."""
    drawn = [(group, one) for group, one in flat_rollouts(groups) if one.completion_ids and group.prompt.media is None]
    # the first sample of each prompt before the second of any
    drawn.sort(key=lambda pair: pair[1].sample_index)
    sequences = [[*group.prompt.token_ids, *one.completion_ids] for group, one in drawn[:NUM_SEQUENCES]]
    return [sequence[:MOST_TOKENS] for sequence in sequences]
