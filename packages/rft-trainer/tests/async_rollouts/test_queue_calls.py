"""What the trainer's thread asks of a queue, with the other threads played by the test: nothing runs beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from thread_doubles import Asking, Kind, Steps, drawn

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import fault_points
from rft_core.errors import CheckpointError, PeerError
from rft_core.exact_records import value_of_line
from rft_core.keyed_random import derive_key
from rft_trainer.async_rollouts import queue as queue_module
from rft_trainer.async_rollouts.partial_rollout import PartialGroup, PartialSample
from rft_trainer.async_rollouts.protocols import PartialRollout
from rft_trainer.async_rollouts.queue import AsyncConfig, AsyncRollouts
from rft_trainer.async_rollouts.shared_state import SharedState
from rft_trainer.batches.prompt_ledger import EntryState, Ledger, LedgerEntry
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.testing.bigram import DigitDecoder, OneRank

PROMPTS = [Prompt(f"p:{n}", (n,), str(n), None, "p") for n in range(6)]
SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=5, stop_token_ids=(0,))
RULES = AsyncConfig(max_staleness=1, deterministic=False, prompts_per_step=2, max_steps=0, group_size=2, seed=3)


class Samples(Kind):
    """Single samples without a decoder or a reward."""

    answers = 0

    def begin(self, prompt: Prompt, keys: Sequence[int]) -> list[PartialRollout]:
        return [PartialSample(key, 9) for key in keys]

    def restore(self, prompt: Prompt, keys: Sequence[int], states: Sequence[Mapping[str, Any]]) -> list[PartialRollout]:
        return [PartialSample.of(state) for state in states]


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def publish(self, version: int) -> None:
        self.log.append(("publish", version))

    def generate(self, *given: Any, **options: Any) -> str:
        self.log.append((given, options))
        return "answers"

    def counters(self) -> dict[str, float]:
        return {"engine/x": 2.0, "engine/y_share": 0.5}

    def close(self) -> None:
        self.log.append("engine closed")


class Board(SharedState):
    """Starts no thread; `play` stands for all of them while the trainer waits."""

    made: Board

    def __init__(self, patience: float) -> None:
        super().__init__(patience)
        self.changed = Steps(last=lambda: None)
        self.loops: list[list[str]] = []
        self.play: Callable[[], None] = lambda: None
        self.log: list[str] = []
        self.patience = patience
        Board.made = self

    def start(self, loops: Mapping[str, Callable[[], None]]) -> None:
        self.loops.append(list(loops))

    def wait(self, holds: Callable[[], bool], what: str, *, despite_outage: bool = False) -> None:
        self.play()
        assert holds(), what

    def close(self) -> None:
        self.log.append("board closed")


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(queue_module, "SharedState", Board)
    yield
    fault_points.install(None)


class Made:
    """A queue with its engine and its shared state."""

    def __init__(
        self, *, ledger: Ledger | None = None, kind: Any = None, collectives: Any = None, **rules: Any
    ) -> None:
        self.ledger = ledger or Ledger(6, 2, lambda _: range(6), data_hash="", seed=0)
        self.engine: Any = Engine()
        self.now = 0.0
        self.queue = AsyncRollouts(
            self.engine,
            DigitDecoder(),
            lambda items: [],
            self.ledger,
            PROMPTS,
            sampling=SAMPLING,
            rules=replace(RULES, **rules),
            collectives=collectives,
            kind=kind or Samples(),
            clock=lambda: self.now,
        )
        self.board = Board.made

    def plan(self) -> list[tuple[int, int, int]]:
        """(position, batch, version) of everything that is in flight."""
        return [(group.entry.position, group.batch, group.version) for group in self.board.groups.values()]

    def collect(self, entries: Sequence[LedgerEntry]) -> list[RolloutGroup]:
        self.board.play = lambda: score(self.board, entries)
        return self.queue.collect(entries, [PROMPTS[entry.prompt_index] for entry in entries], PhaseTimer())

    def step(self, version: int) -> None:
        """Reserve, collect, and publish the weights of the step."""
        self.collect(self.queue.reserve(2))
        self.queue.load_weights(version)


def rollout(prompt_id: str, *spans: tuple[int, int], sampled: int = 0) -> Rollout:
    num = sum(number for _, number in spans) or sampled
    zeros = (0.0,) * num
    version = spans[0][0] if spans else 0
    more = spans if len(spans) > 1 else ()
    return Rollout(
        prompt_id, 0, (1,) * num, zeros, zeros, "stop", version, "", 1.0, RewardStatus.OK, version_spans=more
    )


def score(board: SharedState, entries: Sequence[LedgerEntry], version: int = 0) -> None:
    """Give these entries their rewards."""
    for entry in entries:
        group = board.groups[entry]
        scored = (rollout(group.prompt.prompt_id, (version, 1)),)
        group.group = RolloutGroup(group.prompt, entry.epoch, entry.position, scored)


@pytest.mark.parametrize(
    ("staleness", "ahead"),
    [(0, []), (1, [(0, 1, 0), (1, 1, 0), (2, 2, 0), (3, 2, 0)]), (2, [(n, n // 2 + 1, 0) for n in range(6)])],
)
def test_a_step_is_reserved_with_the_steps_that_run_ahead_of_it(
    staleness: int, ahead: list[tuple[int, int, int]]
) -> None:
    made = Made(max_staleness=staleness)
    assert [entry.position for entry in made.queue.reserve(2)] == [0, 1]
    assert made.plan() == ahead
    assert len(made.board.loops) == len(ahead) // 2
    assert all(loops == ["rollouts", "scoring"] for loops in made.board.loops)
    assert made.board.generation == len(ahead) // 2, "a running draw is told of each"


def test_another_number_of_prompts_than_planned_is_an_error() -> None:
    with pytest.raises(AssertionError):
        Made().queue.reserve(3)


def test_every_version_releases_one_step_more_with_the_oldest_weights_that_it_may_have() -> None:
    made = Made(max_staleness=2, ledger=Ledger(6, 3, lambda _: range(6), data_hash="", seed=0))
    made.step(1)
    assert [(batch, version) for _, batch, version in made.plan()] == [(2, 0), (2, 0), (3, 0), (3, 0), (4, 1), (4, 1)]
    made.step(2)
    assert [(batch, version) for _, batch, version in made.plan()] == [(3, 0), (3, 0), (4, 1), (4, 1), (5, 2), (5, 2)]
    assert made.engine.log == [("publish", 1), ("publish", 2)]
    assert made.board.version == 2


def test_samples_have_the_keys_of_their_place() -> None:
    made = Made()
    made.queue.reserve(2)
    entry, group = list(made.board.groups.items())[1]
    assert [draft.key for draft in group.drafts if isinstance(draft, PartialSample)] == [
        derive_key(3, "sample", 0, 1, index) for index in range(2)
    ]
    assert group.prompt is PROMPTS[entry.prompt_index]


def test_nothing_is_reserved_behind_the_last_step_or_the_last_epoch() -> None:
    made = Made(max_staleness=4, max_steps=2)
    made.queue.reserve(2)
    assert [place for place, _, _ in made.plan()] == [0, 1, 2, 3]
    made = Made(max_staleness=4, ledger=Ledger(3, 1, lambda _: range(3), data_hash="", seed=0))
    assert len(made.queue.reserve(2)) == 2
    assert [place for place, _, _ in made.plan()] == [0, 1, 2]
    assert len(made.queue.reserve(2)) == 1
    assert made.queue.reserve(2) == []


def test_a_step_is_collected_in_its_order_and_dropped_when_its_weights_are_published() -> None:
    made = Made()
    entries = made.queue.reserve(2)
    groups = made.collect(list(reversed(entries)))
    assert [group.position for group in groups] == [1, 0]
    assert len(made.board.groups) == 4, "a checkpoint before the publication holds them"
    passed: list[tuple[str, int]] = []
    fault_points.install(lambda name: passed.append((name, len(made.board.groups))))
    before = made.board.generation
    made.queue.load_weights(1)
    assert passed == [("async.published", 4)]
    assert [place for place, _, _ in made.plan()] == [2, 3, 4, 5]
    assert made.board.generation == before + 2, "for the new step, and for the new weights"


def test_a_prompt_that_is_not_in_flight_is_sampled_with_the_newest_weights() -> None:
    made = Made()
    made.step(1)
    extra = LedgerEntry(1, 5, 5)
    groups = made.collect([*made.queue.reserve(2), extra])
    assert [(group.epoch, group.position) for group in groups] == [(0, 2), (0, 3), (1, 5)]
    assert made.plan()[-1][2] == 1, "version 1"


def test_an_error_while_waiting_is_told_to_the_other_ranks() -> None:
    sent: list[bytes] = []

    class TwoRanks(OneRank):
        world_size = 2

        def gather_bytes(self, data: bytes) -> list[bytes]:
            sent.append(data)
            raise PeerError(code="x", what="gone", where="", why="")

    made = Made(collectives=TwoRanks())

    def fails() -> None:
        raise OSError("broken")

    entries = made.queue.reserve(2)
    assert [place for place, _, _ in made.plan()] == [0, 2], "the other rank has the odd places"
    made.board.play = fails
    with pytest.raises(OSError, match="broken"):
        made.queue.collect(entries, PROMPTS[:2], PhaseTimer())
    assert len(sent) == 1
    assert b"broken" in sent[0]


def test_an_evaluation_is_a_request_of_the_present_version() -> None:
    made = Made()
    made.queue.load_weights(4)
    made.engine.log.clear()

    def carry_out() -> None:
        request = made.board.requests.popleft()
        assert request.version == 4
        request.result, request.is_done = request.run(), True

    made.board.play = carry_out
    before = made.board.generation
    options = {"budgets": [[1]], "constraint": None, "media": ["image"]}
    assert made.queue.generate([[1]], [[2]], SAMPLING, budgets=[[1]], media=["image"]) == "answers"
    assert made.engine.log == [(([[1]], [[2]], SAMPLING), options)]
    assert made.board.generation == before + 1, "a running draw makes room"
    assert made.board.loops == [["rollouts", "scoring"]]

    def refuse() -> None:
        request = made.board.requests.popleft()
        request.error, request.is_done = OSError("broken"), True

    made.board.play = refuse
    with pytest.raises(OSError, match="broken"):
        made.queue.generate([[1]], [[2]], SAMPLING)


def test_samples_that_ask_have_a_thread_for_each_of_their_workers() -> None:
    class Talks(Samples):
        answers = 2

    made = Made(kind=Talks())
    made.queue.reserve(2)
    assert made.board.loops[0] == ["rollouts", "scoring", "answering-0", "answering-1"]


def test_staleness_is_counted_by_tokens_and_what_is_ahead_by_groups() -> None:
    made = Made()
    entries = made.queue.reserve(2)
    made.collect(entries)
    made.board.version = 5
    score(made.board, [list(made.board.groups)[2]])
    groups = [
        RolloutGroup(PROMPTS[0], 0, 0, (rollout("p", (3, 2), (5, 6)), rollout("p", (4, 2)))),
        RolloutGroup(PROMPTS[1], 0, 1, (rollout("p", (5, 0), (1, 0)), rollout("p", (5, 10)))),
    ]
    assert made.queue.metrics(groups) == {
        "async/staleness_mean": (2 * 2 + 1 * 2) / 20,
        "async/staleness_max": 2,
        "async/mixed_share": 0.5,
        "time/groups_ahead": 1.0,
        "engine/x": 2.0,
        "engine/y_share": 0.5,
    }
    made.now = 4.0
    assert made.queue.metrics(groups)["time/engine_tokens_per_second"] == 20 / 4.0
    empty = [RolloutGroup(PROMPTS[0], 0, 0, (rollout("p", sampled=0),))]
    found = made.queue.metrics(empty)
    assert (found["async/staleness_mean"], found["async/staleness_max"], found["async/mixed_share"]) == (0.0, 0, 0.0)


def test_threads_end_before_the_engines_that_they_call() -> None:
    made = Made(patience=7.0)
    made.engine.log = made.board.log
    made.queue.sleep()
    made.queue.wake()
    made.queue.close()
    assert made.board.log == ["board closed", "engine closed"]
    assert made.board.patience == 7.0


def rows_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [value_of_line(line.encode()) for line in state["groups"]]


def test_samples_in_flight_go_on_after_a_resume_unless_they_are_too_old() -> None:
    first = Made()
    first.queue.reserve(2)
    groups = list(first.board.groups.values())
    for group, version in zip(groups, (1, 0, 2, 2), strict=True):
        for draft in group.drafts:
            draft.add(drawn(0, (4, 5), "interrupted", version))
    for draft in groups[2].drafts:
        draft.add(drawn(0, (6,), "stop", 2))
    score(first.board, [groups[3].entry], version=2)
    state = json.loads(json.dumps(first.queue.state()))
    assert len(state["groups"]) == 4

    second = Made()
    second.queue.load_state(state)
    second.queue.load_weights(2)
    entries = second.queue.reserve(2)
    kept = {group.entry.position: group for group in second.board.groups.values()}
    tokens = {place: [draft.token_ids for draft in kept[place].drafts] for place in (0, 1, 2)}  # type: ignore[attr-defined]
    assert tokens == {0: [[4, 5]] * 2, 1: [[], []], 2: [[4, 5, 6]] * 2}, "version 0 is too old for step 2"
    assert kept[3].group == groups[3].group
    assert [group.entry.position for group in second.board.to_score] == [2], "whole, and without its rewards"
    assert {version for _, _, version in second.plan()} == {2}, "no older weights than those of the checkpoint"
    assert [entry.position for entry in entries] == [0, 1]


def test_a_save_before_the_first_step_after_a_resume_has_the_samples_that_were_restored() -> None:
    first = Made(deterministic=True)
    trained = first.queue.reserve(2)
    first.collect(trained)
    first.queue.load_weights(1)
    score(first.board, [group.entry for group in first.board.groups.values() if group.version == 0])
    first.board.play = lambda: None
    state = first.queue.state()
    assert [row["entry"][1] for row in rows_of(state)] == [2, 3]

    second = Made(deterministic=True)
    second.queue.load_state(json.loads(json.dumps(state)))
    second.queue.load_weights(1)
    assert json.dumps(second.queue.state()) == json.dumps(state)
    # handed out they are counted once
    for each in (EntryState.GENERATED, EntryState.SCORED, EntryState.TRAINED):
        first.ledger.advance(trained, each)
    second.ledger.load_state(first.ledger.state())
    second.queue.reserve(2)
    second.board.play = lambda: None
    assert [row["entry"][1] for row in rows_of(second.queue.state())] == [2, 3]


def test_a_state_of_another_form_is_refused() -> None:
    made = Made()
    for state in ({}, {"form": 3, "groups": []}, {"form": "1", "groups": []}, {"form": True, "groups": []}):
        with pytest.raises(CheckpointError) as caught:
            made.queue.load_state(state)
        assert caught.value.problem.code == "checkpoint.rollouts_ahead"
    for form in (1, 2):
        made.queue.load_state({"form": form, "groups": []})


@pytest.mark.parametrize("line", ["", "[0.5]", '{"entry": [0, 0, 0.5]}', "{}", "[]", 3, '{"entry": [0.0]}\tAAAA'])
def test_a_stored_group_that_is_no_line_of_its_floats_is_refused(line: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        Made().queue.load_state({"form": 2, "groups": [line]})
    assert caught.value.problem.code == "checkpoint.rollouts_ahead"


def test_groups_of_a_checkpoint_of_the_first_form_go_on() -> None:
    first = Made()
    first.queue.reserve(2)
    for draft in next(iter(first.board.groups.values())).drafts:
        draft.add(drawn(0, (4, 5), "interrupted", 0))
    state = first.queue.state()
    old, new = Made(), Made()
    old.queue.load_state(json.loads(json.dumps({"form": 1, "groups": rows_of(state)})))
    new.queue.load_state(state)
    assert old.queue.state() == new.queue.state() == state


def test_only_the_first_rank_gives_the_state_of_all() -> None:
    class Rank(OneRank):
        world_size = 2

        def gather_bytes(self, data: bytes) -> list[bytes]:
            return [data, data]

    for rank in (0, 1):
        ranks = Rank()
        ranks.rank = rank  # type: ignore[misc]
        made = Made(collectives=ranks)
        made.queue.reserve(2)
        state = made.queue.state()
        assert (len(state["groups"]), state["form"]) == (4, 2) if rank == 0 else state == {}


def test_a_deterministic_run_keeps_whole_steps_alone_and_waits_for_those_of_older_weights() -> None:
    made = Made(deterministic=True)
    entries = made.queue.reserve(2)
    made.collect(entries)
    made.queue.load_weights(1)
    older = [group for group in made.board.groups.values() if group.version < 1]
    newest = [group for group in made.board.groups.values() if group.version == 1]
    assert (len(older), len(newest)) == (2, 2)
    made.board.play = lambda: score(made.board, [older[0].entry])
    with pytest.raises(AssertionError):
        made.queue.state()

    def play() -> None:
        score(made.board, [older[1].entry, newest[0].entry])

    made.board.play = play
    places = [row["entry"][1] for row in rows_of(made.queue.state())]
    assert places == [group.entry.position for group in older], "half of the newest step is drawn again"


def test_a_run_that_keeps_samples_keeps_those_that_are_not_whole() -> None:
    made = Made()
    made.queue.reserve(2)

    def never() -> None:
        raise AssertionError("nothing is waited for")

    made.board.play = never
    assert len(made.queue.state()["groups"]) == 4


def test_a_deterministic_run_that_has_not_begun_waits_for_nothing() -> None:
    made = Made(deterministic=True)
    made.board.version = 3
    entry = LedgerEntry(0, 0, 0)
    made.board.groups[entry] = PartialGroup(entry, PROMPTS[0], [Asking()], 1, 0)
    assert made.queue.state() == {"form": 2, "groups": []}
