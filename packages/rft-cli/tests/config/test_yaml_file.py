"""Files of settings: lines, origins, precedence, and what a broken or hostile file leads to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rft.config.errors import SettingsError
from rft.config.origins import DEFAULT
from rft.config.schema import schema
from rft.resolved import Resolved
from rft.settings import RlSettings
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import with_settings
from rft_core.errors import Problem

NeededWords = Callable[..., list[str]]


def settings_of(text: str, *argv: str) -> Resolved[RlSettings]:
    Path("my.yaml").write_text(text)
    return resolve("rl", ["--config", "my.yaml", *argv])


def problems_of(text: str | bytes, *argv: str) -> tuple[Problem, ...]:
    Path("my.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "model", "--config", "my.yaml", *argv])
    return caught.value.problems


def test_flags_win_over_files_and_files_over_defaults() -> None:
    resolved = settings_of("pretrain: model\nseed: 1\ntop_p: 0.9\n", "--seed", "2")
    assert (resolved.values["seed"], resolved.values["top_p"], resolved.values["top_k"]) == (2, 0.9, 0)
    assert str(resolved.origins["seed"]) == "command line"
    assert str(resolved.origins["top_p"]) == "my.yaml:3"
    assert resolved.origins["top_p"].text == "0.9"
    assert resolved.origins["top_k"] is DEFAULT


def test_flags_win_wherever_they_stand() -> None:
    Path("my.yaml").write_text("seed: 1\n")
    assert resolve("rl", ["--seed", "2", "--pretrain", "m", "--config", "my.yaml"]).values["seed"] == 2


def test_a_later_file_wins_over_an_earlier_one() -> None:
    Path("first.yaml").write_text("pretrain: a\nseed: 1\ntop_p: 0.5\n")
    Path("second.yaml").write_text("seed: 2\n")
    resolved = resolve("rl", ["--config", "first.yaml", "--config=second.yaml"])
    assert (resolved.values["seed"], resolved.values["top_p"]) == (2, 0.5)
    assert [path.name for path in resolved.sources] == ["first.yaml", "second.yaml"]
    assert resolved.recipe_name == "second"


def test_a_recipe_is_found_by_name_and_named_as_the_origin(recipes: Path) -> None:
    resolved = resolve("rl", ["--config", "addition", "--pretrain", "m"])
    assert resolved.values["n_samples_per_prompt"] == 4
    assert resolved.values["actor_learning_rate"] == 1e-4
    assert resolved.origins["n_samples_per_prompt"].kind == "recipe"
    assert resolved.origins["n_samples_per_prompt"].line == 8
    assert resolved.recipe_name == "addition"


def test_a_stored_configuration_keeps_the_name_of_its_recipe(recipes: Path) -> None:
    first = resolve("rl", ["--config", "addition", "--pretrain", "m"])
    Path("config.yaml").write_text(first.config_yaml)
    again = resolve("rl", ["--config", "config.yaml", "--seed", "3"])
    assert again.recipe_name == "addition"
    Path("config.yaml").write_text(again.config_yaml)
    assert resolve("rl", ["--config", "config.yaml"]).recipe_name == "addition"


def test_a_name_that_is_a_path_is_not_taken_from_a_file() -> None:
    assert settings_of("recipe: {command: rl, name: ../../elsewhere}\npretrain: m\n").recipe_name == "my"


def test_a_recipe_of_another_command_is_refused(recipes: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--config", "spelling", "--pretrain", "m"])
    assert caught.value.problem.do == "rft-train sft --config spelling"


def test_an_unknown_recipe_names_the_nearest(recipes: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--config", "adition", "--pretrain", "m"])
    assert caught.value.problem.do == "--config addition"


def test_a_missing_file_names_the_nearest_file() -> None:
    Path("mine.yaml").write_text("seed: 1\n")
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--config", "mien.yaml", "--pretrain", "m"])
    assert caught.value.problem.do == "--config mine.yaml"


@pytest.mark.parametrize(
    "command",
    [name for name in with_settings() if "input_template" in schema(name) and "catalogue" not in schema(name)],
)
def test_the_written_configuration_reads_back_to_the_same_values(command: str, needed_words: NeededWords) -> None:
    first = resolve(
        command,
        [
            *needed_words(command, "--pretrain", "a: b # c"),
            "--top_p=0.5" if "top_p" in schema(command) else "--seed=7",
            "--input_template",
            "Q: {}\n'A':",
        ],
    )
    Path("run").mkdir()
    Path("run/config.yaml").write_text(first.config_yaml)
    second = resolve(command, ["--config", "run"])
    assert second.values == first.values
    assert second.settings == first.settings


def test_the_written_configuration_names_every_origin() -> None:
    resolved = settings_of("pretrain: model\ntop_p: 0.9\n", "--seed", "2")
    lines = {line.split(":")[0]: line.rpartition("# ")[2] for line in resolved.config_yaml.splitlines() if ": " in line}
    assert (lines["seed"], lines["top_p"], lines["top_k"]) == ("command line", "my.yaml:2", "default")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("actor-learning-rate: 1e-4", "actor_learning_rate", 1e-4),
        ("adam_betas: [0.8, 0.9]", "adam_betas", (0.8, 0.9)),
        ("adam_betas: 0.8 0.9", "adam_betas", (0.8, 0.9)),
        ("eps_clip_high: null", "eps_clip_high", None),
        ("eps_clip_high:", "eps_clip_high", None),
        ("bf16: yes", "bf16", True),
        ("bf16: 0", "bf16", False),
        ("disable_engine_sleep: true", "enable_engine_sleep", False),
        ("run_name: 2026-11-20", "run_name", "2026-11-20"),
        ("run_name: 0123", "run_name", "0123"),
        ("n_samples_per_prompt: '8'", "n_samples_per_prompt", 8),
        (
            "apply_chat_template: true\nsystem_prompt: |\n  Be brief.\n  Be right.\n",
            "system_prompt",
            "Be brief.\nBe right.\n",
        ),
    ],
)
def test_values_in_files_mean_what_they_mean_on_the_command_line(text: str, name: str, value: object) -> None:
    assert settings_of(f"pretrain: model\n{text}\n").values[name] == value


def test_every_problem_of_a_file_is_told_with_its_line() -> None:
    found = problems_of(
        "seed: 1\nrolout_batch_size: 4\nbf16: maybe\n\ngrad_accum_dtype: 3\ntop_p: two\n", "--sede", "1"
    )
    told = {problem.where: problem for problem in found}
    assert list(told) == ["my.yaml:2", "my.yaml:3", "my.yaml:5", "my.yaml:6", "command line"]
    assert told["my.yaml:2"].do == "rollout_batch_size: 4"
    assert told["my.yaml:2"].why.startswith("nearest: rollout_batch_size")
    assert "true, false" in told["my.yaml:3"].what
    assert "grad_accum_dtype cannot be used" in told["my.yaml:5"].what
    assert "a number above 0" in told["my.yaml:6"].what


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("seed: 1\nseed: 2\n", "my.yaml:2", "given twice"),
        ("bf16: true\ndisable-engine-sleep: true\nenable_engine_sleep: true\n", "my.yaml:3", "given twice"),
        ("seed: 1\nmodels:\n  pretrain: x\n", "my.yaml:3", "holds other settings"),
        ("seed: 1\nmodel:\n  pretrain: {a: x}\n", "my.yaml:3", "model.pretrain holds other settings"),
        ("pretrain: x\nmodel:\n  pretrain: y\n", "my.yaml:3", "model.pretrain is given twice"),
        ("seed: [1, [2]]\n", "my.yaml:1", "holds other settings"),
        ("seed: 1\n- 3\n", "my.yaml:2", "not YAML"),
        ("seed: 'a\n", "my.yaml:2", "not YAML"),
        ("\tseed: 1\n", "my.yaml:1", "not YAML"),
        ("- seed\n- 1\n", "my.yaml:1", "no settings"),
        ("just text\n", "my.yaml:1", "no settings"),
        ("seed: 1\nrun_name: !!python/object/apply:os.system ['touch owned']\n", "my.yaml:2", "!!python"),
        ("run_name: !!python/name:os.system\n", "my.yaml:1", "!!python"),
        ("run_name: !secret x\n", "my.yaml:1", "!secret"),
        ("model: !!python/object:os.system {}\n", "my.yaml:1", "model has the tag !!python"),
        ("seed: 1\nmodel: !secret\n  pretrain: x\n", "my.yaml:2", "model has the tag !secret"),
        ("!secret\nseed: 1\n", "my.yaml:1", "the file has the tag !secret"),
        ("!!python/name:os.system seed: 1\n", "my.yaml:1", "the name seed has the tag !!python"),
        ("recipe: !secret {command: rl}\n", "my.yaml:1", "recipe has the tag !secret"),
        ("recipe: {command: rl, name: !secret x}\n", "my.yaml:1", "recipe.name has the tag !secret"),
        ("? [a, b]\n: 1\n", "my.yaml:1", "one word"),
        ("run_name: null\n", "my.yaml:1", "takes text"),
        ("seed: null\n", "my.yaml:1", "a whole number"),
        ("bf16: on\n", "my.yaml:1", "true, false"),
        ("seed: true\n", "my.yaml:1", "a whole number"),
        (b"seed: \xff\xfe\n", "my.yaml", "not text"),
        ("[" * 3000, "my.yaml", "nested too deeply"),
        ("# " + "x" * 1_000_001, "my.yaml", "too large"),
    ],
)
def test_a_file_that_is_not_settings_is_told_with_its_line(text: str | bytes, where: str, part: str) -> None:
    found = problems_of(text)
    assert [problem.where for problem in found] == [where]
    assert part in found[0].what
    assert found[0].do


def test_nothing_in_a_file_is_run() -> None:
    problems_of("run_name: !!python/object/apply:os.system ['touch owned']\n")
    assert not Path("owned").exists()


def test_an_empty_file_changes_nothing() -> None:
    assert settings_of("# nothing yet\n", "--pretrain", "m").origins["seed"] is DEFAULT


def test_config_needs_a_name() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", "--config"])
    assert (caught.value.problem.code, caught.value.problem.do) == ("option.no_value", "rft-train recipes")
