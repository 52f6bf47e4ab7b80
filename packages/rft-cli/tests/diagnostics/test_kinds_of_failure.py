"""Failures of 39 kinds: each gives a message with all fields, and a bundle wherever there is something to put into it.

An error that was foreseen and comes before a run has begun, such as one of the options, has no bundle: its message is
complete, and there are neither settings of a run nor metrics nor logs.
"""

from __future__ import annotations

import errno
import json
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_cli import main as program
from rft_cli.diagnostics import bundle
from rft_core import errors
from rft_core.errors import RftError

FIELDS = {"code", "what", "where", "why", "state", "do", "bundle"}
_CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RftError)]
FORESEEN = sorted({*_CLASSES} - {RftError}, key=lambda kind: kind.__name__)
UNFORESEEN: dict[str, Callable[[], BaseException]] = {
    "a value": lambda: ValueError("not a value"),
    "a type": lambda: TypeError("not a type"),
    "a key": lambda: KeyError("loss"),
    "an index": lambda: IndexError("list index out of range"),
    "an attribute": lambda: AttributeError("no attribute"),
    "an assertion": lambda: AssertionError("shapes"),
    "an assertion without words": AssertionError,
    "a division": lambda: ZeroDivisionError("division by zero"),
    "an overflow": lambda: OverflowError("too large"),
    "a floating point": lambda: FloatingPointError("nan"),
    "a recursion": lambda: RecursionError("maximum recursion depth exceeded"),
    "a missing module": lambda: ModuleNotFoundError("No module named 'x'"),
    "a name that cannot be imported": lambda: ImportError("cannot import name"),
    "the memory of the machine": lambda: MemoryError("out of memory"),
    "the memory of a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "torch": lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied\na second line"),
    "a part that is not written": lambda: NotImplementedError("later"),
    "an end of input": lambda: EOFError("EOF"),
    "a name": lambda: NameError("name 'x' is not defined"),
    "an iteration": lambda: StopIteration("over"),
    "an absent file": lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
    "a closed file": lambda: PermissionError(errno.EACCES, "Permission denied", "x"),
    "a connection": lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "a time limit": lambda: TimeoutError("timed out"),
    "a text": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "a child process": lambda: subprocess.CalledProcessError(1, ["x"]),
    "a queue": queue.Empty,
}


@pytest.fixture
def fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[BaseException, bool], dict[str, Any]]:
    """Let a command end with an error, in a run or before one has begun; return what it prints as JSON."""
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    run.mkdir()
    (run / "config.yaml").write_text("seed: 3\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(temporary))

    def ended(error: BaseException, is_in_run: bool) -> dict[str, Any]:
        def command(words: list[str]) -> int:
            bundle.remember_run_directory(run if is_in_run else None)
            raise error

        monkeypatch.setattr(program, "_run", command)
        words = ["rl", "--seed", "3", "--json_errors"]
        try:
            code = program.main(words)
        except Exception:  # noqa: BLE001 - whatever was not foreseen goes to the hook, as it does in a shell
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = program.UNEXPECTED
        shown = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert shown["exit_code"] == code
        return shown["problem"]

    return ended


def require_bundle(problem: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """The content of the bundle that a message names, in a directory; it has the trace of the failure."""
    file = Path(problem["bundle"])
    assert file.parent == folder
    content = json.loads(file.read_text())
    assert content["command"] == ["rft-train", "rl", "--seed", "3"]
    assert any(name in line for line in content["traceback"])
    assert content["versions"]["torch"]
    return content


def test_there_are_thirty_kinds() -> None:
    assert len(FORESEEN) + len(UNFORESEEN) >= 30
    assert len({type(make()) for make in UNFORESEEN.values()}) >= 25


@pytest.mark.parametrize("kind", FORESEEN, ids=lambda kind: kind.__name__)
def test_a_foreseen_failure_has_a_bundle_within_a_run_and_a_complete_message_before_one(
    kind: type[RftError], fail: Callable[[BaseException, bool], dict[str, Any]], tmp_path: Path
) -> None:
    fields = {"code": "a.kind", "what": "it failed", "where": "here", "why": "a rule", "do": "rft-train rl --seed 4"}
    early = fail(kind(**fields), False)
    assert set(early) == FIELDS
    assert {name: early[name] for name in fields} == fields
    assert early["state"]
    assert early["bundle"] == ""
    assert list((tmp_path / "temporary").iterdir()) == []
    late = fail(kind(**fields), True)
    assert {name: late[name] for name in fields} == fields
    content = require_bundle(late, tmp_path / "run", kind.__name__)
    assert content["problem"]["code"] == "a.kind"
    assert content["settings"] == ["seed: 3"]
    assert content["last_metrics"] == [{"step": 1}]


@pytest.mark.parametrize("name", UNFORESEEN)
def test_an_unforeseen_failure_has_a_bundle_wherever_it_comes(
    name: str, fail: Callable[[BaseException, bool], dict[str, Any]], tmp_path: Path
) -> None:
    for is_in_run, folder in ((False, tmp_path / "temporary"), (True, tmp_path / "run")):
        error = UNFORESEEN[name]()
        problem = fail(error, is_in_run)
        assert set(problem) == FIELDS
        assert all(problem[field] for field in FIELDS)
        assert problem["what"].startswith(f"unexpected {type(error).__name__}")
        assert "\n" not in problem["what"]
        assert problem["bundle"] in problem["do"]
        require_bundle(problem, folder, type(error).__name__)
