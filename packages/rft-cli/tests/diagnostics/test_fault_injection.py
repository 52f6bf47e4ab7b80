"""Failures on purpose: what a value of RFT_FAULT asks for, and when and how each strikes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rft_cli.diagnostics.fault_injection import EXIT_STATUS, VARIABLE, Fault, InjectedFault, install_from, parse
from rft_core import fault_points
from rft_core.errors import OptionsError

POINT = fault_points.declare("test.fault_injection", "a test")


class Ended(Exception):
    """The process would have ended here."""


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    fault_points.install(None)
    yield
    fault_points.install(None)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """How this process would have ended."""
    told: list[tuple[Any, ...]] = []

    def leave(status: int) -> None:
        told.append(("exit", status))
        raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append(("kill", pid, number)))
    return told


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("a", [Fault("a", 1, "exit")]),
        ("a:3", [Fault("a", 3, "exit")]),
        ("a::kill", [Fault("a", 1, "kill")]),
        ("a:2:raise, b", [Fault("a", 2, "raise"), Fault("b", 1, "exit")]),
        ("a:1:exit", [Fault("a", 1, "exit")]),
    ],
)
def test_a_value_names_points_passes_and_actions(text: str, faults: list[Fault]) -> None:
    assert parse(text) == faults


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:-1", "a:x", "a:1:burn", "a,,b", "a:1:exit:2"])
def test_a_value_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse(text)
    assert (caught.value.problem.code, caught.value.problem.do) == ("option.fault", f"unset {VARIABLE}")


def test_a_fault_is_raised_at_its_pass_of_its_point_alone() -> None:
    install_from({VARIABLE: f"other,{POINT}:2:raise,{POINT}:4:raise"})
    struck: list[int] = []
    for number in range(1, 6):
        try:
            fault_points.fault_point(POINT)
        except InjectedFault:
            struck.append(number)
    assert struck == [2, 4]


def test_a_process_is_ended_at_once_or_killed(ends: list[tuple[Any, ...]]) -> None:
    for action, told in (("exit", []), ("kill", [("kill", os.getpid(), signal.SIGKILL)])):
        ends.clear()
        install_from({VARIABLE: f"{POINT}::{action}"})
        with pytest.raises(Ended):
            fault_points.fault_point(POINT)
        assert ends == [*told, ("exit", EXIT_STATUS)]
    assert EXIT_STATUS == 86


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}])
def test_nothing_is_installed_without_a_value(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(fault_points, "install", installed.append)
        install_from(environment)
    assert installed == []
