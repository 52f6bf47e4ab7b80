"""What ranks send each other: groups or an error, rows, and sums of figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rft_core.errors import OptionsError, PeerError
from rft_trainer.async_rollouts.rank_share import RankPartition
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.records.rollouts import Prompt, RolloutGroup
from rft_trainer.testing.bigram import OneRank


class SentError(Exception):
    """Ends an exchange where it sends."""


class RankOf(OneRank):
    """A rank of several that keeps what it sends, and gets what is given."""

    def __init__(self, rank: int, world_size: int, received: Sequence[bytes] = ()) -> None:
        self.rank, self.world_size = rank, world_size
        self.received = list(received)
        self.sent: list[bytes] = []

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent.append(data)
        if not self.received:
            raise SentError
        return self.received


PROMPTS = [Prompt(f"p{place}", (place,), "", None, "p") for place in range(4)]
ENTRIES = [LedgerEntry(0, place, place) for place in range(4)]


def group(place: int) -> RolloutGroup:
    return RolloutGroup(PROMPTS[place], 0, place, (), baseline_reward=0.5 * place)


def sent_by(rank: int, call: Any) -> bytes:
    ranks = RankOf(rank, 2)
    with pytest.raises(SentError):
        call(RankPartition(ranks))
    return ranks.sent[0]


def test_without_collectives_there_is_one_rank_which_owns_everything() -> None:
    alone = RankOf(0, 1)
    for partition in (RankPartition(None), RankPartition(alone)):
        assert partition.is_first
        assert all(partition.owns(entry) for entry in ENTRIES)
        groups = [group(1), group(0)]
        assert partition.everyones(groups, ENTRIES, PROMPTS) == groups
        assert partition.all_rows([{"a": 1}]) == [{"a": 1}]
        assert partition.totals({"a": 1.0, "b_share": 0.5}) == {"a": 1.0, "b_share": 0.5}
        partition.tell_error(ValueError("nobody listens"))
    assert alone.sent == []


def test_prompts_are_owned_in_turn_by_their_place() -> None:
    owned = [[RankPartition(RankOf(rank, 3)).owns(entry) for entry in ENTRIES] for rank in range(3)]
    assert owned == [[True, False, False, True], [False, True, False, False], [False, False, True, False]]
    assert [RankPartition(RankOf(rank, 3)).is_first for rank in range(3)] == [True, False, False]


def test_groups_of_all_ranks_are_in_the_order_of_the_entries() -> None:
    parts = [
        sent_by(rank, lambda one, own=own: one.everyones([group(place) for place in own], ENTRIES, PROMPTS))
        for rank, own in enumerate([(2, 0), (1, 3)])
    ]
    for rank in range(2):
        partition = RankPartition(RankOf(rank, 2, parts))
        assert partition.everyones([], ENTRIES, PROMPTS) == [group(place) for place in range(4)]


def failed(error: Exception) -> PeerError:
    parts = [
        sent_by(0, lambda one: one.everyones([group(0)], ENTRIES, PROMPTS)),
        sent_by(1, lambda one: one.tell_error(error)),
    ]
    with pytest.raises(PeerError) as caught:
        RankPartition(RankOf(0, 2, parts)).everyones([group(0)], ENTRIES, PROMPTS)
    return caught.value


def test_the_error_of_another_rank_is_raised_with_its_text_and_its_remedy() -> None:
    problem = failed(OptionsError(code="x.y", what="no room", where="here", why="so", do="--more 2")).problem
    assert problem.code == "rollouts.other_rank"
    assert "rank 1" in problem.what
    assert "no room" in problem.what
    assert problem.do == "--more 2"


def test_an_error_without_a_remedy_points_to_the_log_of_its_rank() -> None:
    problem = failed(OSError("disk full")).problem
    assert "OSError: disk full" in problem.what
    assert "logs/rank_1.log" in problem.do


def test_an_error_is_not_hidden_by_ranks_that_are_gone() -> None:
    told: list[bytes] = []

    class Gone(OneRank):
        world_size = 2

        def gather_bytes(self, data: bytes) -> list[bytes]:
            told.append(data)
            raise PeerError(code="peer.gone", what="gone", where="here", why="so", state="none", do="nothing")

    RankPartition(Gone()).tell_error(ValueError("its own"))
    (sent,) = told
    assert b"its own" in sent, "it tried to tell them"


def test_rows_of_all_ranks_are_gathered_in_the_order_of_ranks() -> None:
    parts = [sent_by(rank, lambda one, rank=rank: one.all_rows([{"rank": rank}, {"n": 2}])) for rank in range(2)]
    assert RankPartition(RankOf(1, 2, parts)).all_rows([]) == [{"rank": 0}, {"n": 2}, {"rank": 1}, {"n": 2}]


def test_figures_are_summed_and_shares_averaged() -> None:
    parts = [
        sent_by(rank, lambda one, rank=rank: one.totals({"a": 2.0 + rank, "b_share": rank * 0.5})) for rank in range(2)
    ]
    assert RankPartition(RankOf(0, 2, parts)).totals({"a": 2.0, "b_share": 0.0}) == {"a": 5.0, "b_share": 0.25}
