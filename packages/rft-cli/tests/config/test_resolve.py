"""One settings object from its sources: what wins, what each value's origin is, and all problems at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rft.config.errors import SettingsError
from rft.config.merged_sources import validated
from rft.config.origins import DEFAULT, KEYWORD, GivenSetting
from rft.config.render import config_yaml
from rft.config.schema import REQUIRED, build, schema
from rft_cli.config.resolve import merge, resolve
from rft_cli.records.discovery import with_settings

NeededWords = Callable[..., list[str]]

KEY = "0123456789abcdef" * 2


def codes(command: str, words: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        resolve(command, words.split())
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize("command", [name for name in with_settings() if {"pretrain", "seed"} <= {*schema(name)}])
def test_what_is_resolved_is_the_same_in_all_its_forms(command: str, needed_words: NeededWords) -> None:
    Path("a.yaml").write_text("recipe: {name: sums}\nseed: 3\n")
    needed = needed_words(command, "--pretrain", "m")
    resolved = resolve(command, [*needed, "--config", "a.yaml"])
    assert (resolved.command, resolved.recipe_name, resolved.sources) == (command, "sums", (Path("a.yaml"),))
    assert list(resolved.values) == list(resolved.origins) == list(schema(command))
    given = {name: str(origin) for name, origin in resolved.origins.items() if origin is not DEFAULT}
    flags = {word.removeprefix("--") for word in needed if word.startswith("--")}
    assert given == dict.fromkeys(flags, "command line") | {"seed": "a.yaml:2"}
    assert resolved.settings == build(type(resolved.settings), resolved.values)
    assert resolved.config_yaml == config_yaml(command, resolved.values, resolved.origins, "sums")
    assert resolved.notes == ()


def test_each_source_wins_over_those_before_it(recipes: Path) -> None:
    Path("a.yaml").write_text("seed: 3\ntop_k: 4\nn_samples_per_prompt: 5\n")
    words = ["--seed", "6", "--config", "addition", "--config", "a.yaml"]
    merged = merge("rl", words, [GivenSetting("seed", "seed", ("7",), KEYWORD)])
    names = ("seed", "top_k", "n_samples_per_prompt", "actor_learning_rate", "top_p")
    assert [merged.values[name] for name in names] == [7, 4, 5, 1e-4, 1.0]
    assert [merged.origins[name].kind for name in names] == ["keyword argument", "file", "file", "recipe", "default"]
    assert (merged.recipe_name, len(merged.sources)) == ("a", 2)
    assert [setting.name for setting in merged.missing] == ["pretrain"]
    assert merged.values["pretrain"] is REQUIRED
    assert merged.problems == []


@pytest.mark.parametrize(
    ("header", "name"),
    [("", "a"), ("recipe: {name: sums}\n", "sums"), ("recipe: {name: b/sums}\n", "a"), ("recipe: {name: ..}\n", "..")],
)
def test_a_recipe_s_name_leads_into_no_other_directory(header: str, name: str) -> None:
    Path("a.yaml").write_text(f"{header}seed: 3\n")
    assert merge("rl", ["--config", "a.yaml"]).recipe_name == name


def test_a_file_of_another_command_is_one_problem_and_changes_nothing() -> None:
    Path("a.yaml").write_text("recipe: {command: sft}\nseed: 3\nlearning_rate: 1\n")
    merged = merge("rl", ["--config", "a.yaml"])
    assert [problem.code for problem in merged.problems] == ["file.other_command"]
    assert merged.origins["seed"] is DEFAULT
    Path("a.yaml").write_text("recipe: {command: rl}\nseed: 3\n")
    assert merge("rl", ["--config", "a.yaml"]).values["seed"] == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["option.missing"]),
        ("--pretrain m --sede 1", ["option.unknown"]),
        ("--pretrain m --grad_accum_dtype 1", ["option.refused"]),
        ("--pretrain m --seed x --top_p 2", ["option.value", "option.value"]),
        ("--pretrain m --seed", ["option.no_value"]),
        ("--pretrain m --config", ["option.no_value"]),
        ("--pretrain m --config absent.yaml", ["file.not_found"]),
        ("--pretrain m --no-bf16 true", ["option.value"]),
        ("--pretrain m word", ["option.stray"]),
        (f"--pretrain m --use_wandb {KEY}", ["option.secret"]),
        (f"--pretrain m --use_tensorboard {KEY}", ["option.secret"]),
        ("--pretrain m --temperature 0", ["sampling.greedy"]),
        (
            "word --no-bf16 true --top_p --temperature 0 --seed x --config absent.yaml",
            [
                *("file.not_found", "option.value", "option.no_value"),
                *("option.value", "option.stray", "option.missing"),
            ],
        ),
    ],
)
def test_all_problems_are_told_at_once_and_contradictions_after_them(words: str, expected: list[str]) -> None:
    assert codes("rl", words) == expected


def test_problems_of_files_and_nulls_have_their_lines() -> None:
    Path("a.yaml").write_text("seed: null\nmax_len: null\nname: {a: b}\n")
    merged = merge("rl", ["--config", "a.yaml", "--run_name", KEY])
    assert [(problem.code, problem.where) for problem in merged.problems] == [
        ("file.nested", "a.yaml:3"),
        ("option.value", "a.yaml:1"),
    ]
    assert (merged.values["max_len"], merged.origins["max_len"].line) == (None, 2)
    assert merged.values["run_name"] == KEY, "it is refused as a project alone"
    with pytest.raises(SettingsError) as caught:
        validated(merged)
    assert [problem.code for problem in caught.value.problems] == ["file.nested", "option.value", "option.missing"]


def test_a_setting_without_a_default_names_the_command_that_needs_it() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("eval", [])
    assert caught.value.problem.do == "rft-train eval --pretrain PATH"
