"""What retention removes: never the newest, never a protected one, nobody else's, and no more than the limits ask."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rft_core import fault_points
from rft_dist.checkpoint_format.layout import run_tag
from rft_dist.checkpoints.reader import newest_verified
from rft_dist.checkpoints.retention import RetentionPolicy, Stored, plan_removals

limits = st.none() | st.integers(1, 6)
byte_limits = st.none() | st.integers(1, 500)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    keep_last=limits,
    keep_bytes=byte_limits,
    protected=st.sets(st.integers(0, 11)),
    order=st.randoms(use_true_random=False),
)
def test_the_plan_keeps_newest_and_protected_and_meets_the_limits(
    sizes, keep_last, keep_bytes, protected, order
) -> None:
    sequences = list(range(len(sizes)))
    order.shuffle(sequences)
    stored = [Stored(step, sequences[step], size) for step, size in enumerate(sizes)]
    newest = max(stored, key=lambda entry: entry.sequence)
    removals = plan_removals(stored, RetentionPolicy(keep_last, keep_bytes), dict.fromkeys(protected, "pinned"))
    gone = {removal.step for removal in removals}
    kept = [entry for entry in stored if entry.step not in gone]
    free_to_go = [entry for entry in kept if entry.step not in protected and entry is not newest]
    assert newest in kept
    assert not gone & protected
    if free_to_go:  # what is over the limits is so because of protected ones alone
        assert keep_last is None or len(kept) <= keep_last
        assert keep_bytes is None or sum(entry.num_bytes for entry in kept) <= keep_bytes
    by_step = {entry.step: entry for entry in stored}
    if gone and free_to_go:
        assert max(by_step[step].sequence for step in gone) < min(entry.sequence for entry in free_to_go)
    if gone:  # one more would have been too many
        youngest = max((by_step[step] for step in gone), key=lambda entry: entry.sequence)
        too_many = keep_last is not None and len(kept) + 1 > keep_last
        too_large = keep_bytes is not None and sum(entry.num_bytes for entry in kept) + youngest.num_bytes > keep_bytes
        assert too_many or too_large
    assert [removal.step for removal in removals] == sorted(gone, key=lambda step: by_step[step].sequence)


events = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 60)),
    st.tuples(st.just("crash"), st.integers(0, 60)),
    st.tuples(st.just("restart"), st.tuples(limits, st.none() | st.integers(2_000, 20_000))),
    st.tuples(st.just("best"), st.integers(0, 5)),
    st.tuples(st.just("pin"), st.integers(0, 5)),
    st.tuples(st.just("other run"), st.just(0)),
)


def walk(num: int):
    """Settings of a walk through `num` schedules."""
    return settings(
        max_examples=num,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],  # they hold no state
    )


@walk(25)
@given(schedule=st.lists(events, min_size=3, max_size=10))
def test_no_schedule_of_saves_crashes_and_restarts_loses_what_was_acknowledged(
    make_run, memory_path: Path, schedule
) -> None:
    play(make_run, memory_path, schedule)


@pytest.mark.night
@pytest.mark.timeout(3000)
def test_no_schedule_of_five_thousand_loses_what_was_acknowledged(make_run, memory_path: Path) -> None:
    """R7, with saves at once and beside training."""
    played: Counter[str] = Counter()

    @walk(5000)
    @given(schedule=st.lists(events, min_size=3, max_size=10), way=st.sampled_from(WAYS))
    def every(schedule, way) -> None:
        play(make_run, memory_path, schedule, way)
        played.update([way])

    every()
    print(f"\nR7: {played.total()} schedules {dict(played)}, nothing lost")
    assert played.total() >= 5000


WAYS = ("at once", "beside training")


def play(make_run, memory_path: Path, schedule, way: str = "at once") -> None:
    with tempfile.TemporaryDirectory(dir=memory_path) as folder:
        Schedule(make_run(Path(folder) / "checkpoints"), way).play(schedule)


class Schedule:
    """Plays events on one folder and compares it, after each, with what must hold."""

    def __init__(self, run, way: str) -> None:
        self.run = run
        self.way = way
        self.limits = (2, None)
        self.store = run.store(*self.limits)
        self.step = 0
        self.acknowledged: list[int] = []
        self.best: int | None = None
        self.pinned: set[int] = set()
        self.others: set[str] = set()
        self.foreign = run.directory / "notes"
        self.foreign.mkdir()
        (self.foreign / "mine.txt").write_text("keep")

    def play(self, schedule: list) -> None:
        for kind, value in schedule:
            {
                "save": self.save,
                "crash": self.crash,
                "restart": self.restart,
                "best": self.protect_best,
                "pin": self.pin,
                "other run": self.other_run,
            }[kind](value)
            self.check()

    def save(self, size: int) -> None:
        self.step += 1
        info = self.write(size)
        self.acknowledged.append(self.step)
        kept = self.store.list()
        protected = self.pinned | ({self.best} if self.best else set()) | {info.step}
        if any(entry.step not in protected for entry in kept):
            assert self.limits[0] is None or len(kept) <= self.limits[0]
            assert self.limits[1] is None or sum(entry.num_bytes for entry in kept) <= self.limits[1]
        names = {name for name in self.run.names() if name.startswith(("dead_", ".staging"))}
        assert names <= self.others

    def write(self, size: int):
        """One save of the present step; what it says."""
        if self.way == "beside training":
            return self.run.save_beside(self.store, self.step, size=size)
        return self.run.save(self.store, self.step, size=size)

    def crash(self, number: int) -> None:
        passed = [0]

        def hook(_: str) -> None:
            passed[0] += 1
            if passed[0] > number:
                raise self.run.Killed

        self.step += 1
        fault_points.install(hook)
        try:
            self.write(37)
            self.acknowledged.append(self.step)
        except self.run.Killed:
            pass
        fault_points.install(None)
        self.store = self.run.store(*self.limits)
        if self.best is not None:
            self.store.protect("best", self.best)

    def restart(self, new_limits: tuple) -> None:
        self.limits = new_limits
        self.store = self.run.store(*new_limits)
        if self.best is not None:
            self.store.protect("best", self.best)

    def protect_best(self, index: int) -> None:
        there = [entry.step for entry in self.store.list()]
        if there:
            self.best = there[index % len(there)]
            self.store.protect("best", self.best)

    def pin(self, index: int) -> None:
        there = [entry.step for entry in self.store.list()]
        if there:
            step = there[index % len(there)]
            self.pinned.add(step)
            (self.run.directory / f"step_{step:06d}.pin").touch()

    def other_run(self, _: int) -> None:
        step = 10_000 + len(self.others)
        before = set(self.run.names())
        self.run.save(self.run.store(run_id="other"), step)
        self.others |= set(self.run.names()) - before

    def check(self) -> None:
        search = newest_verified(self.run.directory, run_id=self.run.run_id)
        assert search.findings == ()
        if self.acknowledged:
            assert search.checkpoint is not None
            assert self.run.state_of(search.checkpoint)[0] >= self.acknowledged[-1]
        names = set(self.run.names())
        assert (self.foreign / "mine.txt").read_text() == "keep"
        assert self.others <= names
        assert {f"step_{step:06d}" for step in self.pinned | ({self.best} if self.best else set())} <= names


def test_removed_ones_are_named_with_the_reason_and_bytes(small_run) -> None:
    store = small_run.store(keep_last=2)
    sizes = {step: small_run.save(store, step).num_bytes for step in (1, 2)}
    (removal,) = small_run.save(store, 3).removed
    assert (removal.step, removal.num_bytes, removal.reason) == (1, sizes[1], "keep_last = 2")


def test_the_checkpoint_that_a_run_resumed_from_is_kept(small_run) -> None:
    store = small_run.store()
    for step in (1, 2, 3):
        small_run.save(store, step)
    resumed = small_run.store(keep_last=1)
    resumed.open(2)
    small_run.save(resumed, 4)
    assert small_run.names() == ["step_000002", "step_000004"]


def test_a_new_reason_lets_the_earlier_step_go(small_run) -> None:
    store = small_run.store(keep_last=1)
    small_run.save(store, 1)
    store.protect("best", 1)
    small_run.save(store, 2)
    assert small_run.names() == ["step_000001", "step_000002"]
    store.protect("best", 2)
    small_run.save(store, 3)
    assert small_run.names() == ["step_000002", "step_000003"]
    store.protect("best", None)
    small_run.save(store, 4)
    assert small_run.names() == ["step_000004"]


def test_what_a_dead_process_of_another_run_left_is_not_touched(small_run) -> None:
    store = small_run.store()
    no_such_process = 999_999_999
    theirs = [
        small_run.directory / f"{prefix}step_000004-{no_such_process}-{run_tag('other')}"
        for prefix in (".staging-", "dead_", "dead_replaced_")
    ]
    ours = [path.with_name(path.name.replace(run_tag("other"), run_tag(small_run.run_id))) for path in theirs[:2]]
    for path in theirs + ours:
        path.mkdir()
        (path / "file").write_text(path.name)
    small_run.save(store, 5)
    assert [(path / "file").read_text() for path in theirs] == [path.name for path in theirs]
    assert not any(path.exists() for path in ours)
