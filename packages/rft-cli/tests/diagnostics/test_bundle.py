"""The diagnostics file: where it is written, what it holds, and that it holds no secret."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from rft_cli.diagnostics import bundle
from rft_core.errors import DataError, Problem

KEY = "hf_" + "a" * 30


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with settings and metrics, registered as that of this process."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text(f"seed: 3\nuse_wandb: {KEY}\n")
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(30)))
    bundle.remember_run_directory(path)
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(path))
    return path


def raised(text: str) -> Exception:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_a_bundle_of_a_run_holds_its_settings_its_last_metrics_and_the_problem(
    run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("RFT_SOMETHING", "ä")
    monkeypatch.setenv("ELSE_RFT_", "left out")
    problem = Problem(code="a.b", what=f"ö {KEY}", where="here", why="a rule")
    assert bundle.has_run_directory()
    path = bundle.write(raised(f"the cause {KEY}"), ["rl", "--my_token", "letmein"], problem)
    assert path is not None
    assert path.parent == run
    assert path.name.endswith(f"-rank2-{os.getpid()}.json")
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    assert text == json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    assert KEY not in text
    assert "letmein" not in text
    assert record["problem"]["code"] == "a.b"
    assert record["command"][:3] == ["rft-train", "rl", "--my_token"]
    assert record["working_directory"] == str(Path.cwd())
    assert record["versions"]["python"] == sys.version
    assert record["versions"]["platform"] == platform.platform()
    assert record["versions"]["torch"] == version("torch")
    assert set(record["versions"]) == {"python", "platform", *bundle.PACKAGES}
    assert (record["environment"]["RFT_SOMETHING"], record["environment"]["RANK"]) == ("ä", "2")
    assert not {"ELSE_RFT_", "PATH"} & set(record["environment"])
    assert list(record["environment"]) == sorted(record["environment"])
    assert (record["settings"][0], len(record["settings"])) == ("seed: 3", 2)
    assert any("the cause" in line for line in record["traceback"])
    assert record["run_directory"] == str(run)
    assert record["last_metrics"] == [{"step": step} for step in range(10, 30)]
    assert list(temporary.iterdir()) == []


def test_a_bundle_without_a_run_is_written_to_the_temporary_directory(temporary: Path) -> None:
    path = bundle.write(raised("the cause"), ["rl"])
    assert path is not None
    assert path.parent == temporary
    assert "-rank0-" in path.name
    record = json.loads(path.read_text())
    assert (record["problem"], record["settings"], record["last_metrics"]) == (None, [], [])
    assert record["run_directory"] is None
    assert not bundle.has_run_directory()


def test_a_run_that_is_gone_or_full_is_passed_over(run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(path: Path, *given: str, **options: str) -> int:
        if path.parent == run:
            raise OSError("no space left")
        return write_text(path, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        path = bundle.write(raised("the cause"), ["rl"])
    assert path is not None
    assert path.parent == temporary
    for file in [path, *run.iterdir()]:
        file.unlink()
    run.rmdir()
    assert not bundle.has_run_directory()
    path = bundle.write(DataError(code="a", what="b", where="c", why="d"), ["rl"])
    assert path is not None
    assert path.parent == temporary


def test_without_any_place_nothing_is_written(temporary: Path) -> None:
    temporary.rmdir()
    assert bundle.write(raised("the cause"), ["rl"]) is None
