"""The log-prob probe, by an engine that answers from a list: its prompts and keys, and what gap is too wide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import keyed_random
from rft_core.errors import ServiceError
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.weight_sync.logprob_probe import ProbeGap, check_logprob_parity, measure_logprob_gap


class Engine:
    """Its log-probs are -1, -2, -3, ... of the tokens in turn."""

    weight_version = 5

    def __init__(self, dtype: str = "float32", max_len: int = 1000, vocab_size: int = 50) -> None:
        self.facts = EngineFacts(dtype, vocab_size, True, "file")
        self.max_len = max_len
        self.asked: list[Any] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sample_keys: Sequence[Sequence[int]], options: SamplingOptions
    ) -> list[list[Completion]]:
        self.asked.append((prompts, sample_keys, options))
        return [
            [Completion((number, 1), (-1.0 - number, -2.0 - number), (0.0, 0.0), "length", 5)]
            for number in range(len(prompts))
        ]


class Policy:
    """Its log-probs are the engine's and these gaps, token after token."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps
        self.asked: list[Any] = []

    def __call__(self, prompts: Any, completions: Any) -> list[list[float]]:
        self.asked.append((prompts, completions))
        gaps = iter([*self.gaps, *[0.0] * 10])
        return [[-1.0 - number + next(gaps), -2.0 - number + next(gaps)] for number in range(len(prompts))]


@pytest.mark.parametrize(("max_len", "length"), [(1000, 160), (164, 160), (163, 159), (10, 6), (6, 2), (5, 1), (4, 1)])
def test_the_probes_are_two_prompts_that_fit_the_same_at_every_call(max_len: int, length: int) -> None:
    engine, policy = Engine(max_len=max_len), Policy()
    measure_logprob_gap(engine, policy)
    measure_logprob_gap(engine, policy)
    drawn = keyed_random.integers(keyed_random.derive_key(0, "probe prompts"), 2 * length, 0, 50).tolist()
    prompts = [drawn[:length], drawn[length:]]
    keys = [[keyed_random.derive_key(0, "probe", number)] for number in range(2)]
    assert engine.asked == [(prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=4))] * 2
    assert policy.asked == [(prompts, [(0, 1), (1, 1)])] * 2


def test_the_gap_is_absolute_over_all_tokens() -> None:
    gap = measure_logprob_gap(Engine(), Policy(0.5, -2.0, 0.0, 0.25), prompts=[[1], [2, 3]])
    assert gap == ProbeGap(pytest.approx(2.75 / 4), pytest.approx(2.0), 4, 5)  # type: ignore[arg-type]
    assert ProbeGap(1.0, 2.0, 4, 5).is_within(2.0)
    assert not ProbeGap(1.0, 2.0, 4, 5).is_within(1.99)
    broken = measure_logprob_gap(Engine(), Policy(0.0, 0.0, math.nan), prompts=[[1], [2, 3]])
    assert math.isnan(broken.maximum)
    assert not broken.is_within(math.inf)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.25), ("float16", 0.25)])
def test_the_limit_follows_from_the_dtype_unless_it_is_given(dtype: str, limit: float) -> None:
    engine = Engine(dtype)
    policy = Policy(0.95 * limit)
    assert check_logprob_parity(engine, policy, prompts=[[7]]).maximum == pytest.approx(0.95 * limit)
    assert engine.asked[0][0] == policy.asked[0][0] == [[7]]
    for gap, given in ((1.05 * limit, None), (0.95 * limit, 0.9 * limit), (0.0, -1.0)):
        with pytest.raises(ServiceError) as caught:
            check_logprob_parity(engine, Policy(gap), limit=given)
        assert caught.value.problem.code == "engine.logprob_parity"
    check_logprob_parity(engine, Policy(1.05 * limit), limit=1.1 * limit)
