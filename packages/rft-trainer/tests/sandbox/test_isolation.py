"""Where isolation is missing nothing is run, and the message has the mend for this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_core.errors import PreflightError
from rft_trainer.sandbox import isolation
from rft_trainer.sandbox.cage import CageEnd, CageRun
from rft_trainer.sandbox.cage_main import encode
from rft_trainer.sandbox.interpreter import CagedPython

PYTHON = CagedPython(Path("/nowhere"), "/lib/loader")
HOLDS = dict(isolation._CONTAINED)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine on which everything holds, as values to change."""
    facts: dict[str, Any] = {
        "bwrap": "/usr/bin/bwrap",
        "help": "--disable-userns",
        "run": CageRun({0: {"value": encode(HOLDS)}}, CageEnd.DONE),
        "started": [],
    }
    monkeypatch.setattr(isolation.shutil, "which", lambda name: facts["bwrap"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=facts["help"], stderr=""))
    monkeypatch.setattr(isolation, "caged_python", lambda: PYTHON)

    def run_cages(python: CagedPython, work: Any, *, at_once: int) -> list[CageRun]:
        facts["started"].append(work)
        return [facts["run"]]

    monkeypatch.setattr(isolation, "run_cages", run_cages)
    return facts


def refused(machine: dict[str, Any]) -> Any:
    with pytest.raises(PreflightError) as caught:
        isolation.proven_python()
    return caught.value.problem


def test_a_machine_on_which_every_wall_holds_gives_the_interpreter(machine: dict[str, Any]) -> None:
    assert isolation.proven_python() is PYTHON
    assert len(machine["started"]) == 1


def test_without_bubblewrap_or_with_an_old_one_its_installation_is_the_remedy(machine: dict[str, Any]) -> None:
    machine["bwrap"] = None
    problem = refused(machine)
    assert (problem.code, problem.do.startswith("apt-get install bubblewrap")) == ("sandbox.missing", True)
    machine |= {"bwrap": "/usr/bin/bwrap", "help": "--unshare-user"}
    assert "older than bubblewrap 0.8" in refused(machine).what
    assert machine["started"] == []


def test_another_system_is_refused(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "has_filter", lambda: False)
    assert refused(machine).code == "sandbox.machine"
    monkeypatch.setattr(isolation, "has_filter", lambda: True)
    monkeypatch.setattr(isolation.sys, "platform", "darwin")
    assert refused(machine).code == "sandbox.machine"
    assert machine["started"] == []


@pytest.mark.parametrize(
    ("switch", "value", "command"),
    [
        (0, "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (1, "0", "sysctl -w user.max_user_namespaces=10000"),
        (2, "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
        (2, "0", "allow user namespaces here"),
    ],
)
def test_a_kernel_that_allows_no_namespaces_is_refused_with_its_switch(
    machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: int, value: str, command: str
) -> None:
    switches = [(str(tmp_path / str(index)), stops, mend) for index, (_, stops, mend) in enumerate(isolation._SWITCHES)]
    monkeypatch.setattr(isolation, "_SWITCHES", switches)
    (tmp_path / str(switch)).write_text(value + "\n")
    machine["run"] = CageRun({}, CageEnd.BROKEN, "bwrap: setting up uid map: Permission denied")
    problem = refused(machine)
    assert problem.code == "sandbox.no_namespaces"
    assert "setting up uid map" in problem.what
    assert problem.do.startswith(command)


@pytest.mark.parametrize(
    ("wall", "found"),
    [
        ("read", ["/etc/passwd"]),
        ("write", 1),
        ("connect", True),
        ("processes", ["1"]),
        ("fork", 7),
        ("variables", ["HF_TOKEN"]),
        ("namespace", True),
        ("memory", 1 << 40),
        ("thread", None),
    ],
)
def test_each_wall_that_does_not_hold_is_named_and_ends_it(machine: dict[str, Any], wall: str, found: Any) -> None:
    machine["run"] = CageRun({0: {"value": encode(HOLDS | {wall: found})}}, CageEnd.DONE)
    problem = refused(machine)
    assert problem.code == "sandbox.open"
    assert f"{wall} gave {found!r}" in problem.what


def test_an_answer_of_another_form_is_no_proof(machine: dict[str, Any]) -> None:
    machine["run"] = CageRun({0: {"value": encode([])}}, CageEnd.DONE)
    assert refused(machine).code == "sandbox.open"
    machine["run"] = CageRun({0: {"error": "NameError"}}, CageEnd.DONE)
    assert "NameError" in refused(machine).what
