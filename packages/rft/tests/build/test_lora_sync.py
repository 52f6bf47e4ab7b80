"""What vLLM is sent of a policy with adapters: them alone, also where every tensor is an exchange of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rft.build import engines
from rft.process.machine import Machine
from rft_core.errors import ServiceError
from rft_dist.collectives import SingleProcess
from rft_dist.launch.process_group import ranks_from_environment
from rft_engine.settings import DecodingEngineSettings
from rft_engine.vllm import process
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.settings import AdapterKind
from rft_models.tiny_models.text import build_character_model


class Recorder:
    """In the place of the engine: keeps the names that it is sent."""

    def __init__(self, settings: Any, provider: Callable[[], Iterable[tuple[str, Tensor]]], **_: Any) -> None:
        self.config, self._provider = settings.adapter_config, provider
        self.names: list[str] = []

    def load_weights(self, version: int) -> None:
        self.names = [name for name, _ in self._provider()]


class Gathered:
    """A provider that counts the tensors that ranks exchange."""

    def __init__(self, policy: CausalPolicy, *, trained: bool) -> None:
        self._policy, self._trained, self.exchanged = policy, trained, 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._policy.named_parameters():
            if parameter.requires_grad or not self._trained:
                self.exchanged += 1
                yield name, parameter.detach()


@pytest.fixture
def policy(tmp_path: Path) -> CausalPolicy:
    path = build_character_model(tmp_path / "m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seed=0)
    return load_policy(path)


def engine_of(
    policy: CausalPolicy, monkeypatch: pytest.MonkeyPatch, *, kind: AdapterKind, in_blocks: bool
) -> tuple[Any, Gathered, Gathered]:
    add_adapters(policy, AdapterRules(2, kind=kind), seed=0)
    monkeypatch.setattr(engines, "_is_installed", lambda package: True)
    monkeypatch.setattr(process, "VllmProcessEngine", Recorder)
    machine = Machine("cpu", ranks_from_environment({}), SingleProcess())
    every, adapters = Gathered(policy, trained=False), Gathered(policy, trained=True)
    given: dict[str, Any] = (
        {"weights": lambda: policy.merged_parameters(every()), "adapters": adapters} if in_blocks else {}
    )
    settings = DecodingEngineSettings(engine_type="vllm")
    return engines.make_engine(settings, machine, policy, policy.where, 32, **given), every, adapters


def test_blocks_of_adapters_are_put_together_and_nothing_else(
    policy: CausalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, every, adapters = engine_of(policy, monkeypatch, kind="lora", in_blocks=True)
    engine.load_weights(1)
    assert engine.config
    assert policy.adapters is not None
    assert engine.names == [policy.adapters.file_name(name) for name, _ in policy.adapters.named_parameters()]
    assert (every.exchanged, adapters.exchanged) == (0, len(engine.names))
    with pytest.raises(ServiceError) as caught:
        list(engine._engine._provider())  # an engine that starts again by itself
    assert caught.value.problem.code == "engine.alone"


def test_what_vllm_does_not_add_comes_folded_in(policy: CausalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, every, adapters = engine_of(policy, monkeypatch, kind="dora", in_blocks=True)
    engine.load_weights(1)
    assert not engine.config
    assert not any("lora" in name for name in engine.names)
    assert adapters.exchanged == 0
    assert every.exchanged > len(engine.names) > 0


def test_whole_adapters_are_sent_as_they_are(policy: CausalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = engine_of(policy, monkeypatch, kind="rslora", in_blocks=False)
    engine.load_weights(1)
    assert engine.config
    assert all(".lora_" in name for name in engine.names)
