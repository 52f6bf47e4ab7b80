"""Debug mode: how it is asked for, and which variables it sets."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys

import pytest

from rft_cli.diagnostics.debug_mode import VARIABLES, asked, show_crashes, switch_on


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", False),
        ("--seed 1", False),
        ("--debug", True),
        ("--debug --seed 1", True),
        ("--seed 1 --debug true", True),
        *((f"--debug {word}", False) for word in ("false", "FALSE", "0", "no")),
        *((f"--debug={word}", False) for word in ("false", "0", "No")),
        ("--debug=yes no", True),
        ("--debug=false yes", False),
        ("--debug --no-debug", False),
        ("--debug --no_debug", False),
        ("--no-debug --debug", True),
        ("--debug no --debug", True),
        ("--debugging", False),
    ],
)
def test_the_last_flag_counts(text: str, on: bool) -> None:
    assert asked(text.split()) is on


def test_variables_are_set_unless_they_are_set_already() -> None:
    environment = {"NCCL_DEBUG": "WARN", "OTHER": "1"}
    assert switch_on(environment) == [name for name in VARIABLES if name != "NCCL_DEBUG"]
    assert environment == {**VARIABLES, "NCCL_DEBUG": "WARN", "OTHER": "1"}
    assert switch_on(environment) == []


def test_crashes_of_native_code_are_shown_unless_a_tool_shows_them_already(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled: list[bool] = []
    monkeypatch.setattr(faulthandler, "enable", lambda: enabled.append(True))
    for known in (True, False):
        monkeypatch.setattr(faulthandler, "is_enabled", lambda known=known: known)
        show_crashes()
    assert enabled == [True]


def test_a_crash_of_native_code_prints_the_stack() -> None:
    program = (
        "from rft_cli.diagnostics.debug_mode import show_crashes; import ctypes; show_crashes(); ctypes.string_at(0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert "string_at" in ended.stderr
