"""The stages of a recipe with doubles of their commands: order, places, what is passed over, continued and refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rft.config.errors import SettingsError
from rft_cli.commands import recipes_run
from rft_cli.commands.arguments import parse
from rft_cli.config import recipes
from rft_cli.config.recipe_stages import option
from rft_cli.records.discovery import commands as records
from rft_cli.records.discovery import find_command
from rft_core.errors import CheckpointError, DataError, OptionsError, RftError
from rft_trainer.runs import names

RECIPE = """
recipe:
  command: rl
  task: doubles
  needs: toy/rows.jsonl
  stages:
    - name: build
      run: build --texts {data}/toy/rows.jsonl --seed {seed} --save_path {run}/untrained
    - name: first
      run: sft --pretrain {run}/untrained --prompt_data {data}/toy/rows.jsonl --seed {seed} --save_path {run}/first
      quick: --max_steps 1
    - name: second
      run: rl --config {recipe} --pretrain {final:first} --prompt_data {data}/toy/rows.jsonl --save_path {run}/second
      quick: --max_steps 2
    - name: answers
      run: eval --pretrain {final:second} --eval_data {data}/toy/rows.jsonl --output {run}/answers.jsonl
pretrain: model
"""
LONE = "recipe:\n  stages:\n    - name: a\n      run: sft --pretrain m --prompt_data {data}/a --save_path {run}/a\n"
DONE = "run.finished"


class Commands:
    """Doubles of the commands: they record their words and write what a finished stage leaves."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.fails: dict[str, RftError] = {}

    def command(self, name: str) -> Callable[[list[str]], int]:
        def run(argv: list[str]) -> int:
            self.calls.append([name, *argv])
            if name in self.fails:
                raise self.fails[name]
            target = Path(argv[0] if name == "resume" else option(argv, "output") or option(argv, "save_path"))
            if name == "eval":
                target.write_text("{}\n")
            elif name == "build":
                target.mkdir(parents=True)
                (target / "config.json").write_text("{}")
            else:
                unfinished(target, saved=True)
                (target / "summary.json").write_text('{"outcome": "finished"}')
            return 0

        return run

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def unfinished(target: Path, *, saved: bool) -> None:
    """Write a training run that has begun, with or without a checkpoint."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.yaml").write_text("seed: 1\n")
    model = target / "checkpoints" / "step_000010" / "model"
    if saved:
        model.mkdir(parents=True, exist_ok=True)
        (model.parent / "manifest.json").write_text("{}")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    doubles = Commands()
    for name in ("build", "sft", "rl", "eval", "resume"):
        module = ModuleType(f"double_of_{name}")
        module.run = doubles.command(name)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        double = replace(find_command(name), run=f"{module.__name__}:run", training=None)
        monkeypatch.setitem(records(), name, double)
    return doubles


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of data that the environment names, and the recipe beside it."""
    folder = tmp_path / "data"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "rows.jsonl").write_text('{"input": "1", "output": "2"}\n')
    (tmp_path / "toy.yaml").write_text(RECIPE)
    (tmp_path / "lone.yaml").write_text(LONE)
    monkeypatch.setenv("RFT_DATA_DIR", str(folder))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return folder


def start(*words: str, recipe: str = "toy.yaml") -> int:
    parsed = parse("recipes run", words, most=0, switches=["quick"], options=["data", "save_path", "seed"])
    return recipes_run.run(recipes.read(Path(recipe)), parsed)


def refused(*words: str, recipe: str = "toy.yaml") -> RftError:
    with pytest.raises(RftError) as caught:
        start("--save_path", "made", *words, recipe=recipe)
    return caught.value


def expected(root: Path, data: Path, seed: str = "42", quick: bool = False) -> list[list[str]]:
    made, rows, model = root / "made", str(data / "toy" / "rows.jsonl"), "checkpoints/step_000010/model"
    first = ["sft", "--pretrain", f"{made}/untrained", "--prompt_data", rows, "--seed", seed]
    second = ["rl", "--config", f"{root}/toy.yaml", "--pretrain", f"{made}/first/{model}", "--prompt_data", rows]
    first += ["--save_path", f"{made}/first", *(["--max_steps", "1"] if quick else [])]
    second += ["--save_path", f"{made}/second", *(["--max_steps", "2"] if quick else [])]
    return [
        ["build", "--texts", rows, "--seed", seed, "--save_path", f"{made}/untrained"],
        first,
        second,
        ["eval", "--pretrain", f"{made}/second/{model}", "--eval_data", rows, "--output", f"{made}/answers.jsonl"],
    ]


