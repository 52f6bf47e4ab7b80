"""`rft-train check`: which command is resolved, what is looked at, and that nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft import check as check_of_a_run
from rft.check import TokenizedExample
from rft.process import machine as machines
from rft.process.machine import Machine
from rft_cli.commands import check
from rft_cli.pages import run_plan
from rft_core.errors import OptionsError, PreflightError
from rft_dist.collectives import SingleProcess
from rft_dist.launch.environment import RankInfo


class Looked:
    """What the command looked at, in order, on one of the ranks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.request: Any = None
        self.is_first = True

    @contextmanager
    def open_machine(self, device: str, request: Any = None) -> Iterator[Any]:
        self.calls.append(("machine", device))
        self.request = request
        ranks = RankInfo(0 if self.is_first else 1, 3, 0, 0, "host", 1, {})
        yield Machine(device, ranks, SingleProcess())

    def rl(self, settings: Any, world_size: int) -> Any:
        self.calls.append(("rl", settings.model.pretrain, world_size))
        return SimpleNamespace(
            data="prompts",
            check_reward=lambda: self.calls.append(("reward",)) or [],
            first_example=lambda: TokenizedExample("prompt p:0", ["1+", "1=", "<response>"], [False, False, True]),
        )

    def sft(self, settings: Any, world_size: int) -> Any:
        self.calls.append(("sft", settings.model.pretrain, world_size))
        return SimpleNamespace(
            data="rows",
            check_reward=lambda: [],
            first_example=lambda: TokenizedExample("demonstration s:0", ["1", "=", "1"], [False, True, False]),
        )


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    seen = Looked()
    monkeypatch.setattr(machines, "open_machine", seen.open_machine)
    monkeypatch.setattr(check_of_a_run, "check_rl", seen.rl)
    monkeypatch.setattr(check_of_a_run, "check_sft", seen.sft)
    monkeypatch.setattr(
        run_plan,
        "show",
        lambda training, resolved, data, machine: seen.calls.append(("plan", training.check, data)),
    )
    return seen


@pytest.mark.parametrize("words", [["--pretrain", "m"], ["rl", "--pretrain", "m"]])
def test_a_run_is_read_planned_and_its_reward_is_tried(
    words: list[str], looked: Looked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run([*words, "--device", "cpu"]) == 0
    assert looked.calls == [("machine", "cpu"), ("rl", "m", 3), ("plan", "rft.check:check_rl", "prompts"), ("reward",)]
    shown = capsys.readouterr().out
    assert "pretrain: m" in shown
    assert "1+1=<response>\n" in shown
    assert "learned): 001\n" in shown


def test_the_ranks_are_checked_as_at_the_start(looked: Looked, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run(["--pretrain", "m", "--device", "cpu", "--tp_size", "2"]) == 0
    assert looked.request.tp_size.value == 2
    # of ranks that --nproc would start, which this process is none of
    assert check.run(["--pretrain", "m", "--device", "cpu", "--tp_size", "2", "--nproc", "4"]) == 0
    assert looked.request is None
    assert looked.calls[-3:-1] == [("rl", "m", 4), ("plan", "rft.check:check_rl", "prompts")]
    with pytest.raises(PreflightError) as caught:
        check.run(["--pretrain", "m", "--device", "cpu", "--tp_size", "2", "--nproc", "3"])
    assert caught.value.problem.do == "--nproc 2"


def test_settings_that_are_not_defaults_are_shown_and_the_others_are_counted(
    looked: Looked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run(["--pretrain", "m", "--device", "cpu", "--temperature", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.endswith("# command line")] == [
        "pretrain:",
        "device:",
        "temperature:",
    ]
    assert "# default\n" not in shown
    assert "--print_config" in shown


def test_supervised_training_is_read_and_planned(looked: Looked, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run(["sft", "--pretrain", "m", "--device", "cpu"]) == 0
    assert looked.calls == [("machine", "cpu"), ("sft", "m", 3), ("plan", "rft.check:check_sft", "rows")]
    shown = capsys.readouterr().out
    assert "1=1\n" in shown
    assert "learned): 010\n" in shown


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_other_ranks_look_at_nothing(command: str, looked: Looked) -> None:
    looked.is_first = False
    assert check.run([command, "--pretrain", "m", "--device", "cpu"]) == 0
    assert looked.calls == [("machine", "cpu")]


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_command_that_trains_nothing_shows_its_settings_and_notes(
    command: str, looked: Looked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run([command, "--pretrain", "m", "--max_pixels", "9"]) == 0
    assert looked.calls == []
    shown = capsys.readouterr().out
    assert f"command: {command}" in shown
    assert shown.count("note: max_pixels = 9 ") == 1


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_the_plan_alone_shows_the_notes_of_training(
    command: str, looked: Looked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.run([command, "--pretrain", "m", "--max_pixels", "9"]) == 0
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_directory_that_holds_a_run_is_refused(command: str, looked: Looked) -> None:
    Path("old").mkdir()
    words = [command, "--pretrain", "m", "--save_path", "old"]
    assert check.run(words) == 0
    Path("old/config.yaml").write_text("")
    with pytest.raises(OptionsError) as caught:
        check.run(words)
    assert caught.value.problem.code == "run.exists"


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_the_directory_of_a_model_is_refused_as_that_of_a_run(command: str, looked: Looked) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(OptionsError) as caught:
        check.run([command, "--pretrain", "m", "--save_path", "model"])
    assert (caught.value.problem.code, caught.value.problem.do) == ("run.holds_a_model", "--save_path model-2")


def test_another_word_is_no_command_that_can_be_checked(looked: Looked) -> None:
    with pytest.raises(OptionsError) as caught:
        check.run(["export", "--pretrain", "m"])
    assert (caught.value.problem.code, caught.value.problem.do) == ("check.unknown_command", "rft-train check rl")


@pytest.mark.parametrize("words", [["-h", "--nothing"], ["--help"], ["sft", "--help"]])
def test_help_resolves_nothing(words: list[str], looked: Looked, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train check")
    assert looked.calls == []
