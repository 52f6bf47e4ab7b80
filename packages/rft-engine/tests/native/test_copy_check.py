"""The check of an engine's copy: its limits by dtype, both directions of a missing tensor, and the prompts it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.copy_check import check_copy
from rft_engine.testing.copied_table_model import FakeCopy, TablePolicy
from rft_engine.testing.table_model import FakeCache


def ready(policy: TablePolicy, twin: FakeCopy) -> NativeEngineOnCopy[FakeCache]:
    engine = NativeEngineOnCopy(twin, policy.provider, max_rows=4, max_len=32)
    engine.refresh()
    return engine


class Shifted:
    """The policy's log-probs, all of them off by a constant; keeps the prompts that it was asked for."""

    def __init__(self, policy: TablePolicy, gap: float) -> None:
        self.policy, self.gap = policy, gap
        self.prompts: list[Sequence[Sequence[int]]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        self.prompts.append(prompts)
        return [[value + self.gap for value in row] for row in self.policy.logprobs(prompts, completions)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25), (torch.float16, 0.25)])
def test_the_limit_follows_from_the_dtype(dtype: torch.dtype, limit: float) -> None:
    policy, twin = TablePolicy(), FakeCopy()
    twin.dtype = dtype
    engine = ready(policy, twin)
    gap = check_copy(engine, Shifted(policy, 0.95 * limit), trainer_version=0)
    assert gap.maximum == pytest.approx(0.95 * limit, rel=0.02)
    with pytest.raises(ServiceError) as caught:
        check_copy(engine, Shifted(policy, 1.05 * limit), trainer_version=0)
    assert caught.value.problem.code == "engine.logprob_parity"


def test_the_probe_takes_the_prompts_that_are_given() -> None:
    policy = TablePolicy()
    exact = Shifted(policy, 0.0)
    assert check_copy(ready(policy, FakeCopy()), exact, trainer_version=0, prompts=[[1, 2], [3]]).num_tokens == 8
    assert exact.prompts == [[[1, 2], [3]]]


class Wider(FakeCopy):
    """A copy that computes with one tensor more than the policy has."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.held.items()
        yield "more", torch.ones(3)


@pytest.mark.parametrize("side", ["policy", "copy"])
def test_a_tensor_that_only_one_side_has_is_a_difference(side: str) -> None:
    policy, twin = TablePolicy(), FakeCopy()
    engine = ready(policy, twin)
    check_copy(engine, policy.logprobs, trainer_version=0)
    if side == "policy":
        policy.tensors["more"] = torch.ones(3)
    else:
        twin.__class__ = Wider
    with pytest.raises(ServiceError) as caught:
        check_copy(engine, policy.logprobs, trainer_version=0)
    assert caught.value.problem.code == "engine.logprob_parity"
    with pytest.raises(ServiceError) as again:
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    assert again.value is caught.value
