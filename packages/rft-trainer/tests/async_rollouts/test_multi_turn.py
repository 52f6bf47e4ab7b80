"""Conversations ahead of the trainer: the synchronous run at staleness 0, true spans above it, kept through stops."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    STOP,
    VOCABULARY,
    AheadRun,
    Stopped,
    ThreadRank,
    run_on_ranks,
    trained_entries,
)

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import fault_points
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, uniforms
from rft_trainer.async_rollouts.multi_turn import ConversationSamples
from rft_trainer.async_rollouts.partial_conversation import ConversationDraft
from rft_trainer.async_rollouts.queue import AsyncConfig, AsyncRollouts
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.environments.episodes import BuiltinEpisodes, Episode, EpisodeRunner, Reply
from rft_trainer.environments.protocol import Answer, AssistantTurn, Environment, EnvironmentPrompt
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.loops.rl import StepConfig
from rft_trainer.records.rollouts import Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.conversation import ConversationLimits, ConversationStepper
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.rollouts.source import SyncRollouts
from rft_trainer.testing.async_engine import BigramAsyncEngine
from rft_trainer.testing.bigram import BigramPolicy, DigitDecoder

MOST, TURN, MAX_TURNS = 20, 4, 3
SHORT = replace(RULES, max_steps=8)
TRAINED = EVERY_ENTRY[:40]
SPEAKS = 5
SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=MOST, stop_token_ids=(STOP,))


class TokenText:
    """An opening, and an observation, is its contents' digits (2 for other words), then the token 5."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*(int(m["content"]) if m["content"].isdecimal() else 2 for m in messages), SPEAKS)

    observation = opening


