"""A scorer hands its limits, temperature and columns on, in the order of the rollouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.sharded_forward import ShardedTokenForward
from rft_trainer.testing.bigram import BigramPolicy, OneRank

LENGTHS = (9, 1, 2, 1)


class NotingPolicy(BigramPolicy):
    """Notes sequences, tokens and options of every forward pass."""

    def __init__(self) -> None:
        super().__init__(6)
        with torch.no_grad():
            self.table.copy_(torch.arange(36.0).reshape(6, 6).sin())
        self.noted: list[tuple[int, int]] = []
        self.options: list[dict[str, Any]] = []

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.noted.append((int(tokens.segment_ids_T.max()) + 1, len(tokens.token_ids_T)))
        self.options.append(options)
        return super().token_logprobs(tokens, **options)


class First(OneRank):
    """The first of two ranks; the second one says 0 for all of its tokens."""

    world_size = 2

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, b"\0" * 4 * self.theirs]


def groups() -> list[RolloutGroup]:
    rollouts = tuple(
        Rollout(
            "p",
            number,
            tuple(range(1, 1 + length)) if length < 6 else (2,) * length,
            (0.0,) * length,
            (0.0,) * length,
            "stop",
            0,
            "",
            1.0,
            RewardStatus.OK,
        )
        for number, length in enumerate(LENGTHS)
    )
    return [RolloutGroup(Prompt("p", (1, 5), "", None, "test"), 0, 0, rollouts)]


def scorer(policy: NotingPolicy, ranks: Any = None, **more: Any) -> LogprobScorer:
    limits: dict[str, Any] = {"max_sequences": 2, "max_tokens": 0, "temperature": 0.5} | more
    return LogprobScorer(policy, ranks or OneRank(), **limits)


def test_log_probs_and_entropies_are_those_of_the_temperature_in_the_order_of_rollouts() -> None:
    policy = NotingPolicy()
    rows_VV = (policy.table.detach().double() / 0.5).log_softmax(-1)
    before = [[(1, 5)[-1], *one.completion_ids[:-1]] for one in groups()[0].rollouts]
    expected = [
        [float(rows_VV[last, token]) for last, token in zip(row, one.completion_ids, strict=True)]
        for row, one in zip(before, groups()[0].rollouts, strict=True)
    ]
    entropies = [[float(-(rows_VV[last].exp() * rows_VV[last]).sum()) for last in row] for row in before]
    found = scorer(policy)
    for row, wanted in zip(found(groups()), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)
    for row, wanted in zip(found.entropies(groups()), entropies, strict=True):
        assert row == pytest.approx(wanted, abs=1e-5)
    logprobs, of_both = found.with_entropies(groups())
    assert (logprobs, of_both) == (found(groups()), found.entropies(groups()))


def test_the_entropy_is_computed_only_where_it_is_asked_for() -> None:
    policy = NotingPolicy()
    scorer(policy, max_sequences=8)(groups())
    scorer(policy, max_sequences=8).entropies(groups())
    scorer(policy, max_sequences=8).with_entropies(groups())
    assert [options["with_entropy"] for options in policy.options] == [False, True, True]


@pytest.mark.parametrize("columns", ["__call__", "entropies", "with_entropies"])
def test_forwards_keep_both_limits(columns: str) -> None:
    policy = NotingPolicy()
    getattr(scorer(policy), columns)(groups())
    assert policy.noted == [(2, 14), (2, 7)]
    policy.noted.clear()
    getattr(scorer(policy, max_sequences=3, max_tokens=11), columns)(groups())
    assert policy.noted == [(1, 11), (3, 10)]


@pytest.mark.parametrize("columns", ["__call__", "entropies", "with_entropies"])
@pytest.mark.parametrize("collective", [None, False, True])
def test_ranks_run_equally_many_forwards_where_they_are_collective(columns: str, collective: bool | None) -> None:
    policy = NotingPolicy()
    num_columns = 2 if columns == "with_entropies" else 1
    more = {} if collective is None else {"collective_forward": collective}
    getattr(scorer(policy, First(4 * num_columns), max_sequences=1, **more), columns)(groups())
    # the long response here and the three others there; a filler is the shortest
    assert [length for _, length in policy.noted] == [11] + [3, 3] * bool(collective)


def test_what_another_rank_computed_stands_at_its_rollouts() -> None:
    policy = NotingPolicy()
    alone = scorer(policy)(groups())
    assert scorer(policy, First(4))(groups()) == [alone[0], (0.0,), (0.0, 0.0), (0.0,)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_rollouts_have_no_numbers_also_where_forwards_are_collective(world_size: int) -> None:
    policy = NotingPolicy()
    ranks = OneRank() if world_size == 1 else First(0)
    assert scorer(policy, ranks, collective_forward=True)([]) == []
    assert policy.noted == []


def test_columns_are_taken_apart_in_their_order() -> None:
    def forward(samples: Any) -> Tensor:
        tokens = [float(token) for sample in samples for token in sample.token_ids]
        return torch.tensor([[token, 10 * token, 100 * token] for token in tokens])

    numbers = ShardedTokenForward(forward, OneRank(), max_sequences=1, max_tokens=0, num_columns=3)
    ids = [one.completion_ids for one in groups()[0].rollouts]
    assert numbers.columns(groups()) == [
        [tuple(factor * token for token in row) for row in ids] for factor in (1, 10, 100)
    ]
