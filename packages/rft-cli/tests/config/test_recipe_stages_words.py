"""The command line of a stage: its fields, its places, and the model of the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_cli.config.recipe_stages import RecipeStage, final_model, option, read_stage
from rft_core.errors import DataError


def test_a_stage_has_a_name_words_and_words_for_a_trial() -> None:
    stage = read_stage({"name": "one", "run": "sft --a 'b c'", "quick": "--d e"}, Path("r.yaml"))
    assert stage == RecipeStage("one", ("sft", "--a", "b c"), ("--d", "e"))
    assert stage.command == "sft"
    assert stage.words({}, quick=False) == ["sft", "--a", "b c"]
    assert stage.words({}, quick=True) == ["sft", "--a", "b c", "--d", "e"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"name": "", "run": "sft"}, "recipe.stage"),
        ({"name": "a", "run": ""}, "recipe.stage"),
        ({"name": "a"}, "recipe.stage"),
        ({"run": "sft --seed 1"}, "recipe.stage"),
        ({"name": "a", "run": "remove x"}, "recipe.stage"),
        ({"name": "a", "run": "x sft"}, "recipe.stage"),
        ({"name": "a", "run": "sft", "fast": ""}, "recipe.stage"),
        ({"name": "a", "run": "sft 'b"}, "recipe.quotes"),
        ({"name": "a", "run": "sft", "quick": "'b"}, "recipe.quotes"),
    ],
)
def test_a_stage_that_cannot_be_run_is_refused(fields: dict[str, str], code: str) -> None:
    with pytest.raises(DataError) as caught:
        read_stage(fields, Path("r.yaml"))
    assert (caught.value.problem.code, caught.value.problem.where) == (code, "r.yaml")


@pytest.mark.parametrize("command", ["build", "sft", "rl", "eval", "generate"])
def test_a_stage_is_one_of_the_commands_whose_work_is_found_again(command: str) -> None:
    assert read_stage({"name": "a", "run": command}, Path()).run == (command,)


def test_places_are_filled_and_other_braces_stay(tmp_path: Path) -> None:
    run = "sft {data}/x{seed} {recipe} {run} {final:a.b-1} {final:} {other} {} {seed"
    values = {"run": str(tmp_path), "data": "/two words", "seed": "4", "recipe": "r.yaml"}
    assert read_stage({"name": "s", "run": run}, Path()).words(values, quick=False) == [
        *("sft", "/two words/x4", "r.yaml", str(tmp_path), f"{tmp_path}/a.b-1/checkpoints/step_*/model"),
        *("{final:}", "{other}", "{}", "{seed"),
    ]


def test_the_final_model_is_the_newest_checkpoint_or_the_model_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert final_model(run) == run / "checkpoints" / "step_*" / "model"
    for step in ("step_000002", "step_000010", "step_000005", "step_unfinished"):
        (run / "checkpoints" / step / "model").mkdir(parents=True)
    assert final_model(run) == run / "checkpoints" / "step_000010" / "model"
    (run / "config.json").write_text("{}")
    assert final_model(run) == run


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--path a --other b", "a"),
        ("--path=a", "a"),
        ("--path=", ""),
        ("--path a --path b", "b"),
        ("--path a --path=b --other c", "b"),
        ("--other b --path", ""),
        ("sft --other path", ""),
        ("path a", ""),
        ("", ""),
    ],
)
def test_an_option_has_the_value_that_was_given_last(line: str, value: str) -> None:
    assert option(line.split(), "path") == value


def test_dashes_within_a_name_are_underscores() -> None:
    assert option(["--save-path", "a"], "save_path") == "a"
