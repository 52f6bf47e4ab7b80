"""`rft-train recipes`: the table, a recipe as it is or resolved, a copy, and what each verb takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.config.errors import SettingsError
from rft_cli.commands import recipes as command
from rft_cli.commands import recipes_run
from rft_cli.commands.arguments import Arguments
from rft_cli.config import recipes as catalog
from rft_cli.config.recipes import Recipe
from rft_core.errors import RftError

ADDITION = (
    "recipe:\n  command: rl\n  task: add numbers\n  hardware: 2 CPU cores\n  minutes: 2\n"
    "  expected: 0.1 -> 0.9\n  date: 2026-11-20\nn_samples_per_prompt: 4\n"
)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three recipes in place of the installed ones."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "addition.yaml").write_text(ADDITION)
    (folder / "spelling.yaml").write_text("recipe:\n  command: sft\n  minutes: 120\n  expected: 1 -> 2\n")
    (folder / "bare.yaml").write_text("seed: 3\n")
    monkeypatch.setattr(catalog, "DIRECTORY", folder)
    return folder


@pytest.mark.parametrize("words", [[], ["list"]])
def test_every_recipe_is_one_line_of_a_wide_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(words) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "recipe    command  task         hardware     minutes  expected",
        "addition  rl       add numbers  2 CPU cores        2  0.1 -> 0.9 (2026-11-20)",
        "bare",
        "spelling  sft                                    120  1 -> 2",
    ]


def test_recipes_that_were_not_run_are_listed_apart_with_what_the_plan_says(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (installed / "real").mkdir()
    header = "recipe: {command: sft, task: talk, hardware: a card, status: not yet run, memory: 13 of 22 GiB}\n"
    (installed / "real" / "large.yaml").write_text(header)
    assert command.run([]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[4:6] == ["", lines[5]]
    assert "Not yet run" in lines[5]
    assert lines[6:] == [
        "recipe  command  task  hardware  memory of a card",
        "large   sft      talk  a card    13 of 22 GiB",
    ]


def test_a_line_of_a_pipe_is_broken_at_200_columns(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (installed / "long.yaml").write_text(f"recipe:\n  expected: {'word ' * 60}\n")
    assert command.run([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) == 200


def test_without_recipes_that_is_said(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in installed.iterdir():
        path.unlink()
    assert command.run([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_recipe_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["show", "addition"]) == 0
    assert capsys.readouterr().out == ADDITION


@pytest.mark.parametrize(
    ("words", "made_by", "values"),
    [
        ("addition --resolved", "rl", {"n_samples_per_prompt": 4, "seed": 42}),
        ("--resolved addition --seed 7 --n_samples_per_prompt 2", "rl", {"n_samples_per_prompt": 2, "seed": 7}),
        ("spelling --resolved", "sft", {"seed": 42}),
        ("bare --resolved", "rl", {"seed": 3}),
    ],
)
def test_a_recipe_is_shown_with_every_setting(
    words: str, made_by: str, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(["show", *words.split()]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["recipe"]["command"] == made_by
    assert {name: shown[name] for name in values} == values


def test_a_setting_that_cannot_be_used_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError):
        command.run(["show", "addition", "--resolved", "--sede", "7"])
    assert capsys.readouterr().out == ""


def test_the_command_of_a_copy_names_what_the_recipe_names_and_is_not_there(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (installed / "own.yaml").write_text("pretrain: here\nprompt_data: a.jsonl\neval_data: b.jsonl\n")
    for place in ("here", "a.jsonl"):
        Path(place).touch()
    assert command.run(["copy", "own", "o.yaml"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("rft-train rl --config o.yaml --eval_data EVAL_DATA")


def test_names_of_the_hub_are_not_asked_for_again(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "pretrain: Qwen/Qwen2.5-0.5B\nprompt_data: openai/gsm8k:main\neval_data: made/test.jsonl\n"
    (installed / "own.yaml").write_text(names)
    assert command.run(["copy", "own", "o.yaml"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("rft-train rl --config o.yaml --eval_data EVAL_DATA")


def test_a_recipe_is_copied_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["copy", "addition"]) == 0
    assert command.run(["copy", "bare", "mine.yaml"]) == 0
    assert Path("addition.yaml").read_text() == ADDITION
    assert Path("mine.yaml").read_text() == "seed: 3\n"
    shown = capsys.readouterr().out.splitlines()
    assert [line.rpartition("rft-train ")[2] for line in shown] == [
        "rl --config addition.yaml --pretrain PRETRAIN --prompt_data PROMPT_DATA",
        "rl --config mine.yaml --pretrain PRETRAIN --prompt_data PROMPT_DATA",
    ]
    Path("mine.yaml").write_text("precious")
    with pytest.raises(RftError) as caught:
        command.run(["copy", "spelling", "mine.yaml"])
    assert (caught.value.problem.code, caught.value.problem.do) == (
        "recipe.exists",
        "rft-train recipes copy spelling my-mine.yaml",
    )
    assert Path("mine.yaml").read_text() == "precious"


def test_a_recipe_is_run_by_its_name_or_from_a_file(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, Arguments]] = []

    def run(recipe: Recipe, parsed: Arguments) -> int:
        calls.append((recipe.path, parsed))
        return 5

    monkeypatch.setattr(recipes_run, "run", run)
    Path("mine.yaml").write_text("seed: 3\n")
    Path("addition").write_text("this is no recipe")
    given = ["--quick", "--data", "a", "--save_path", "b", "--seed", "7"]
    assert command.run(["run", "addition", *given]) == 5
    assert command.run(["run", "mine.yaml"]) == 5
    values = {"data": "a", "save_path": "b", "seed": "7"}
    assert calls == [
        (installed / "addition.yaml", Arguments(["addition"], {"quick"}, [], values)),
        (Path("mine.yaml"), Arguments(["mine.yaml"], set(), [])),
    ]


@pytest.mark.parametrize(
    ("words", "code", "do"),
    [
        ("show adition", "recipe.not_found", "rft-train recipes show addition"),
        ("show qqqqqqqq", "recipe.not_found", "rft-train recipes show addition"),
        ("show", "recipe.not_found", "rft-train recipes show addition"),
        ("copy adition a", "recipe.not_found", "rft-train recipes show addition"),
        ("run absent.yaml", "recipe.not_found", "rft-train recipes show addition"),
        ("show addition bare", "option.stray", "rft-train recipes show --help"),
        ("show addition --seed 7", "option.stray", "rft-train recipes show addition --resolved --seed 7"),
        ("copy addition a b", "option.stray", "rft-train recipes copy --help"),
        ("run addition bare", "option.stray", "rft-train recipes run --help"),
        ("list addition", "option.stray", "rft-train recipes --help"),
        ("run addition --quik", "option.unknown", "--quick"),
        ("shwo", "command.unknown", "rft-train recipes show"),
        ("qqqq", "command.unknown", "rft-train recipes list"),
    ],
)
def test_what_a_verb_does_not_take_is_refused(words: str, code: str, do: str) -> None:
    with pytest.raises(RftError) as caught:
        command.run(words.split())
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)
    assert not Path("a").exists()


@pytest.mark.parametrize("words", [["-h"], ["copy", "addition", "--help"]])
def test_help_does_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(words) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train recipes")
    assert not Path("addition.yaml").exists()
