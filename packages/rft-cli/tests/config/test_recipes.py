"""Recipes: their names, what their headers say, and the file that a `--config` means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rft.config.merged_sources import SettingsFile
from rft_cli.config import recipes
from rft_cli.config.recipe_stages import RecipeStage

HEADER = "recipe:\n  command: rl\n  task: sums\n  hardware: a CPU\n  minutes: 2\n"
HEADER += "  expected: 0.1 -> 0.9\n  date: today\n"
STAGES = "  needs: a/b.jsonl, ,c.jsonl\n  stages:\n    - {name: one, run: sft --seed 1, quick: --max_steps 2}\n"


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    folder = tmp_path / "catalog"
    folder.mkdir()
    (folder / "sums.yaml").write_text(f"{HEADER}{STAGES}seed: 3\n")
    (folder / "bare.yaml").write_text("seed: 3\n")
    (folder / "notes.txt").write_text("")
    return folder


@pytest.fixture
def installed(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same recipes in place of the installed ones."""
    monkeypatch.setattr(recipes, "DIRECTORY", catalog)
    return catalog


def test_recipes_come_with_the_package() -> None:
    assert {"quickstart", "quickstart-sft"} <= set(recipes.names())
    assert recipes.load("quickstart").command == "rl"
    assert recipes.load("quickstart").is_installed


def test_a_recipe_says_what_its_header_says(catalog: Path) -> None:
    assert recipes.names(catalog) == ["bare", "sums"]
    recipe = recipes.load("sums", catalog)
    assert recipe == recipes.read(catalog / "sums.yaml")
    assert (recipe.name, recipe.path, recipe.is_installed) == ("sums", catalog / "sums.yaml", False)
    assert (recipe.command, recipe.task, recipe.hardware) == ("rl", "sums", "a CPU")
    assert (recipe.minutes, recipe.expected, recipe.date) == ("2", "0.1 -> 0.9", "today")
    assert recipe.needs == ("a/b.jsonl", "c.jsonl")
    assert recipe.stages == (RecipeStage("one", ("sft", "--seed", "1"), ("--max_steps", "2")),)


def test_a_recipe_of_a_folder_is_found_by_its_name_and_says_its_machines(installed: Path) -> None:
    (installed / "large").mkdir()
    header = "recipe: {command: sft, status: not yet run, memory: 58 of 79 GiB, nodes: 2, gpus_per_node: eight}\n"
    (installed / "large" / "words.yaml").write_text(header)
    assert recipes.names() == ["bare", "sums", "words"]
    recipe = recipes.load("words")
    assert (recipe.status, recipe.memory, recipe.machine) == ("not yet run", "58 of 79 GiB", {"nodes": 2})
    assert recipe.is_installed
    assert recipes.find("words")[0] == SettingsFile(installed / "large" / "words.yaml", "words", is_recipe=True)
    assert recipes.machine_of(["--seed", "1", "--config", "words"]) == ({"nodes": 2}, "words")
    assert recipes.machine_of(["--config", "nowhere"]) == recipes.machine_of([]) == ({}, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sums --seed 1", "rl --config sums --seed 1"),
        ("rl --config bare", "rl --config bare"),
        ("--config sums", "--config sums"),
        ("bare", "bare"),
        ("nowhere 1", "nowhere 1"),
        ("", ""),
    ],
)
def test_a_recipe_in_the_place_of_a_command_stands_for_it(installed: Path, words: str, expected: str) -> None:
    (installed / "rl.yaml").write_text("recipe: {command: sft}\n")
    assert recipes.with_command(words.split(), ["rl", "sft"]) == expected.split()


def test_a_file_without_a_header_is_a_recipe_of_empty_fields(catalog: Path) -> None:
    recipe = recipes.load("bare", catalog)
    assert (recipe.command, recipe.task, recipe.date, recipe.needs, recipe.stages) == ("", "", "", (), ())


def test_a_name_a_file_and_a_run_are_found(installed: Path) -> None:
    assert recipes.find("sums") == (SettingsFile(installed / "sums.yaml", "sums", is_recipe=True), None)
    assert recipes.find(f"{installed}/bare.yaml") == (
        SettingsFile(installed / "bare.yaml", "bare", is_recipe=False),
        None,
    )
    Path("run").mkdir()
    Path("run/config.yaml").write_text("")
    assert recipes.find("run") == (SettingsFile(Path("run/config.yaml"), "run", is_recipe=False), None)


def test_what_is_on_the_disk_wins_over_a_recipe_of_its_name(installed: Path) -> None:
    Path("sums").mkdir()
    assert recipes.find("sums")[0] == SettingsFile(installed / "sums.yaml", "sums", is_recipe=True), "no run is in it"
    Path("sums/config.yaml").write_text("")
    assert recipes.find("sums")[0] == SettingsFile(Path("sums/config.yaml"), "sums", is_recipe=False)
    Path("sums/config.yaml").unlink()
    Path("sums").rmdir()
    Path("sums").write_text("")
    assert recipes.find("sums")[0] == SettingsFile(Path("sums"), "sums", is_recipe=False)


@pytest.mark.parametrize(
    ("reference", "do"),
    [
        ("sumz", "--config sums"),
        ("mein.yaml", "--config mine.yaml"),
        ("below/mein.yaml", "--config below/mine.yaml"),
        ("below/mine", "--config below/mine.yaml"),
        ("mine", "--config mine.yaml"),
        ("sums.yml", "rft-train recipes"),
        ("a/sums", "rft-train recipes"),
        ("below/deeper/sums", "rft-train recipes"),
        ("qqqqqqq", "rft-train recipes"),
    ],
)
def test_what_is_not_found_is_answered_with_the_nearest_that_is_there(reference: str, do: str, installed: Path) -> None:
    Path("below").mkdir()
    for name in ("mine.yaml", "below/mine.yaml", "mine.txt"):
        Path(name).write_text("")
    source, problem = recipes.find(reference)
    assert source is None
    assert problem is not None
    assert (problem.code, problem.do) == ("file.not_found", do)


def test_what_is_no_file_is_no_remedy_for_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.yaml")
    source, problem = recipes.find(str(tmp_path / "mine.yaml"))
    assert source is None
    assert problem is not None
    assert problem.what.endswith("mine.yaml is a pipe, and no file")
    assert "mine.yaml" not in problem.do
