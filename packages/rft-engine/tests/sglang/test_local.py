"""What goes to SGLang for one sample, what comes back as one, and the mass that top-k and top-p kept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.process.requests import SampleResult
from rft_engine.sglang.local import log_kept_mass, sample_of, sampling_params

DRAW = SamplingOptions(temperature=0.7, max_new_tokens=9, stop_token_ids=(0, 5))
TOP = SamplingOptions(temperature=0.7, max_new_tokens=9, top_k=3, top_p=0.6)


def test_a_sample_is_drawn_under_its_key_with_its_budget() -> None:
    plain = {"temperature": 0.7, "max_new_tokens": 4, "sampling_seed": 11}
    assert sampling_params(DRAW, 11, 4) == plain | {"stop_token_ids": [0, 5], "ignore_eos": False}
    without_stop = {"stop_token_ids": [], "ignore_eos": True}
    assert sampling_params(TOP, 11, 4) == plain | without_stop | {"top_k": 3, "top_p": 0.6}
    likeliest = SamplingOptions(temperature=0.7, max_new_tokens=9, top_k=1)
    assert sampling_params(likeliest, 11, 4) == plain | without_stop | {"top_k": 1, "top_p": 1.0}
    greedy = SamplingOptions(temperature=0.0, max_new_tokens=9, top_k=3)
    assert sampling_params(greedy, 11, 4) == plain | without_stop | {"temperature": 0.0}


ROWS = [(math.log(share), token, None) for token, share in ((4, 0.5), (1, 0.25), (6, 0.125), (2, 0.0625))]


@pytest.mark.parametrize(
    ("token", "top_p", "kept"),
    [
        (4, 1.0, 0.9375),
        (4, 0.8, 0.875),
        (4, 0.5, 0.75),
        (4, 0.4, 0.5),
        (1, 0.4, 0.75),
        (6, 0.4, 0.875),
        (2, 0.1, 0.9375),
        (3, 0.4, 0.5),
    ],
)
def test_a_token_is_kept_while_those_before_it_hold_at_most_top_p(token: int, top_p: float, kept: float) -> None:
    assert log_kept_mass(ROWS, token, top_p) == pytest.approx(math.log(kept))


def test_rounding_keeps_no_more_than_everything() -> None:
    assert log_kept_mass([(0.001, 1, None)], 1, 1.0) == 0.0


def answer_of(tokens: list[int], **changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "output_token_logprobs": [(-1.0 - place, token, None) for place, token in enumerate(tokens)],
        "output_top_logprobs": [ROWS for _ in tokens],
        "finish_reason": {"type": "length"},
    }
    return {"output_ids": tokens, "meta_info": meta | changes}


def test_an_answer_becomes_a_sample() -> None:
    assert sample_of(3, answer_of([4, 1]), DRAW, 8) == SampleResult(3, [4, 1], [-1.0, -2.0], [0.0] * 2, "length", 8)
    masses = [pytest.approx(math.log(0.75))] * 2
    assert sample_of(3, answer_of([4, 1]), TOP, 8) == SampleResult(3, [4, 1], [-1.0, -2.0], masses, "length", 8)  # type: ignore[arg-type]
    greedy = SamplingOptions(temperature=0.0, max_new_tokens=9, top_k=3)
    assert sample_of(3, answer_of([4]), greedy, 8).log_kept_mass == [0.0]
    likeliest = SamplingOptions(temperature=0.7, max_new_tokens=9, top_k=1)
    assert sample_of(3, answer_of([4], output_top_logprobs=[ROWS[:1]]), likeliest, 8).log_kept_mass == [math.log(0.5)]
    assert sample_of(3, answer_of([4], finish_reason=None), DRAW, 8).finish_reason == "nothing"
    assert sample_of(3, answer_of([4], finish_reason={"type": "stop"}), DRAW, 8).finish_reason == "stop"


@pytest.mark.parametrize("scored", [[(-1.0, 4, None)], [(-1.0, 4, None), (-1.0, 2, None)], []])
def test_log_probs_of_other_tokens_are_refused(scored: list[Any]) -> None:
    with pytest.raises(ServiceError) as caught:
        sample_of(3, answer_of([4, 1], output_token_logprobs=scored), DRAW, 8)
    assert caught.value.problem.code == "engine.garbage"
