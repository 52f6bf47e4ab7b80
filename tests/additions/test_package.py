"""A package of forty lines adds a verb that trains, found by its entry point and known to every other command."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from additions.installation import install
from support.trainer_task import TrainerTask

from rft_cli.diagnostics import bundle
from rft_cli.main import main
from rft_cli.records.discovery import commands

SOURCE = Path(__file__).with_name("repeat_command.py")
MOST_LINES = 40

Say = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files that an installation of the package leaves: its module and its facts."""
    folder, rows = tmp_path_factory.mktemp("site"), "[rft.commands]\nrepeat = repeat_command:REPEAT\n"
    with pytest.MonkeyPatch.context() as patch:
        install(patch, folder, SOURCE, package="repeat-command", entry_points=rows)
        commands.cache_clear()
        yield
    sys.modules.pop("repeat_command", None)
    commands.cache_clear()


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """What `rft-train WORDS...` prints; it ends well unless another exit code is expected."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main([str(word) for word in words]) == code, out.getvalue()
        bundle.remember_run_directory(None)
        return out.getvalue()

    return run


def words_of(task: TrainerTask, run: Path) -> list[object]:
    return [
        *("repeat", "--pretrain", task.settings["pretrain"], "--word", "1+", "--copies", 5, "--device", "cpu"),
        *("--train_batch_size", 2, "--max_epochs", 2, "--held_out_rows", 1, "--save_path", run),
    ]


def test_it_is_short() -> None:
    lines = [line for line in SOURCE.read_text().splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


def test_help_names_the_verb_and_its_own_setting(say: Say) -> None:
    assert re.search(r"^  repeat +train a model to repeat a word$", say("--help"), re.M)
    page = say("repeat", "--help")
    assert "--copies INT" in page
    assert "--held_out_rows INT" in page
    assert "copies" in say("repeat", "--pretrain", "m", "--copies", 0, "--json_errors", code=2)


def test_it_is_checked_planned_trained_resumed_and_listed(say: Say, trainer_task: TrainerTask, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "repeated"
    command, *words = words_of(trainer_task, run)
    checked = say("check", command, *words)
    assert "copies: 5" in checked
    assert "5 of 5 rows fit" in checked
    assert "1+1+" in checked
    assert "rft-train repeat would start" in checked
    assert re.search(r"2 ranks", say("plan", command, *words, "--world_size", 2))
    say(command, *words, "--max_steps", 1)
    assert "repeated" in say("runs")
    assert "--copies 5" in say("runs", "show", run)
    again = say("resume", run, "--max_steps", 3)
    assert "finished after 3 steps" in again
