"""Conversations in waves: exact tokens, masks, budgets, keys that do not depend on the wave, statuses that are no 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key
from rft_trainer.environments.episodes import BuiltinEpisodes, Episode, Reply
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn, sampled_mask, turn_rewards, turns_from_json
from rft_trainer.rollouts.multi_turn import ConversationLimits, Conversations, batch_turns
from rft_trainer.runs.conversation_metrics import conversation_metrics
from rft_trainer.runs.step_report import rollout_row
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, FakeCompletion

STOP, OPENS = 9, 7
PROMPTS = [Prompt("p:0", (1, 2), "p0", "3", "p"), Prompt("p:1", (1, 2, 3), "p1", "4", "p")]


class TokenText:
    """An opening is the token 7; an observation its contents' numbers, then 7."""

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*(int(m["content"]) if m["content"].isdecimal() else 0 for m in messages), OPENS)

    def observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return (*(int(m["content"]) if m["content"].isdecimal() else 0 for m in messages), OPENS)


@dataclass
class Scripted:
    """Says what a script has for (prompt's last token, turn), and keeps what it was asked."""

    script: Mapping[int, Sequence[Sequence[int]]]
    calls: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, prompts: Any, sample_keys: Any, options: Any, **asked: Any) -> list[list[FakeCompletion]]:
        self.calls.append({"prompts": [tuple(p) for p in prompts], "keys": sample_keys, "options": options, **asked})
        rows = zip(prompts, sample_keys, asked["budgets"], strict=True)
        return [[self._say(p, budget) for _, budget in zip(keys, budgets, strict=True)] for p, keys, budgets in rows]

    def _say(self, context: Sequence[int], budget: int) -> FakeCompletion:
        size = next(
            n for n in self.script if tuple(context[:n]) in {p.token_ids for p in PROMPTS} and context[n] == OPENS
        )
        tokens = tuple(self.script[size][sum(t == OPENS for t in context) - 1])
        reason = "stop" if len(tokens) <= budget and tokens[-1] == STOP else "length"
        tokens = tokens[:budget]
        return FakeCompletion(tokens, (-0.5,) * len(tokens), (-0.1,) * len(tokens), reason, 3)

    def load_weights(self, version: int) -> None: ...
    def sleep(self, level: int = 1) -> None: ...
    def wake(self) -> None: ...


