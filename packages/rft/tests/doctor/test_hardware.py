"""Hardware of a report: read without torch, and without an error where something does not answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rft.doctor import hardware as module
from rft.doctor.hardware import hardware


def test_this_machine_has_a_processor_cores_and_memory() -> None:
    found = json.loads(json.dumps(hardware()))
    assert found["cores"] >= 1
    assert found["processor"]
    assert found["memory"].endswith("kB")


def test_cards_are_those_that_the_drivers_tool_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 570.86\n\nNVIDIA L4, 23034 MiB, 0 MiB, 570.86\n"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, answer))
    gpus: Any = hardware()["gpus"]
    assert [gpu["name"] for gpu in gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]
    assert (gpus[0]["memory.total"], gpus[0]["driver_version"]) == ("81559 MiB", "570.86")

    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 5)

    monkeypatch.setattr(subprocess, "run", late)
    (gpu,) = hardware()["gpus"]  # type: ignore[misc]
    assert "timed out" in gpu["error"]


def test_what_is_not_there_is_left_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = hardware()
    assert (found["memory"], found["gpus"], found["cuda"]) == ("", [], "torch is not imported")
