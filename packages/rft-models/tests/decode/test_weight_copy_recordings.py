"""Steps of a copy that are recorded, on a GPU that is the CPU under another name: none outlives what it read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rft_models.decode import weight_copy
from rft_models.decode.fast_decoder import FastDecoder
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

Build = Callable[..., Any]
GPU = torch.device("cuda")


class OnTheHost(TorchFunctionMode):
    """Memory that is asked of the GPU comes from the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == GPU:
            named["device"] = "cpu"
        return func(*args, **named)


class Recorder:
    """Records a step by remembering it."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self) -> None:
        self.num_recordings = 0
        Recorder.made.append(self)

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_recordings += 1
        return forward


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Recorder.made = []
    monkeypatch.setattr(weight_copy, "CudaGraphs", Recorder)
    monkeypatch.setattr(CausalPolicy, "device", GPU)
    with OnTheHost():
        yield


def fill(twin: GenerationCopy, policy: CausalPolicy) -> None:
    twin.begin()
    for name, tensor in policy.named_parameters():
        twin.write(name, tensor)
    twin.finish()


def prompts(model: Any) -> Any:
    """A cache with three rows."""
    cache = model.new_cache(4, 32)
    model.prefill(cache, torch.tensor([[3, 5, 7, 9], [4, 6, 0, 0]]), torch.tensor([4, 2]), [2, 1])
    return cache


def steps(model: Any, cache: Any, number: int) -> Tensor:
    """Logits of the last of so many."""
    logits = torch.empty(0)
    for _ in range(number):
        logits = model.step(cache, torch.tensor([11, 12, 13]))
    return logits


def policy_of(tiny_model: Build, model_type: str = "qwen2") -> CausalPolicy:
    return make_policy(tiny_model(model_type), None, packed=True)


def copy_of(policy: CausalPolicy, **options: Any) -> GenerationCopy:
    twin = GenerationCopy(policy, **options)
    fill(twin, policy)
    return twin


def made() -> list[Recorder]:
    return Recorder.made


@pytest.mark.usefixtures("gpu")
def test_steps_on_a_gpu_are_recorded_unless_that_is_declined(tiny_model: Build) -> None:
    policy = policy_of(tiny_model)
    twin = copy_of(policy)
    plain = FastDecoder(policy, graphs=False)
    found, expected = steps(twin, prompts(twin), 4), steps(plain, prompts(plain), 4)
    assert [recorder.num_recordings for recorder in made()] == [1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    declined = copy_of(policy, graphs=False)
    steps(declined, prompts(declined), 4)
    assert len(made()) == 1


def test_steps_on_the_host_are_not_recorded(tiny_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(weight_copy, "CudaGraphs", Recorder)
    twin = copy_of(policy_of(tiny_model))
    steps(twin, prompts(twin), 4)
    assert not made()


@pytest.mark.usefixtures("gpu")
def test_recordings_end_with_the_memory_and_with_the_buffers_that_they_read(tiny_model: Build) -> None:
    policy = policy_of(tiny_model)
    twin = copy_of(policy)
    cache = prompts(twin)
    steps(twin, cache, 4)
    fill(twin, policy)
    steps(twin, cache, 3)
    assert [recorder.num_recordings for recorder in made()] == [2], "buffers are new ones after every load"
    twin.refresh()
    steps(twin, cache, 3)
    assert [recorder.num_recordings for recorder in made()] == [3]
    twin.drop()
    fill(twin, policy)
    cache = prompts(twin)
    found = steps(twin, cache, 4)
    assert [recorder.num_recordings for recorder in made()] == [3, 1], "other memory, other recordings"
    plain = FastDecoder(policy, graphs=False)
    torch.testing.assert_close(found, steps(plain, prompts(plain), 4), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("gpu")
def test_a_decoder_that_runs_the_module_itself_records_nothing(tiny_model: Build) -> None:
    policy = policy_of(tiny_model, "gemma2")
    twin = copy_of(policy)
    steps(twin, prompts(twin), 4)
    assert sum(recorder.num_recordings for recorder in made()) == 0