class Repeats:
    """Opens by its key, says how many turns it has heard; a turn that begins with the prompt's digit earns 1."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> list[str]:
        self.label, self.heard = str(prompt.label), 0
        return [str(1 + key % 4)]

    def step(self, turn: AssistantTurn) -> Answer:
        self.heard += 1
        right = turn.text.split()[:1] == [self.label]
        return Answer([str(self.heard)], float(right), self.heard == MAX_TURNS, {"correctness": float(right)})


CALLS = ToolCallFormat(r"(?P<malformed>4 4)|(?P<arguments>never)")
TAKING = ConversationStepper(TokenText(), CALLS, ConversationLimits(9, TURN))


class ConversationRun(AheadRun):
    """A run whose samples are conversations."""

    def __init__(
        self,
        path: Path,
        staleness: int | None,
        *,
        make: Callable[[], Environment] = Repeats,
        runners: Sequence[EpisodeRunner] | None = None,
        rules: StepConfig = SHORT,
        **options: Any,
    ) -> None:
        self.runners: Sequence[EpisodeRunner] = runners or [BuiltinEpisodes(make) for _ in range(2)]
        super().__init__(path, staleness, rules=rules, **options)
        loop = self.loop
        source = loop.rollouts
        conversations = Conversations(source, DigitDecoder(), BuiltinEpisodes(make), TokenText(), CALLS, TAKING.limits)
        if staleness is None:
            assert isinstance(source, SyncRollouts)
            source.collector = RolloutCollector(
                source.engine, DigitDecoder(), self.reward, self.ranks,
                sampling=SAMPLING, group_size=GROUP, seed=SEED, conversations=conversations,
            )  # fmt: skip
        loop.evaluator = Evaluator(
            source, DigitDecoder(), self.reward, self.ranks, self.prompts[:5],
            sampling=replace(SAMPLING, temperature=0.0), conversations=conversations,
        )  # fmt: skip

    def _queue(self, ledger: Ledger, ahead: AsyncConfig) -> AsyncRollouts:
        kind = ConversationSamples(DigitDecoder(), self.runners, TAKING, MOST)
        return AsyncRollouts(
            self.engine, DigitDecoder(), self.reward, ledger, self.prompts,
            sampling=SAMPLING, rules=ahead, collectives=self.ranks, kind=kind,
        )  # fmt: skip


def bare(rollout: Rollout) -> Rollout:
    """Without the seconds that its environment took."""
    return replace(rollout, turns=tuple(replace(turn, seconds=0.0) for turn in rollout.turns))


def rollouts_of(run: AheadRun) -> list[Rollout]:
    return [bare(one) for step in sorted(run.groups) for group in run.groups[step] for one in group.rollouts]


def evaluations_of(run: AheadRun) -> list[dict[str, Any]]:
    rows = run.directory.read_evaluations().rows
    return [{name: value for name, value in row.items() if name != "time/elapsed"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> AheadRun:
    """A deterministic run that nothing stops."""
    return ConversationRun(tmp_path_factory.mktemp("whole") / "run", 2, deterministic=True).go()


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    fault_points.install(None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_at_staleness_0_conversations_are_those_of_the_synchronous_run_to_the_bit(
    tmp_path: Path, deterministic: bool
) -> None:
    plain = ConversationRun(tmp_path / "plain", None).go()
    queued = ConversationRun(tmp_path / "queued", 0, deterministic=deterministic).go()
    assert torch.equal(plain.policy.table, queued.policy.table)
    assert plain.rows() == queued.rows()
    assert rollouts_of(plain) == rollouts_of(queued)
    assert evaluations_of(plain) == evaluations_of(queued)
    lengths = {len(rollout.turns) for rollout in rollouts_of(plain)}
    assert max(lengths) == 2 * MAX_TURNS, "opening, turns, and what is between them"
    assert len(lengths) > 1


def test_every_token_is_that_of_the_version_that_it_is_labelled_with(tmp_path: Path) -> None:
    """Every sampled token again, turn by turn, from the table of its version with its own draw."""
    run = ConversationRun(tmp_path / "run", 2, pause=0.002).go()
    assert trained_entries(run) == TRAINED
    num_mixed = 0
    for step, groups in run.groups.items():
        for group in groups:
            for rollout in group.rollouts:
                assert max(step - 2, 0) <= rollout.weight_version <= rollout.newest_version <= step
                spans = rollout.version_spans or ((rollout.weight_version, rollout.num_sampled),)
                assert sum(num for _, num in spans) == rollout.num_sampled
                num_mixed += len(spans) > 1
                key = derive_key(SEED, "sample", group.epoch, group.position, rollout.sample_index)
                _check_tokens(run, rollout, key, iter([version for version, num in spans for _ in range(num)]))
    assert num_mixed > 0, "no conversation went on under new weights"


def _check_tokens(run: AheadRun, rollout: Rollout, key: int, versions: Iterator[int]) -> None:
    place, number = 0, 0
    for turn in rollout.turns:
        draws = uniforms([derive_key(key, "turn", number) if number else key], TURN)[0]
        for index in range(turn.num_tokens):
            token, logprob = rollout.completion_ids[place], rollout.behaviour_logprobs[place]
            if turn.sampled:
                table = run.tables_at(next(versions)).log_softmax(-1)[rollout.completion_ids[place - 1]]
                cumulative = table.double().exp().cumsum(0)
                assert token == int(torch.searchsorted(cumulative, draws[index] * cumulative[-1], right=True))
                assert logprob == pytest.approx(float(table[token]), abs=1e-12)
            else:
                assert logprob == 0.0
            place += 1
        number += turn.sampled


def test_a_deterministic_run_repeats_whatever_the_clock_and_the_number_of_threads_do(
    tmp_path: Path, whole: AheadRun
) -> None:
    runners = [BuiltinEpisodes(Repeats) for _ in range(3)]
    slow = ConversationRun(tmp_path / "slow", 2, deterministic=True, pause=0.002, runners=runners).go()
    assert torch.equal(slow.policy.table, whole.policy.table)
    assert slow.rows() == whole.rows()
    assert rollouts_of(slow) == rollouts_of(whole)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("point", "nth"), [("rl.updated", 9), ("async.group_drawn", 23), ("rl.logged", 6)])
def test_a_run_killed_and_resumed_trains_every_prompt_once(
    tmp_path: Path, whole: AheadRun, point: str, nth: int, deterministic: bool
) -> None:
    first = ConversationRun(tmp_path / "first", 2, deterministic=deterministic, pause=0.001)
    passed = Counter[str]()

    def kill(name: str) -> None:
        passed[name] += 1
        if name == point and passed[name] == nth:
            raise Stopped(name)

    fault_points.install(kill)
    with pytest.raises(Stopped):
        first.go()
    fault_points.install(None)
    second = ConversationRun(tmp_path / "second", 2, deterministic=deterministic, pause=0.001).resume_from(first).go()
    assert trained_entries(first, second) == TRAINED
    if deterministic:
        assert torch.equal(second.policy.table, whole.policy.table)
        kept = first.rows()[: first.writer.saved[-1][0]]
        assert kept + second.rows() == whole.rows()


def test_two_ranks_train_the_conversations_of_one(tmp_path: Path, whole: AheadRun) -> None:
    def work(rank: ThreadRank) -> AheadRun:
        return ConversationRun(tmp_path / f"rank{rank.rank}", 2, deterministic=True, collectives=rank).go()

    for run in run_on_ranks(2, work):
        assert isinstance(run, ConversationRun), run
        for ours, one in zip(rollouts_of(run), rollouts_of(whole), strict=True):
            # the sums of the ranks are those of one up to their order
            assert ours.behaviour_logprobs == pytest.approx(one.behaviour_logprobs, rel=1e-9)
            assert replace(ours, behaviour_logprobs=one.behaviour_logprobs) == one
        assert torch.allclose(run.policy.table, whole.policy.table, rtol=1e-10, atol=1e-12)


# -- one group by hand, without threads


def answered(kind: ConversationSamples, drafts: Sequence[ConversationDraft]) -> None:
    """What the answering threads do."""
    for worker_index in range(kind.answers):
        if asking := [draft for draft in drafts if draft.awaits_environment and draft.worker_index == worker_index]:
            kind.answer(asking)()


def begun(kind: ConversationSamples, states: Sequence[Mapping[str, Any]] | None = None) -> list[ConversationDraft]:
    keys = [101, 102, 103, 104]
    drafts = kind.begin(PROMPTS[2], keys) if states is None else kind.restore(PROMPTS[2], keys, states)
    return [draft for draft in drafts if isinstance(draft, ConversationDraft)]


def draw(drafts: Sequence[ConversationDraft], engine: BigramAsyncEngine, rounds: int = 99) -> None:
    """As far as the engine comes in so many rounds of tokens."""
    going = [draft for draft in drafts if draft.needs_generation]
    asked = [draft.request(PROMPTS[2]) for draft in going]
    looks = itertools.count()
    for one in engine.draw(
        [one.prefix for one in asked],
        [one.key for one in asked],
        [one.start for one in asked],
        [one.budget for one in asked],
        SAMPLING,
        stop=lambda: next(looks) >= rounds,
    ):
        going[one.request].add(one)


def finished(
    kind: ConversationSamples, drafts: Sequence[ConversationDraft], engine: BigramAsyncEngine
) -> list[Rollout]:
    for _ in range(50):
        answered(kind, drafts)
        draw(drafts, engine)
    return [bare(one) for one in kind.rollouts([(PROMPTS[2], drafts)])[0]]


def samples_of(make: Callable[[], Environment] = Repeats) -> ConversationSamples:
    return ConversationSamples(DigitDecoder(), [BuiltinEpisodes(make), BuiltinEpisodes(make)], TAKING, MOST)


def expected(engine: BigramAsyncEngine) -> list[Rollout]:
    kind = samples_of()
    return finished(kind, begun(kind), engine)


@pytest.mark.parametrize("waits", [1, 2, 3, 5, 8])
def test_a_conversation_in_flight_goes_on_from_a_checkpoint_where_it_was(waits: int) -> None:
    engine = BigramAsyncEngine(BigramPolicy(VOCABULARY, dtype=torch.float64))
    kind = samples_of()
    drafts = begun(kind)
    for number in range(waits):
        answered(kind, drafts)
        draw(drafts, engine, rounds=2)
        if number == waits - 1 and waits % 2:
            answered(kind, drafts)  # some are asking in the one case, drawn on in the other
    states = json.loads(json.dumps([draft.state() for draft in drafts]))
    before = [len(draft.conversation.token_ids) + len(draft.turn.token_ids if draft.turn else ()) for draft in drafts]
    assert all(before)
    again = samples_of()
    restored = begun(again, states)
    states_again = json.loads(json.dumps([draft.state() for draft in restored]))
    assert states_again == states, "a second stop before anything went on"
    calls = len(engine.calls)
    assert finished(again, restored, engine) == expected(engine)
    started = [draft.state()["spans"] for draft in restored]
    assert all(sum(num for _, num in spans) for spans in started)
    assert len(engine.calls) > calls


class Forgetful(Repeats):
    """Another one every time that it is made."""

    made = itertools.count()

    def reset(self, prompt: EnvironmentPrompt, key: int) -> list[str]:
        super().reset(prompt, key)
        self.number = next(self.made)
        return ["3"]

    def step(self, turn: AssistantTurn) -> Answer:
        answer = super().step(turn)
        return replace(answer, reward=answer.reward + self.number)


def test_an_environment_that_answers_otherwise_than_it_did_begins_its_conversation_again() -> None:
    engine = BigramAsyncEngine(BigramPolicy(VOCABULARY, dtype=torch.float64))
    kind = samples_of(Forgetful)
    drafts = begun(kind)
    for _ in range(2):
        answered(kind, drafts)
        draw(drafts, engine)
    states = json.loads(json.dumps([draft.state() for draft in drafts]))
    assert all(draft.conversation.num_sampled_turns for draft in drafts)
    engine.load_weights(1)
    again = samples_of(Forgetful)
    restored = begun(again, states)
    going = [index for index, draft in enumerate(restored) if not draft.is_complete]
    assert going
    answered(again, restored)
    for index in going:
        assert restored[index].state()["spans"] == [], "nothing of the old conversation is left"
    for index, rollout in enumerate(finished(again, restored, engine)):
        assert rollout.weight_version == (1 if index in going else 0)
        assert rollout.status is RewardStatus.OK


def test_calls_that_cannot_be_read_are_answered_without_the_environment_and_kept_apart_after_a_stop() -> None:
    policy = BigramPolicy(VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        policy.table[:, 4] = 6.0  # "4 4" in nearly every turn

    engine = BigramAsyncEngine(policy)
    kind = ConversationSamples(DigitDecoder(), [BuiltinEpisodes(Repeats)], TAKING, MOST)
    drafts = begun(kind)
    answered(kind, drafts)
    draw(drafts, engine)
    answered(kind, drafts)
    malformed = [draft for draft in drafts if draft.conversation.turns[1].num_malformed]
    assert malformed
    for draft in malformed:
        assert draft.conversation.episode.turns == []
        assert len(draft.recorded) == 1


# -- threads


class Gate:
    """A worker whose first episode's turn waits until the other worker has answered many."""

    tools = ()

    def __init__(self, released: threading.Event, opens: bool) -> None:
        self.inner, self.released, self.opens, self.count = BuiltinEpisodes(Repeats), released, opens, 0

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        return self.inner.reset(episodes, oldest)

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        self.count += len(episodes)
        if self.opens and self.count > 20:
            self.released.set()
        elif not self.opens:
            assert self.released.wait(20.0), "the other worker was held up"
        return self.inner.step(episodes)

    def close(self) -> None:
        self.inner.close()


