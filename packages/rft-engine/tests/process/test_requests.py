"""Results of an engine's process as JSON: what is a sample of a call, and each way in which one is not."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from rft_core.errors import ServiceError
from rft_engine.completions import Completion
from rft_engine.process.requests import (
    Answers,
    GenerateCall,
    SampleResult,
    StepCounts,
    completion_of,
    fault_of_tokens,
    is_integer,
    message_of,
)

VOCAB = 7
CALL = GenerateCall(
    version=3,
    options={"max_new_tokens": 4, "stop_token_ids": [0, 5]},
    keys=[10, 11, 12],
    prompts=[[1], [2]],
    requests=[(0, 0), (2, 1)],
    budgets=[4, 4, 2],
)
WHOLE = SampleResult(0, [1, 2, 3, 6], [-1.0, -2.0, -0.5, 0], [0.0, -0.1, 0.0, 0.0], "length", 3)
STOPPED = SampleResult(0, [1, 5], [-1.0, -2.0], [0.0, -0.1], "stop", 3)


def cut(result: SampleResult, num: int, **changes: Any) -> SampleResult:
    """The first tokens of a result."""
    lists = {name: getattr(result, name)[:num] for name in ("token_ids", "logprobs", "log_kept_mass")}
    return replace(result, **(lists | changes))


def test_a_result_becomes_a_completion() -> None:
    assert completion_of(WHOLE, CALL, VOCAB) == Completion(
        (1, 2, 3, 6), (-1.0, -2.0, -0.5, 0), (0.0, -0.1, 0.0, 0.0), "length", 3
    )
    assert completion_of(STOPPED, CALL, VOCAB) == Completion((1, 5), (-1.0, -2.0), (0.0, -0.1), "stop", 3)


@pytest.mark.parametrize(
    ("result", "is_sample"),
    [
        (replace(WHOLE, token_ids=[6, 6, 6, 6]), True),
        (replace(WHOLE, token_ids=[1, 1, 1, 1]), True),
        (replace(WHOLE, token_ids=[1, 2, 3, 0], finish_reason="stop"), True),
        (replace(STOPPED, token_ids=[0, 0]), True),
        (cut(STOPPED, 1, token_ids=[0]), True),
        (replace(WHOLE, logprobs=[0.0, 1e-3, 0.0, -9]), True),
        (replace(WHOLE, logprobs=[0.0, 1.05e-3, 0.0, -9]), False),
        (replace(WHOLE, log_kept_mass=[0.0, 0.0, 0.0, 0.5]), False),
        (replace(WHOLE, logprobs=[-1.0, math.inf, -1.0, -1.0]), False),
        (replace(WHOLE, logprobs=[-1.0, True, -1.0, -1.0]), False),
        (replace(WHOLE, log_kept_mass=[-1.0, "0", -1.0, -1.0]), False),
        (replace(WHOLE, log_kept_mass=[-1.0, None, -1.0, -1.0]), False),
        (replace(WHOLE, token_ids=[1, 2, 3, VOCAB]), False),
        (replace(WHOLE, token_ids=[1, -1, 3, 6]), False),
        (replace(WHOLE, token_ids=[1, True, 3, 6]), False),
        (replace(WHOLE, token_ids=(1, 2, 3, 6)), False),  # type: ignore[arg-type]
        (replace(WHOLE, logprobs=None), False),  # type: ignore[arg-type]
        (replace(WHOLE, logprobs=[-1.0] * 3), False),
        (replace(WHOLE, log_kept_mass=[0.0] * 5), False),
        (cut(WHOLE, 0), False),
        (replace(cut(WHOLE, 4), token_ids=[1] * 5, logprobs=[-1.0] * 5, log_kept_mass=[0.0] * 5), False),
        (cut(WHOLE, 3), False),
        (cut(WHOLE, 1), False),
        (replace(WHOLE, finish_reason="stop"), False),
        (replace(STOPPED, finish_reason="length"), False),
        (replace(WHOLE, token_ids=[1, 2, 3, 0]), False),
        (replace(STOPPED, finish_reason="abort"), False),
        (replace(WHOLE, finish_reason="abort"), False),
        (replace(WHOLE, version=4), False),
        (replace(WHOLE, version=2), False),
        (replace(WHOLE, sample=2), False),
    ],
)
def test_what_can_be_a_sample_of_the_call(result: SampleResult, is_sample: bool) -> None:
    if is_sample:
        assert list(completion_of(result, CALL, VOCAB).token_ids) == result.token_ids
        return
    with pytest.raises(ServiceError) as caught:
        completion_of(result, CALL, VOCAB)
    assert caught.value.problem.code == "engine.garbage"


@pytest.mark.parametrize(
    ("result", "is_sample"),
    [
        (replace(WHOLE, finish_reason="stop"), True),
        (WHOLE, False),
        (cut(WHOLE, 3, finish_reason="stop"), False),
        (STOPPED, True),
        (replace(STOPPED, finish_reason="length"), False),
    ],
)
def test_a_sequence_of_the_greatest_length_of_a_constraint_is_whole(result: SampleResult, is_sample: bool) -> None:
    call = replace(CALL, constraint={"tokens": []})
    if is_sample:
        assert completion_of(result, call, VOCAB).finish_reason == "stop"
        return
    with pytest.raises(ServiceError):
        completion_of(result, call, VOCAB)


def test_without_budgets_every_sample_has_max_new_tokens() -> None:
    assert [replace(CALL, budgets=()).budget(sample) for sample in range(3)] == [4, 4, 4]
    assert [CALL.budget(sample) for sample in range(3)] == [4, 4, 2]


def test_answers_come_once_for_each_sample_that_was_asked_for() -> None:
    answers = Answers(CALL, VOCAB)
    second = cut(WHOLE, 2, sample=2)
    answers.add(second)
    with pytest.raises(ServiceError, match="sample 0 of 2 is missing"):
        answers.in_order()
    for wrong in (second, replace(WHOLE, sample=1), replace(WHOLE, sample=False), replace(WHOLE, sample=0.0)):  # type: ignore[arg-type]
        with pytest.raises(ServiceError) as caught:
            answers.add(wrong)
        assert caught.value.problem.code == "engine.garbage"
    answers.add(WHOLE)
    assert answers.in_order() == [completion_of(WHOLE, CALL, VOCAB), completion_of(second, CALL, VOCAB)]


def test_a_message_is_a_sample_or_the_counts() -> None:
    assert message_of(asdict(WHOLE)) == WHOLE
    assert message_of(asdict(StepCounts(1, 2, 3))) == StepCounts(1, 2, 3)
    counts = asdict(StepCounts(1, 2))
    for item in (counts | {"more": 1}, {"num_steps": 1}, {}, None, [1], asdict(WHOLE) | {"num_steps": 1}):
        with pytest.raises(ServiceError) as caught:
            message_of(item)
        assert caught.value.problem.code == "engine.garbage"


def test_lists_without_tokens_are_right_where_none_are_allowed_too() -> None:
    assert fault_of_tokens(([], [], []), range(3), VOCAB) == ""
    assert fault_of_tokens(([], [], []), range(1, 3), VOCAB)
    assert fault_of_tokens(([1], [0.0], []), range(3), VOCAB)
    assert fault_of_tokens(([1], [], [0.0]), range(3), VOCAB)
    assert [is_integer(value) for value in (0, 5, True, 1.0, None, "1")] == [True, True, False, False, False, False]
