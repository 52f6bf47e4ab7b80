"""A run looked over before it starts: its data are read as the start would, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rft import check
from rft_core.errors import DataError, ServiceError
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.rewards.user_function import RewardTrial


def test_the_tools_of_an_environment_are_there_before_prompts_are_rendered(calls: Any) -> None:
    prompts = [SimpleNamespace(prompt_id=name, label="7", token_ids=ids) for name, ids in (("p", (4, 5)), ("q", (6,)))]
    data = SimpleNamespace(prompts=prompts, held_out=["held out"], all_prompts=lambda: [*prompts, "held out"])
    tokenizer = calls.double("tokenizer", decode=lambda ids: f"<{ids}>")
    calls.put(
        check,
        "model_facts enter_environment",
        check_reward=["a trial"],
        constraint_of=None,
        tokenizer_with_images=tokenizer,
        rl_data=data,
        ExitStack=calls.double("stack"),
    )
    settings = calls.double("settings", judge=SimpleNamespace(judge_pretrain=""))
    found = check.check_rl(settings, 4)
    assert calls.taken() == [
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "ExitStack()",
        "stack begins",
        "enter_environment(settings.conversation, tokenizer, stack)",
        "rl_data(settings, tokenizer, 4)",
        "stack ends",
        "constraint_of(settings, tokenizer)",
    ]
    assert (found.settings, found.tokenizer, found.data) == (settings, tokenizer, data)
    example = found.first_example()
    assert example.title == "prompt p as the model sees it (2 tokens; label '7'):"
    assert (example.pieces, example.learned) == (["<[4]>", "<[5]>", "<response>"], [False, False, True])
    [tried] = found.check_reward()
    assert tried.trial == "a trial"
    assert calls.taken() == [f"check_reward(settings, {[*prompts, 'held out']!r})"]
    # a judge that is not there would be found at the start alone
    settings.judge.judge_pretrain = "nowhere"
    with pytest.raises(DataError):
        found.check_reward()


def test_the_first_demonstration_is_shown_with_what_is_learned_of_it(calls: Any) -> None:
    sample = TrainingSample("s:0", (4, 5, 6, 7), 2, 0.0)
    tokenizer = calls.double("tokenizer", decode=lambda ids: f"<{ids}>")
    calls.put(
        check, "model_facts", tokenizer_with_images=tokenizer, sft_data=SimpleNamespace(samples=[sample, "other"])
    )
    found = check.check_sft(calls.double("settings"), 4)
    assert calls.taken() == [
        "tokenizer_with_images(settings.model, settings.images)",
        "model_facts(settings.model.pretrain)",
        "sft_data(settings, tokenizer, model_facts().max_positions)",
    ]
    example = found.first_example()
    assert example.title == "demonstration s:0 as the model sees it (4 tokens):"
    assert (example.pieces, example.learned) == (["<[4]>", "<[5]>", "<[6]>", "<[7]>"], [False, False, True, True])
    assert found.check_reward() == []
    assert calls.taken() == []


FAILED = Score(None, RewardStatus.FAILED, detail="KeyError: 3 (own.py:7)", failure="exception")


def tried(*scores: Score, **more: Any) -> check.TriedReward:
    values: dict[str, Any] = {"traceback": "", "printed": "", "arguments": {"response": "dcba", "level": 2}}
    values |= {"responses": ("dcba", "other"), "scores": scores, "place": "own.py:5"} | more
    return check.TriedReward(RewardTrial("def f(response, level)", **values))


def test_a_tried_reward_shows_arguments_values_and_output() -> None:
    assert tried(Score(1.5, breakdown={"form": 0.5}), FAILED, printed="hello").lines() == [
        "reward called on one row: def f(response, level)  (own.py:5)",
        '  response = "dcba"',
        "  level    = 2",
        "  \"dcba\" -> 1.5  {'form': 0.5}",
        '  "other" -> no score (exception): KeyError: 3 (own.py:7)',
        "printed, which in a run is in logs/reward-0.log:",
        "hello",
    ]
    assert tried(FAILED, FAILED, traceback="Traceback: own").lines()[-1] == "Traceback: own"
    assert tried(Score(1.0), Score(0.0), place="").lines()[0] == "reward called on one row: def f(response, level)"


def test_a_function_that_gave_no_score_at_all_is_refused() -> None:
    tried(FAILED, Score(0.0)).require_score()
    # a rule, whose label this row may lack
    tried(FAILED, FAILED, place="").require_score()
    with pytest.raises(ServiceError) as caught:
        tried(FAILED, FAILED).require_score()
    assert (caught.value.problem.code, caught.value.problem.where) == ("reward.trial", "own.py:5")