def test_a_tool_that_takes_long_holds_up_the_conversations_of_its_process_alone(tmp_path: Path) -> None:
    released = threading.Event()
    runners: list[EpisodeRunner] = [Gate(released, opens=True), Gate(released, opens=False)]
    run = ConversationRun(tmp_path / "run", 2, runners=runners, rules=replace(RULES, max_steps=6)).go()
    assert len(run.groups) == 6
    assert released.is_set()


class Broken:
    """No episode can be begun."""

    tools = ()

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        fine = Reply(RewardStatus.OK, Answer())
        lost = Reply(RewardStatus.CRASHED, detail="lost")
        return [lost if episode.key % 3 == 0 else fine for episode in episodes]

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        late = Reply(RewardStatus.TIMEOUT, detail="late")
        fine = Reply(RewardStatus.OK, Answer(reward=0.5, done=True))
        return [late if episode.key % 3 == 1 else fine for episode in episodes]

    def close(self) -> None: ...


def test_what_went_wrong_is_a_status_and_no_number_and_nothing_waits_for_it(tmp_path: Path) -> None:
    rules = replace(SHORT, max_unscored_share=1.0)
    run = ConversationRun(tmp_path / "run", 2, runners=[Broken()], rules=rules, episodes=2).go()
    statuses = Counter(rollout.status for rollout in rollouts_of(run))
    assert set(statuses) == {RewardStatus.OK, RewardStatus.CRASHED, RewardStatus.TIMEOUT}
    for rollout in rollouts_of(run):
        assert (rollout.reward is None) == (rollout.status is not RewardStatus.OK)
    assert max(row["async/staleness_max"] for row in run.directory.read_metrics().rows) <= 2


def test_an_opening_without_room_is_raised_in_the_thread_that_trains(tmp_path: Path) -> None:
    class Talkative(Repeats):
        def reset(self, prompt: EnvironmentPrompt, key: int) -> list[str]:
            super().reset(prompt, key)
            return ["1"] * MOST

    with pytest.raises(OptionsError) as caught:
        ConversationRun(tmp_path / "run", 1, make=Talkative).go()
    assert caught.value.problem.code == "environment.no_room"


def test_an_environment_forgets_what_is_below_the_oldest_that_goes_on() -> None:
    runner = BuiltinEpisodes(Repeats)
    told = EnvironmentPrompt("p", "1", "1")
    old, middle, new = (Episode(number, told, 0) for number in (3, 5, 9))
    runner.reset([old, middle])
    runner.reset([new], oldest=5)
    assert set(runner._open) == {5, 9}
    runner.reset([Episode(12, told, 0)])
    assert set(runner._open) == {12}
