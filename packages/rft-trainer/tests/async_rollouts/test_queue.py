"""Rollouts ahead of the trainer: equal to the synchronous run at staleness 0, bounded above it, kept through stops."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import (
    EVERY_ENTRY,
    GROUP,
    LONGEST,
    PROMPTS,
    RULES,
    Stopped,
    repeats_its_prompt,
    trained_entries,
)
from async_runs import AheadRun as Run

from rft_core import fault_points
from rft_core.errors import SavedAfterSignal, ServiceError
from rft_core.exact_records import value_of_line
from rft_core.keyed_random import derive_key
from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.testing.async_engine import FakeDrawn


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A deterministic run that nothing stops."""
    return Run(tmp_path_factory.mktemp("whole") / "run", 2, deterministic=True).go()


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    fault_points.install(None)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("changed", [{}, {"filter_groups": True, "refill_rounds": 3}, {"rollouts_per_step": 2}])
def test_at_staleness_0_the_queue_is_the_synchronous_run_to_the_bit(
    tmp_path: Path, changed: dict[str, Any], deterministic: bool
) -> None:
    rules = replace(RULES, **changed)
    plain = Run(tmp_path / "plain", None, rules=rules).go()
    queued = Run(tmp_path / "queued", 0, rules=rules, deterministic=deterministic).go()
    assert torch.equal(plain.policy.table, queued.policy.table)
    assert plain.rows() == queued.rows()
    assert len(plain.rows()) >= 8


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_prompt_is_trained_once_in_order_and_within_the_window(
    tmp_path: Path, staleness: int, deterministic: bool
) -> None:
    run = Run(tmp_path / "run", staleness, deterministic=deterministic, pause=0.001).go()
    assert trained_entries(run) == EVERY_ENTRY
    for step, groups in run.groups.items():
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert max(step - staleness, 0) <= rollout.weight_version <= rollout.newest_version <= step
            if deterministic:
                assert rollout.weight_version == rollout.newest_version == max(step - staleness, 0)
    lags = [row["async/staleness_max"] for row in run.directory.read_metrics().rows]
    assert max(lags) > 0, "something ran ahead"
    assert max(lags) <= staleness


def test_tokens_are_those_of_the_versions_that_they_are_labelled_with(tmp_path: Path) -> None:
    """Every token again, from the table of its version with its own draw: the spans and log-probs are true."""
    from rft_core.keyed_random import uniforms

    run = Run(tmp_path / "run", 2, pause=0.002).go()
    num_mixed = 0
    for groups in run.groups.values():
        for group in groups:
            for rollout in group.rollouts:
                spans = rollout.version_spans or ((rollout.weight_version, len(rollout.completion_ids)),)
                versions = [version for version, num in spans for _ in range(num)]
                num_mixed += len(spans) > 1
                key = derive_key(3, "sample", group.epoch, group.position, rollout.sample_index)
                last = group.prompt.token_ids[-1]
                draws = uniforms([key], LONGEST)[0]
                for place, token in enumerate(rollout.completion_ids):
                    table = run.tables_at(versions[place]).log_softmax(-1)
                    cumulative = table[last].double().exp().cumsum(0)
                    assert token == int(torch.searchsorted(cumulative, draws[place] * cumulative[-1], right=True))
                    assert rollout.behaviour_logprobs[place] == pytest.approx(float(table[last, token]), abs=1e-12)
                    last = token
    assert num_mixed > 0, "no sample went on under new weights"


def test_a_deterministic_run_repeats_to_the_bit_whatever_the_clock_does(tmp_path: Path, whole: Run) -> None:
    slow = Run(tmp_path / "slow", 2, deterministic=True, pause=0.003).go()
    assert torch.equal(slow.policy.table, whole.policy.table)
    assert slow.rows() == whole.rows()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("rl.rolled_out", 5),
        ("rl.updated", 9),
        ("async.published", 5),
        ("async.group_drawn", 23),
        ("rl.logged", 6),
        ("rl.logged", 7),
    ],
)
def test_a_run_killed_at_a_fault_point_and_resumed_trains_every_prompt_once(
    tmp_path: Path, whole: Run, point: str, nth: int, deterministic: bool
) -> None:
    first = Run(tmp_path / "first", 2, deterministic=deterministic, pause=0.001)
    passed = Counter[str]()

    def kill(name: str) -> None:
        passed[name] += 1
        if name == point and passed[name] == nth:
            raise Stopped(name)

    fault_points.install(kill)
    with pytest.raises(Stopped):
        first.go()
    fault_points.install(None)
    second = Run(tmp_path / "second", 2, deterministic=deterministic, pause=0.001).resume_from(first).go()
    assert trained_entries(first, second) == EVERY_ENTRY
    if deterministic:
        assert torch.equal(second.policy.table, whole.policy.table)
        kept = first.rows()[: first.writer.saved[-1][0]]
        assert kept + second.rows() == whole.rows()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_stop_by_signal_keeps_what_was_drawn(tmp_path: Path, deterministic: bool) -> None:
    signals = StopSignals()
    first = Run(tmp_path / "first", 1, deterministic=deterministic, save_every=0)

    def stop(name: str) -> None:
        if name == "rl.rolled_out" and first.loop.progress.step == 3:
            signals.received = "SIGTERM"

    fault_points.install(stop)
    with pytest.raises(SavedAfterSignal):
        first.go(signals)
    fault_points.install(None)
    step, records = first.writer.saved[-1]
    assert step == 3
    stored = [value_of_line(line.encode()) for line in records["rollouts_ahead"]["groups"]]
    assert sum(row["group"] is not None for row in stored) >= 5, "the collected step is among them"
    second = Run(tmp_path / "second", 1, deterministic=deterministic, save_every=0).resume_from(first)
    drawn_before = {tuple(row["entry"][:2]) for row in stored if row["group"] is not None}
    second.go()
    assert trained_entries(first, second) == EVERY_ENTRY
    again = {key for _, keys in second.engine.calls for key in keys}
    for epoch, position in drawn_before:
        keys = {derive_key(3, "sample", epoch, position, i) for i in range(GROUP)}
        assert not keys & again, "a group with its rewards is not drawn again"