class Counting:
    """Answers 5 and earns a tenth a turn; done where a turn says the label's digit."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> list[str]:
        self.label = prompt.label
        return []

    def step(self, turn: AssistantTurn) -> Answer:
        done = str(self.label) in turn.text.split()
        return Answer(["5"], reward=1.0 if done else 0.1, done=done, parts={"correctness": 1.0} if done else {})


def conversations(engine: Any, environment: Any = Counting, **limits: Any) -> Conversations:
    chosen = ConversationLimits(**({"max_turns": 4} | limits))
    runner = BuiltinEpisodes(environment) if isinstance(environment, type) else environment
    return Conversations(
        engine, DigitDecoder(), runner, TokenText(), ToolCallFormat(r"(?P<malformed>8)|(?P<arguments>6)"), chosen
    )


def sampling(max_new_tokens: int = 20) -> SamplingOptions:
    return SamplingOptions(temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=(STOP,))


def test_tokens_are_prompt_turns_and_observations_and_only_turns_are_learned() -> None:
    engine = Scripted({2: [(4, STOP), (3, STOP)], 3: [(4, STOP)]})
    [[one], [two]] = conversations(engine).sample(PROMPTS, [[11], [12]], sampling())
    assert one.completion_ids == (OPENS, 4, STOP, 5, OPENS, 3, STOP)
    assert one.loss_mask == (False, True, True, False, False, True, True)
    assert one.behaviour_logprobs == (0.0, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5)
    assert one.log_kept_mass == (0.0, -0.1, -0.1, 0.0, 0.0, -0.1, -0.1)
    assert one.reward == pytest.approx(1.1)
    assert one.steps == ((2, 0.1), (6, 1.0))
    assert one.breakdown == {"correctness": 1.0}
    assert (one.finish_reason, one.num_sampled, one.weight_version) == ("stop", 4, 3)
    assert two.completion_ids == (OPENS, 4, STOP)
    assert engine.calls[1]["prompts"] == [(1, 2, OPENS, 4, STOP, 5, OPENS)]  # what was sampled, as it was sampled


def test_the_turns_of_a_sample_have_keys_of_their_own_the_first_that_of_a_single_response() -> None:
    engine = Scripted({2: [(1, STOP)] * 4, 3: [(4, STOP)]})
    conversations(engine).sample(PROMPTS[:1], [[11, 12]], sampling())
    first, second = engine.calls[0], engine.calls[1]
    assert first["keys"] == [[11, 12]]  # one context, read once
    assert second["keys"] == [[derive_key(11, "turn", 1), derive_key(12, "turn", 1)]]


def test_tokens_do_not_depend_on_who_else_is_in_the_wave() -> None:
    policy = BigramPolicy(10)
    keys = [[101, 102, 103], [104, 105, 106]]
    together = conversations(BigramEngine(policy), max_turns=3).sample(PROMPTS, keys, sampling(12))
    for index, own in enumerate(keys):
        for number, key in enumerate(own):
            [[alone]] = conversations(BigramEngine(policy), max_turns=3).sample([PROMPTS[index]], [[key]], sampling(12))
            assert alone.completion_ids == together[index][number].completion_ids
    small = conversations(BigramEngine(policy), max_turns=3, room=16).sample(PROMPTS, keys, sampling(12))
    assert [[r.completion_ids for r in group] for group in small] == [[r.completion_ids for r in g] for g in together]


@pytest.mark.parametrize(
    ("limits", "most", "reason", "length"),
    [
        ({"max_turns": 2}, 20, "turns", 7),
        ({}, 6, "length", 6),  # the second turn has one token left, and ends without a stop token
        ({}, 5, "length", 3),  # no token would be left behind the observation
        ({"turn_max_len": 1}, 20, "length", 2),
    ],
)
def test_limits_end_a_conversation(limits: dict[str, int], most: int, reason: str, length: int) -> None:
    engine = Scripted({2: [(1, STOP)] * 8})
    [[one]] = conversations(engine, **limits).sample(PROMPTS[:1], [[1]], sampling(most))
    assert one.finish_reason == reason
    assert len(one.completion_ids) == length <= most
    assert one.status is RewardStatus.OK
    for call in engine.calls:
        longest = max(map(len, call["prompts"]))
        assert longest + call["options"].max_new_tokens <= 2 + most


def test_an_opening_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        conversations(Scripted({})).sample(PROMPTS[:1], [[1]], sampling(1))
    assert caught.value.problem.code == "environment.no_room"


def test_a_malformed_call_is_told_and_the_environment_is_not_asked() -> None:
    asked: list[str] = []

    class Listening(Counting):
        def step(self, turn: AssistantTurn) -> Answer:
            asked.append(turn.text)
            return super().step(turn)

    class Told(TokenText):
        seen: list[str] = []  # noqa: RUF012

        def observation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
            self.seen += [m["content"] for m in messages]
            return (0, OPENS)

    engine = Scripted({2: [(8, STOP), (6, STOP), (3, STOP)]})
    held = conversations(engine, Listening)
    held._taking._text = Told()
    [[one]] = held.sample(PROMPTS[:1], [[1]], sampling())
    assert "cannot be read" in Told.seen[0]
    assert asked == ["6 9", "3 9"]
    assert [(t.num_calls, t.num_malformed) for t in one.turns if t.sampled] == [(0, 1), (1, 0), (0, 0)]
    metrics = conversation_metrics([one])
    assert metrics["tool/well_formed_share"] == 0.5
    assert metrics["turn/call_share"] == pytest.approx(1 / 3)
    assert metrics["turn/count_mean"] == 3


class Failing:
    """Times out at the second turn of the first prompt."""

    tools = ()

    def reset(self, episodes: Sequence[Episode]) -> list[Reply]:
        return [Reply(RewardStatus.OK, Answer()) for _ in episodes]

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        late = Reply(RewardStatus.TIMEOUT, detail="no answer within 1 s", seconds=1.0)
        fine = Reply(RewardStatus.OK, Answer([{"role": "user", "content": "5"}], reward=0.5))
        return [late if e.prompt.prompt_id == "p:0" and len(e.turns) == 2 else fine for e in episodes]

    def close(self) -> None: ...


def test_what_went_wrong_is_a_status_and_no_number_and_the_others_go_on() -> None:
    engine = Scripted({2: [(1, STOP)] * 4, 3: [(1, STOP)] * 4})
    [[one], [two]] = conversations(engine, Failing(), max_turns=3).sample(PROMPTS, [[1], [2]], sampling())
    assert (one.reward, one.status, one.finish_reason) == (None, RewardStatus.TIMEOUT, "environment")
    assert one.detail == "no answer within 1 s"
    assert two.reward == pytest.approx(1.5)
    metrics = conversation_metrics([one, two])
    assert (metrics["environment/timeout_share"], metrics["environment/ok_share"]) == (0.5, 0.5)
    assert metrics["turn/limit_share"] == 0.5
    row = rollout_row(PROMPTS[0], one)
    assert row["detail"] == "no answer within 1 s"
    assert [turn["who"] for turn in row["turns"]] == ["environment", "policy", "environment", "policy"]  # type: ignore[index]


def test_a_wave_is_cut_where_context_and_budget_would_pass_the_room() -> None:
    assert batch_turns([5, 3, 4], [2, 2, 2], 9) == [[0, 2, 1]]
    assert batch_turns([8, 3, 4], [1, 6, 2], 9) == [[0], [2], [1]]
    for wave in batch_turns([8, 3, 4, 8], [1, 6, 5, 1], 9):
        assert max([8, 3, 4, 8][i] for i in wave) + max([1, 6, 5, 1][i] for i in wave) <= 9


def test_each_wave_has_the_largest_of_its_budgets_and_the_longest_context_goes_first() -> None:
    script = {2: [(4, STOP), (3, STOP)], 3: [(1, 1, 1, STOP), (4, STOP)]}
    first, second = (1, 2, OPENS), (1, 2, 3, OPENS)
    later = (*first, 4, STOP, 5, OPENS), (*second, 1, 1, 1, STOP, 5, OPENS)
    opening = ([second, first], 11, [[11], [11]])
    apart = [([later[1]], 5, [[5]]), ([later[0]], 7, [[7]])]
    together = [([later[1], later[0]], 7, [[5], [7]])]
    # without a known room: that of the longest prompt with all tokens behind it, 3 + 12
    for room, turns in ((None, apart), (15, apart), (16, apart), (17, together)):
        engine = Scripted(script)
        conversations(engine, room=room).sample(PROMPTS, [[11], [12]], sampling(12))
        asked = [(call["prompts"], call["options"].max_new_tokens, call["budgets"]) for call in engine.calls]
        assert asked == [opening, *turns]


def test_contexts_of_equal_tokens_with_other_images_are_read_apart() -> None:
    media = ["two circles", "two squares"]
    prompts = [replace(PROMPTS[0], media=one) for one in media]
    engine = Scripted({2: [(3, STOP)]})
    conversations(engine).sample(prompts, [[11, 12], [13]], sampling())
    [call] = engine.calls
    assert call["prompts"] == [(1, 2, OPENS)] * 2
    assert (call["keys"], call["media"]) == ([[11, 12], [13]], media)


def test_what_the_environment_takes_is_time_of_tools() -> None:
    class Phases:
        entered: list[str | None] = []  # noqa: RUF012

        def enter_phase(self, name: str | None) -> None:
            self.entered.append(name)

        def end_step(self) -> None: ...

    runner, calls = BuiltinEpisodes(Counting), ToolCallFormat()
    timer = PhaseTimer(listener=Phases())
    limits = ConversationLimits(max_turns=4)
    engine = Scripted({2: [(4, STOP), (3, STOP)]})
    Conversations(engine, DigitDecoder(), runner, TokenText(), calls, limits, timer=timer).sample(
        PROMPTS[:1], [[1]], sampling()
    )
    assert Phases.entered == ["tools", None] * 3, "the opening and two turns"


def test_turns_go_through_json_and_know_their_places() -> None:
    turns = (Turn(False, 2, "x"), Turn(True, 3, "y", reward=0.5, num_calls=1), Turn(False, 1, ""), Turn(True, 1, "z"))
    assert turns_from_json([{name: getattr(t, name) for name in Turn.__slots__} for t in turns]) == turns
    assert sampled_mask(turns) == (False, False, True, True, True, False, True)
    assert turn_rewards(turns) == ((4, 0.5), (6, 0.0))


def test_turns_that_do_not_make_up_the_rollout_are_refused() -> None:
    with pytest.raises(ValueError, match="turns of"):
        Rollout("p", 0, (1, 2), (0.0, 0.0), (0.0, 0.0), "stop", 0, "", 0.0, RewardStatus.OK, turns=(Turn(True, 1, ""),))
