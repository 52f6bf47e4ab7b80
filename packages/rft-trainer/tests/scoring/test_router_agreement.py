"""Agreement of routers: which sequences of which steps are measured, and the share of equal sets of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.router_agreement import EVERY, MOST_TOKENS, RouterAgreement
from rft_trainer.testing.bigram import OneRank


def group(prompt: tuple[int, ...], *responses: tuple[int, ...], media: Any = None) -> RolloutGroup:
    rollouts = tuple(
        Rollout("p", n, ids, (-0.5,) * len(ids), (0.0,) * len(ids), "stop", 0, "x", 1.0, RewardStatus.OK)
        for n, ids in enumerate(responses)
    )
    return RolloutGroup(Prompt("p", prompt, "p", None, "p", media), 0, 0, rollouts)


class Policy:
    """A token goes to the experts (0, its id) in the first layer, and to (0, 1) in the second."""

    def __init__(self) -> None:
        self.seen: list[PackedTokens] = []

    def routes(self, tokens: PackedTokens) -> Tensor:
        self.seen.append(tokens)
        return routes_of(tokens.token_ids_T)


class Engine:
    """The same, but for tokens of these ids in the first layer."""

    def __init__(self, *others: int, dense: bool = False) -> None:
        self.others, self.dense = others, dense
        self.seen: list[Sequence[Sequence[int]]] = []

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        self.seen.append(sequences)
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        routes = routes_of(ids)
        routes[0, torch.isin(ids, torch.tensor(self.others)), 1] = 99
        return None if self.dense else routes


def routes_of(ids_T: Tensor) -> Tensor:
    zeros_T = torch.zeros_like(ids_T)
    return torch.stack([torch.stack([zeros_T, ids_T], -1), torch.stack([zeros_T, zeros_T + 1], -1)])


GROUPS = [group((1, 2), (3, 4), (5,)), group((6,), (7,), (8, 9))]


def measured(engine: Engine, groups: Sequence[RolloutGroup] = GROUPS, step: int = 1) -> dict[str, float]:
    return RouterAgreement(Policy(), engine, OneRank())(step, groups)


def test_it_is_the_share_of_tokens_and_layers_with_the_same_set_of_experts() -> None:
    assert measured(Engine()) == {"engine/router_agreement": 1.0}
    # two of six tokens in one of two layers
    assert measured(Engine(2, 7)) == {"engine/router_agreement": pytest.approx(1 - 2 / 12)}


def test_the_first_samples_of_different_prompts_are_measured() -> None:
    engine, policy = Engine(), Policy()
    RouterAgreement(policy, engine, OneRank())(1, GROUPS)
    assert engine.seen == [[[1, 2, 3, 4], [6, 7]]]
    (tokens,) = policy.seen
    assert tokens.token_ids_T.tolist() == [1, 2, 3, 4, 6, 7]
    assert tokens.segment_ids_T.tolist() == [0, 0, 0, 0, 1, 1]
    measured(engine, GROUPS[:1])
    assert engine.seen[1] == [[1, 2, 3, 4], [1, 2, 5]]
    measured(engine, [group((1,), (2,) * MOST_TOKENS)])
    assert [len(sequence) for sequence in engine.seen[2]] == [MOST_TOKENS]


@pytest.mark.parametrize("groups", [[], [group((1,), ())], [group((1,), (2,), media=object())]])
def test_without_a_sequence_of_text_nothing_is_asked(groups: list[RolloutGroup]) -> None:
    engine = Engine()
    assert measured(engine, groups) == {}
    assert engine.seen == []


def test_every_tenth_step_is_measured_and_none_of_a_dense_model() -> None:
    assert [step for step in range(1, 25) if measured(Engine(), step=step)] == [1, 1 + EVERY, 1 + 2 * EVERY]
    assert measured(Engine(dense=True)) == {}


def test_it_is_the_mean_over_the_ranks_of_which_each_has_an_engine() -> None:
    class TwoRanks(OneRank):
        world_size = 2

        def sum(self, tensor: Tensor) -> Tensor:
            return tensor + 0.5

    found = RouterAgreement(Policy(), Engine(), TwoRanks())(1, GROUPS)
    assert found == {"engine/router_agreement": 0.75}
