"""`rft-train generate`: one rank prints the answers or writes them, each on a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.commands import generate
from rft_core.errors import OptionsError

ROWS = [
    {"prompt": "1+1=", "response": "2", "finish_reason": "stop"},
    {"prompt": "2+2=", "response": "44", "finish_reason": "length"},
]
Run = Callable[..., tuple[int, list[Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on one of the ranks; returns its exit code and what was asked for."""

    def start(*argv: str, is_first: bool = True) -> tuple[int, list[Any]]:
        asked: list[Any] = []
        machine = SimpleNamespace(is_first=is_first)

        @contextmanager
        def open_machine(device: str) -> Iterator[Any]:
            asked.append(device)
            yield machine

        def answer(settings: Any, given: Any) -> list[Any]:
            asked.append((settings.model.pretrain, given is machine))
            return ROWS

        monkeypatch.setattr(generate, "open_machine", open_machine)
        monkeypatch.setattr(generate, "generate", answer)
        return generate.run(["--pretrain", "m", "--device", "cpu", *argv]), asked

    return start


def test_answers_are_printed_behind_their_prompts(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == (0, ["cpu", ("m", True)])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1+1=2"
    assert second.startswith("2+2=44 [")


def test_answers_are_written_in_place_of_being_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--output", "answers.jsonl")[0] == 0
    assert [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()] == ROWS
    assert "1+1=2" not in capsys.readouterr().out


def test_another_rank_answers_and_says_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--output", "answers.jsonl", is_first=False) == (0, ["cpu", ("m", True)])
    assert run(is_first=False)[0] == 0
    assert capsys.readouterr().out == ""
    assert not Path("answers.jsonl").exists()


def test_a_run_in_place_of_the_model_is_read_from_its_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def with_run(argv: list[str], command: str) -> list[str]:
        calls.append((argv[-1], command))
        return ["--pretrain", "of the run"]

    monkeypatch.setattr(generate, "with_run", with_run)
    assert run("--seed=1")[1][1:] == [("of the run", True)]
    assert calls == [("--seed=1", "generate")]


def test_a_file_in_a_folder_that_is_missing_is_refused_before_anything_is_answered(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        run("--output", str(tmp_path / "absent" / "a.jsonl"))
    assert caught.value.problem.do == f"mkdir -p {tmp_path}/absent"