def test_stages_run_once_in_order_with_their_places_filled(
    commands: Commands, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--save_path", "made") == 0
    assert commands.calls == expected(tmp_path, data)
    record = {"recipe": f"{tmp_path}/toy.yaml", "data": str(data), "seed": "42", "quick": False}
    assert Path("made/stages.json").read_text() == json.dumps(record, indent=2) + "\n"
    assert Path("made/recipe.yaml").read_text() == RECIPE
    shown = capsys.readouterr().out
    assert [f"stage {number} of 4, {name}" in shown for number, name in enumerate(("build", "first"), 1)] == [True] * 2
    assert start("--save_path", "made") == 0
    assert commands.names() == ["build", "sft", "rl", "eval"]


def test_a_trial_adds_its_flags_and_is_remembered(commands: Commands, data: Path, tmp_path: Path) -> None:
    assert start("--save_path", "made", "--quick", "--seed", "7") == 0
    wanted = expected(tmp_path, data, "7", quick=True)
    assert commands.calls == wanted
    (tmp_path / "made" / "second").rename(tmp_path / "away")
    assert start("--save_path", "made") == 0
    assert commands.calls[4:] == [wanted[2]]
    assert json.loads(Path("made/stages.json").read_text())["quick"] is True


def test_a_stage_with_a_checkpoint_is_continued_and_one_without_starts_again(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    start("--save_path", "made")
    for name in ("first", "second"):
        (made / name / "summary.json").write_text('{"outcome": "interrupted"}')
    (made / "second" / "checkpoints" / "step_000010" / "manifest.json").unlink()
    commands.calls.clear()
    assert start("--save_path", "made") == 0
    assert commands.calls == [["resume", f"{made}/first"], expected(tmp_path, data)[2]]
    assert (made / "second-unsaved-1" / "summary.json").is_file()
    assert not (made / "second-unsaved-1" / "checkpoints" / "step_000010" / "manifest.json").exists()


def test_every_run_that_is_set_aside_has_a_name_of_its_own(commands: Commands, tmp_path: Path) -> None:
    made = tmp_path / "made"
    start("--save_path", "made")
    for number in (1, 2, 3):
        (made / "first" / "summary.json").unlink()
        (made / "first" / "checkpoints" / "step_000010" / "manifest.json").unlink()
        (made / "first" / "mark").write_text(str(number))
        assert start("--save_path", "made") == 0
        assert (made / f"first-unsaved-{number}" / "mark").read_text() == str(number)
    assert sorted(path.name for path in made.glob("first*")) == ["first", *(f"first-unsaved-{n}" for n in (1, 2, 3))]


def test_a_training_without_a_configuration_and_an_evaluation_are_started_and_not_continued(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "made" / "first").mkdir(parents=True)
    (tmp_path / "made" / "stages.json").write_text("{}")
    (tmp_path / "made" / "untrained").mkdir()
    (tmp_path / "made" / "untrained" / "config.json").write_text("{}")
    assert refused().problem.code == "recipe.not_its_directory"
    (tmp_path / "made" / "stages.json").write_text('{"seed": "42"}')
    assert start("--save_path", "made") == 0
    assert commands.calls == expected(tmp_path, data)[1:]


@pytest.mark.parametrize(("code", "names"), [(DONE, ["rl", "eval"]), ("checkpoint.damaged", ["rl"])])
def test_a_stage_that_had_finished_all_its_steps_is_no_failure(
    code: str, names: list[str], commands: Commands, tmp_path: Path
) -> None:
    start("--save_path", "made")
    (tmp_path / "made" / "second" / "summary.json").unlink()
    (tmp_path / "made" / "second" / "config.yaml").unlink()
    (tmp_path / "made" / "answers.jsonl").unlink()
    commands.calls.clear()
    commands.fails["rl"] = CheckpointError(code=code, what="", where="", why="")
    if code == DONE:
        assert start("--save_path", "made") == 0
    else:
        assert refused().problem.code == code
    assert commands.names() == names


def test_the_first_failure_ends_it_and_later_stages_are_not_begun(commands: Commands) -> None:
    commands.fails["sft"] = DataError(code="test.broken", what="", where="", why="")
    assert refused().problem.code == "test.broken"
    assert commands.names() == ["build", "sft"]


def test_minutes_and_seconds_of_the_call_are_told(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 100.0, 221.4, 225.0])
    monkeypatch.setattr(recipes_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert start("--save_path", "made", recipe="lone.yaml") == 0
    shown = capsys.readouterr().out
    assert shown.index("2 min 01 s") < shown.index("2 min 05 s")


def test_a_run_without_a_path_is_named_after_its_recipe(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "run_name", lambda prefix, *, under: f"{prefix}-in-{under}")
    assert start(recipe="lone.yaml") == 0
    assert commands.calls[0][-1] == str(Path("runs/lone-in-runs/a").resolve())


# --- data


@pytest.mark.parametrize(
    ("words", "environment", "place"),
    [
        (["--data", "here"], "there", "here"),
        ([], "there", "there"),
        ([], None, "."),
        (["--data", "here"], None, "here"),
    ],
)
def test_data_are_where_the_flag_says_else_the_environment_else_here(
    words: list[str], environment: str | None, place: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RFT_DATA_DIR")
    if environment:
        monkeypatch.setenv("RFT_DATA_DIR", environment)
    assert start("--save_path", "made", *words, recipe="lone.yaml") == 0
    assert commands.calls[0][4] == f"{Path(place).resolve()}/a"


def test_the_data_of_the_first_call_are_those_of_later_ones(
    commands: Commands, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RFT_DATA_DIR")
    assert refused().problem.code == "recipe.no_data"
    assert start("--save_path", "made", "--data", "data") == 0
    assert start("--save_path", "made") == 0
    monkeypatch.setenv("RFT_DATA_DIR", "elsewhere")
    assert start("--save_path", "made") == 0
    assert len(commands.calls) == 4


@pytest.mark.parametrize(("given", "meant"), [("data/toy", "{}/data"), ("nowhere", "DIR ")])
def test_data_that_are_missing_are_refused_with_the_directory_that_was_meant(
    given: str, meant: str, tmp_path: Path
) -> None:
    problem = refused("--data", given).problem
    assert problem.code == "recipe.missing_data"
    assert problem.do.startswith(f"--data {meant.format(tmp_path)}")


# --- what is refused


@pytest.mark.parametrize(("ranks", "code"), [("2", "recipe.ranks"), ("3", "recipe.ranks"), ("1", "")])
def test_stages_run_in_one_process(ranks: str, code: str, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    if code:
        assert refused().problem.code == code
    else:
        assert start("--save_path", "made") == 0
    assert bool(commands.calls) is not bool(code)


def test_settings_of_a_later_stage_are_refused_before_the_first_begins(commands: Commands) -> None:
    Path("toy.yaml").write_text(RECIPE.replace("--prompt_data {data}", "--promt_data {data}"))
    error = refused()
    assert isinstance(error, SettingsError)
    assert commands.calls == []
    assert not Path("made").exists()


def test_a_recipe_of_one_command_has_no_stages() -> None:
    Path("one.yaml").write_text("recipe:\n  command: sft\nseed: 1\n")
    problem = refused(recipe="one.yaml").problem
    assert (problem.code, problem.do) == ("recipe.no_stages", "rft-train sft --config one")


@pytest.mark.parametrize("seed", ["one", "-1", "1.5"])
def test_a_seed_is_a_whole_number(seed: str) -> None:
    error = refused("--seed", seed)
    assert isinstance(error, OptionsError)
    assert (error.problem.code, error.problem.do) == ("option.value", "--seed 42")


def test_a_directory_of_other_files_is_refused_and_an_empty_one_is_taken(commands: Commands) -> None:
    Path("made").mkdir()
    assert start("--save_path", "made") == 0
    Path("made/stages.json").unlink()
    assert refused().problem.code == "recipe.not_its_directory"
    assert commands.names() == ["build", "sft", "rl", "eval"]


@pytest.mark.parametrize(
    ("words", "recipe", "name"),
    [
        (["--seed", "8"], "toy.yaml", "seed = 42, now seed = 8"),
        (["--quick"], "toy.yaml", "quick = False, now quick = True"),
        (["--data", "copy"], "toy.yaml", "data = "),
        ([], "other.yaml", "recipe = "),
    ],
)
def test_other_choices_on_the_same_directory_are_refused(
    words: list[str], recipe: str, name: str, commands: Commands, data: Path, tmp_path: Path
) -> None:
    assert start("--save_path", "made") == 0
    (tmp_path / "copy" / "toy").mkdir(parents=True)
    (tmp_path / "copy" / "toy" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "other.yaml").write_text(RECIPE)
    problem = refused(*words, recipe=recipe).problem
    assert (problem.code, problem.do) == ("recipe.other_choices", f"--save_path {tmp_path}/made-2")
    assert name in problem.what
    assert len(commands.calls) == 4


def test_an_installed_recipe_is_recorded_by_its_name(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "DIRECTORY", tmp_path)
    parsed = parse("recipes run", ["--save_path", "made"], most=0, options=["save_path"])
    assert recipes_run.run(recipes.load("toy"), parsed) == 0
    assert json.loads(Path("made/stages.json").read_text())["recipe"] == "toy"
    assert commands.calls[2][2] == "toy"
