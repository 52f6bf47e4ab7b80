"""Rollouts ahead of several trainer ranks: each draws its share, all train the run of one, errors reach everybody."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import (
    EVERY_ENTRY,
    GROUP,
    PROMPTS,
    RULES,
    SEED,
    AheadRun,
    Stopped,
    ThreadRank,
    repeats_its_prompt,
    run_on_ranks,
    trained_entries,
)

from rft_core import fault_points
from rft_core.errors import PeerError, SavedAfterSignal
from rft_core.exact_records import value_of_line
from rft_core.keyed_random import derive_key
from rft_trainer.async_rollouts.rank_share import RankPartition
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.runs.stop_signals import StopSignals


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AheadRun:
    """One rank that nothing stops."""
    return AheadRun(tmp_path_factory.mktemp("whole") / "run", 2, deterministic=True).go()


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    fault_points.install(None)


def go(path: Path, num_ranks: int, **options: Any) -> list[AheadRun]:
    """A run on so many ranks, to its end."""
    ended = run_on_ranks(num_ranks, lambda rank: AheadRun(path / f"rank{rank.rank}", collectives=rank, **options).go())
    failed = [one for one in ended if isinstance(one, BaseException)]
    if failed:
        raise failed[0]
    return [one for one in ended if isinstance(one, AheadRun)]


def samples(groups: Sequence[RolloutGroup]) -> list[tuple[object, ...]]:
    """What was drawn, by which weights."""
    return [
        (group.epoch, group.position, rollout.completion_ids, rollout.weight_version, rollout.version_spans)
        for group in groups
        for rollout in group.rollouts
    ]


@pytest.mark.parametrize(("num_ranks", "changed"), [(2, {"filter_groups": True, "refill_rounds": 3}), (3, {})])
def test_ranks_train_the_run_of_one_rank(tmp_path: Path, num_ranks: int, changed: dict[str, Any]) -> None:
    options: dict[str, Any] = {"staleness": 1, "deterministic": True, "rules": replace(RULES, **changed)}
    alone = AheadRun(tmp_path / "alone", **options).go()
    ranks = go(tmp_path, num_ranks, **options)
    for rank in ranks:
        assert rank.groups.keys() == alone.groups.keys()
        for step, groups in alone.groups.items():
            assert samples(rank.groups[step]) == samples(groups)
        assert torch.allclose(rank.policy.table, alone.policy.table, rtol=1e-10, atol=1e-12)
        assert torch.equal(rank.policy.table, ranks[0].policy.table)
    assert [row["reward/mean"] for row in ranks[0].rows()] == [row["reward/mean"] for row in alone.rows()]


def test_a_rank_draws_its_own_share_alone(tmp_path: Path) -> None:
    ranks = go(tmp_path, 2, staleness=2, pause=0.001)
    for number, rank in enumerate(ranks):
        assert trained_entries(rank) == EVERY_ENTRY
        drawn = {key for _, keys in rank.engine.calls for key in keys}
        own = [(epoch, position) for epoch, position in EVERY_ENTRY if position % 2 == number]
        assert drawn == {derive_key(SEED, "sample", *entry, i) for entry in own for i in range(GROUP)}
        for step, groups in rank.groups.items():
            for rollout in (rollout for group in groups for rollout in group.rollouts):
                assert max(step - 2, 0) <= rollout.weight_version <= rollout.newest_version <= step


def test_more_ranks_than_prompts_of_a_step(tmp_path: Path) -> None:
    rules = replace(RULES, prompts_per_rollout=2, train_batch_size=2, max_steps=3)
    ranks = go(tmp_path, 3, staleness=1, rules=rules, deterministic=True)
    assert all(trained_entries(rank) == EVERY_ENTRY[:6] for rank in ranks)


@pytest.mark.parametrize("where", ["engine", "reward"])
def test_an_error_in_a_thread_of_one_rank_reaches_all_ranks_by_name(tmp_path: Path, where: str) -> None:
    def work(rank: ThreadRank) -> None:
        def reward(items: Sequence[RewardItem]) -> list[Score]:
            if where == "reward" and rank.rank == 1 and threading.current_thread().name == "scoring":
                raise ZeroDivisionError("the reward is broken")
            return repeats_its_prompt(items)

        run = AheadRun(tmp_path / f"rank{rank.rank}", 1, reward=reward, collectives=rank)

        def broken() -> None:
            if where == "engine" and rank.rank == 1:
                raise OSError("the engine is broken")

        run.engine.fail = broken
        run.go()

    first, second = run_on_ranks(2, work)
    assert isinstance(second, OSError | ZeroDivisionError)
    assert isinstance(first, PeerError)
    assert first.problem.code == "rollouts.other_rank"
    assert "rank 1" in first.problem.what
    assert "is broken" in first.problem.what


def killed(path: Path, hook: Callable[[str], None], deterministic: bool) -> list[AheadRun]:
    """Two ranks of which the hook ends one; the other finds itself alone."""
    runs: dict[int, AheadRun] = {}

    def work(rank: ThreadRank) -> None:
        options: dict[str, Any] = {"deterministic": deterministic, "pause": 0.001}
        runs[rank.rank] = AheadRun(path / f"first{rank.rank}", 2, collectives=rank, **options)
        runs[rank.rank].go()

    fault_points.install(hook)
    ended = run_on_ranks(2, work)
    fault_points.install(None)
    assert {type(one) for one in ended} <= {Stopped, PeerError}
    assert any(isinstance(one, Stopped) for one in ended)
    return [runs[rank] for rank in range(2)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("point", "nth", "num_ranks"),
    [
        ("rl.rolled_out", 9, 2),
        ("rl.updated", 17, 2),
        ("async.published", 10, 2),
        ("async.group_drawn", 31, 2),
        ("rl.logged", 13, 1),
    ],
)
def test_ranks_killed_at_a_fault_point_and_resumed_train_every_prompt_once(
    tmp_path: Path, whole: AheadRun, point: str, nth: int, num_ranks: int, deterministic: bool
) -> None:
    passed = Counter[str]()

    def kill(name: str) -> None:
        passed[name] += 1
        if name == point and passed[name] == nth:
            raise Stopped(name)

    first = killed(tmp_path, kill, deterministic)[0]
    again = run_on_ranks(
        num_ranks,
        lambda rank: (
            AheadRun(tmp_path / f"second{rank.rank}", 2, deterministic=deterministic, collectives=rank)
            .resume_from(first)
            .go()
        ),
    )
    for second in again:
        assert isinstance(second, AheadRun), second
        assert trained_entries(first, second) == EVERY_ENTRY
    if deterministic:
        assert isinstance(again[0], AheadRun)
        assert torch.allclose(again[0].policy.table, whole.policy.table, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_holds_what_is_in_flight_on_every_rank(tmp_path: Path) -> None:
    signals = StopSignals()

    def work(rank: ThreadRank) -> None:
        run = runs[rank.rank] = AheadRun(tmp_path / f"{rank.rank}", 1, save_every=0, collectives=rank)
        run.go(signals)

    def stop(name: str) -> None:
        if name == "rl.rolled_out" and runs[0].loop.progress.step == 3:
            signals.received = "SIGTERM"

    runs: dict[int, AheadRun] = {}
    fault_points.install(stop)
    ended = run_on_ranks(2, work)
    fault_points.install(None)
    assert all(isinstance(one, SavedAfterSignal) for one in ended), ended
    step, records = runs[0].writer.saved[-1]
    assert step == 3
    assert runs[1].writer.saved[-1] == (3, {}), "one rank writes"
    stored = [value_of_line(line.encode()) for line in records["rollouts_ahead"]["groups"]]
    drawn_before = [tuple(row["entry"][:2]) for row in stored if row["group"] is not None]
    assert {(0, position) for position in range(15, 20)} <= set(drawn_before), "the collected step of both ranks"
    again = run_on_ranks(
        2,
        lambda rank: (
            AheadRun(tmp_path / f"again{rank.rank}", 1, save_every=0, collectives=rank).resume_from(runs[0]).go()
        ),
    )
    for second in again:
        assert isinstance(second, AheadRun), second
        assert trained_entries(runs[0], second) == EVERY_ENTRY
        keys = {key for _, keys in second.engine.calls for key in keys}
        for entry in drawn_before:
            assert not keys & {derive_key(SEED, "sample", *entry, i) for i in range(GROUP)}, "drawn again"


def test_figures_of_engines_are_added_and_shares_averaged() -> None:
    def work(rank: ThreadRank) -> dict[str, float]:
        return RankPartition(rank).totals(
            {"engine/restarts": 1.0 + rank.rank, "time/engine_idle_share": 0.5 * rank.rank}
        )

    assert run_on_ranks(2, work) == [{"engine/restarts": 3.0, "time/engine_idle_share": 0.25}] * 2


def test_images_stay_on_their_rank_and_a_prompt_is_found_by_its_place() -> None:
    media = object()
    prompts = [replace(PROMPTS[0], media=media), PROMPTS[1]]
    entries = [LedgerEntry(0, 0, 0), LedgerEntry(0, 1, 1)]

    def work(rank: ThreadRank) -> list[RolloutGroup]:
        share = RankPartition(rank)
        own = [RolloutGroup(prompts[e.position], 0, e.position, ()) for e in entries if share.owns(e)]
        return share.everyones(own, entries, prompts)

    for groups in run_on_ranks(2, work):
        assert isinstance(groups, list)
        assert [group.prompt.media for group in groups] == [media, None]
