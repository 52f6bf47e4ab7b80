"""The installed SGLang, by modules of its names: which release is taken, and what goes to it."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_engine.sglang.pinned_api import version as pinned
from rft_engine.sglang.runtime import InstalledSglang

_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`sglang.version` of the pinned release, beside an `sglang.Engine` that keeps its arguments."""
    package, version = ModuleType("sglang"), ModuleType("sglang.version")
    vars(package)["Engine"] = SimpleNamespace
    vars(version)["__version__"] = pinned()
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "sglang.version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}/__init__.py"))
    monkeypatch.setenv(_LOGPROBS, "1")
    return version


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)])
def test_an_sglang_that_is_absent_or_a_folder_of_its_name_is_named_with_the_command_that_installs_it(
    spec: object, release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(PreflightError) as caught:
        InstalledSglang()
    assert caught.value.problem.code == "engine.sglang.missing"
    assert "--extra sglang" in caught.value.problem.do


@pytest.mark.parametrize("build", ["", "+cu128", "+cpu.a+b"])
def test_every_build_of_the_pinned_release_is_taken_and_given_its_arguments(build: str, release: ModuleType) -> None:
    vars(release)["__version__"] = pinned() + build
    engine: Any = InstalledSglang().make_engine({"model_path": "here", "tp_size": 2})
    assert (engine.model_path, engine.tp_size) == ("here", 2)


def test_log_probs_are_those_of_the_temperature_whatever_the_environment_said(release: ModuleType) -> None:
    InstalledSglang()
    assert os.environ[_LOGPROBS] == "0"


@pytest.mark.parametrize("version", ["0.5.20", f"{pinned()}.post1", "9.9+0.5.21"])
def test_another_release_is_refused(version: str, release: ModuleType) -> None:
    vars(release)["__version__"] = version
    with pytest.raises(PreflightError) as caught:
        InstalledSglang()
    assert caught.value.problem.code == "engine.sglang.version"
    assert version in caught.value.problem.what