def test_a_partial_sample_of_a_checkpoint_goes_on_where_it_was() -> None:
    draft = PartialSample(7, 5)
    draft.add(FakeDrawn(0, (3, 4), (-0.5, -0.25), (0.0, 0.0), "interrupted", 2))
    again = PartialSample.of(json.loads(json.dumps(draft.state())))
    again.add(FakeDrawn(0, (1,), (-1.0,), (0.0,), "interrupted", 2))
    again.add(FakeDrawn(0, (), (), (), "interrupted", 3))
    again.add(FakeDrawn(0, (5, 0), (-2.0, -3.0), (0.0, 0.0), "stop", 4))
    rollout = again.rollout(PROMPTS[0], 1, "text")
    assert rollout.completion_ids == (3, 4, 1, 5, 0)
    assert rollout.behaviour_logprobs == (-0.5, -0.25, -1.0, -2.0, -3.0)
    assert rollout.version_spans == ((2, 3), (4, 2))
    assert (rollout.weight_version, rollout.newest_version) == (2, 4)
    assert again.left == 0


@pytest.mark.parametrize("staleness", [1, 2])
def test_dynamic_sampling_is_fed_from_the_queue(tmp_path: Path, staleness: int) -> None:
    rules = replace(RULES, filter_groups=True, refill_rounds=3)
    run = Run(tmp_path / "run", staleness, rules=rules, pause=0.001).go()
    assert sorted(trained_entries(run)) == EVERY_ENTRY
    assert max(len(groups) for groups in run.groups.values()) > 5, "a step was filled up"


def test_max_steps_reserves_nothing_beyond_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2, rules=replace(RULES, max_steps=5)).go()
    ledger: Any = run.writer.saved[-1][1]["ledger"]
    assert ledger["trained"] == 25
    assert ledger["in_flight"] == []


@pytest.mark.parametrize("where", ["engine", "reward"])
def test_an_error_in_a_thread_reaches_the_trainer_with_its_cause(tmp_path: Path, where: str) -> None:
    def fails(items: Sequence[RewardItem]) -> list[Score]:
        if where == "reward" and threading.current_thread().name == "scoring":
            raise ZeroDivisionError("the reward is broken")
        return repeats_its_prompt(items)

    run = Run(tmp_path / "run", 1, reward=fails)

    def broken() -> None:
        if where == "engine":
            raise OSError("the engine is broken")

    run.engine.fail = broken
    with pytest.raises((OSError, ZeroDivisionError), match="is broken") as caught:
        run.go()
    assert any("in the thread" in note for note in caught.value.__notes__)
    assert run.engine.is_closed


def test_a_wait_for_an_engine_that_hangs_is_given_up_and_says_for_whom(tmp_path: Path) -> None:
    run, release = Run(tmp_path / "run", 1, patience=1.0), threading.Event()

    def hangs() -> None:
        release.wait(30.0)

    run.engine.fail = hangs
    try:
        with pytest.raises(ServiceError, match=r"5 groups|10 groups") as caught:
            run.loop.run(StopSignals())
        assert caught.value.problem.code == "rollouts.late"
        assert "draws 10 groups with version 0" in caught.value.problem.what
    finally:
        release.set()
        run.close()


def test_an_engine_outside_of_the_window_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 1, deterministic=True)
    run.engine.serve = lambda version: None  # type: ignore[method-assign]  # it stays at version 0
    with pytest.raises(ServiceError, match=r"v0.*v0.*v2") as caught:
        run.go()
    assert caught.value.problem.code == "engine.stale"


def test_evaluations_see_the_weights_of_their_step(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", None, episodes=1).go()
    ahead = Run(tmp_path / "ahead", 2, episodes=1, pause=0.001)
    versions: list[tuple[int, int]] = []
    generate = ahead.engine.generate

    def noted(*arguments: Any, **options: Any) -> Any:
        versions.append((ahead.loop.progress.step, ahead.engine.weight_version))
        return generate(*arguments, **options)

    ahead.engine.generate = noted  # type: ignore[method-assign]
    ahead.go()
    assert versions == [(0, 0), (4, 4)]
    assert len(plain.directory.read_evaluations().rows) == len(ahead.directory.read_evaluations().rows)
