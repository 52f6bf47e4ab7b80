"""The installed vLLM, by modules of its names: which release is taken, and what goes to it."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rft_core.errors import PreflightError
from rft_engine.vllm.runtime import InstalledVllm


class Recorded(SimpleNamespace):
    """What a constructor of vLLM was given."""

    def __init__(self, *words: Any, **fields: Any) -> None:
        super().__init__(words=words, **fields)


class Llm(Recorded):
    """`vllm.LLM`, which replaces torch's setter of threads as vLLM's CPU worker does."""

    def __init__(self, **fields: Any) -> None:
        torch.set_num_threads = lambda number: None
        if fields.get("model") == "absent":
            raise OSError("no such model")
        super().__init__(**fields)


Modules = dict[str, ModuleType]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Modules of vLLM's names in a supported release, on a machine without GPU."""
    members: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.1", "LLM": Llm, "SamplingParams": Recorded},
        "vllm.config": {"WeightTransferConfig": Recorded},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": Recorded},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: 1)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
    }
    modules: Modules = {}
    for name, contents in members.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(contents)
        monkeypatch.setitem(sys.modules, name, modules[name])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}/__init__.py"))
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    return modules


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)])
def test_a_vllm_that_is_absent_or_a_folder_of_its_name_is_named_with_the_command_that_installs_it(
    spec: object, vllm: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(PreflightError) as caught:
        InstalledVllm()
    assert caught.value.problem.code == "engine.vllm.missing"
    assert "--extra vllm" in caught.value.problem.do


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_every_patch_of_the_supported_release_is_taken(version: str, vllm: Modules) -> None:
    vars(vllm["vllm"])["__version__"] = version
    assert vars(InstalledVllm().make_llm({"model": "m"}))["model"] == "m", "it is used"


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0.32.0"])
def test_another_release_is_refused(version: str, vllm: Modules) -> None:
    vars(vllm["vllm"])["__version__"] = version
    with pytest.raises(PreflightError) as caught:
        InstalledVllm()
    assert caught.value.problem.code == "engine.vllm.version"
    assert version in caught.value.problem.what


def test_the_environment_is_set_and_what_a_user_chose_for_logs_is_kept(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    InstalledVllm()
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == ENVIRONMENT
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    InstalledVllm()
    expected = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "DEBUG"}
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == expected


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_platform_is_vllm_s_own(is_cpu: bool, vllm: Modules) -> None:
    vars(vllm["vllm.platforms"])["current_platform"] = SimpleNamespace(is_cpu=lambda: int(is_cpu))
    assert InstalledVllm().is_cpu is is_cpu


def test_arguments_reach_vllm_and_the_backend_of_weights_as_a_configuration(vllm: Modules) -> None:
    runtime = InstalledVllm()
    plain: Any = runtime.make_llm({"model": "here", "max_num_seqs": 4})
    assert plain == Recorded(model="here", max_num_seqs=4)
    moved: Any = runtime.make_llm({"model": "here", "weight_transfer_backend": "ipc"})
    assert moved == Recorded(model="here", weight_transfer_config=Recorded(backend="ipc"))


@pytest.mark.parametrize("model", ["here", "absent"])
def test_torch_s_setter_of_threads_outlives_a_start_of_vllm(model: str, vllm: Modules) -> None:
    before = torch.set_num_threads
    try:
        InstalledVllm().make_llm({"model": model})
    except OSError:
        assert model == "absent"
    assert torch.set_num_threads is before


def test_a_request_asks_for_its_answer_once_at_the_end(vllm: Modules) -> None:
    params = InstalledVllm().make_sampling_params(temperature=0.7, max_tokens=3)
    assert params == Recorded(output_kind="final", temperature=0.7, max_tokens=3)


def test_a_request_with_an_adapter_uses_the_one_that_was_loaded_last(vllm: Modules) -> None:
    request = InstalledVllm().make_adapter_request("/adapter")
    assert request.words[0] == "rft"
    assert request.words[2] == "/adapter"
    assert request.load_inplace is False


def test_shutting_down_ends_vllm_s_core(vllm: Modules) -> None:
    ended: list[str] = []
    core = SimpleNamespace(shutdown=lambda: ended.append("core"))
    InstalledVllm().shut_down(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert ended == ["core"]
