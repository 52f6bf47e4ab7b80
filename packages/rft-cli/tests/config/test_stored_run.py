"""A run in place of the model: its stored settings become flags, its training and what is empty are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.schema import schema
from rft.config.trained_model import model_in_place_of_run, newest_model
from rft.stages import evaluate
from rft.stages.evaluate import TrainedModel
from rft_cli.config.resolve import resolve
from rft_cli.config.stored_run import as_words, names_run, read_values, with_run
from rft_core.errors import DataError

OF_TRAINING = ("temperature", "top_p", "top_k", "min_p", "prompt_data", "max_samples", "n_samples_per_prompt")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose newest checkpoint is found, and the settings that it trained with."""
    path = tmp_path / "run"
    path.mkdir()
    words = ["--pretrain", "base", "--prompt_data", "train.jsonl", "--eval_data", "test.jsonl", "--seed", "5"]
    words += ["--temperature", "0.7", "--top_p", "0.5", "--top_k", "3", "--min_p", "0.1", "--max_samples", "9"]
    words += ["--n_samples_per_prompt", "2", "--bf16", "--reward", "exact", "--generate_max_len", "12"]
    words += ["--no-apply_chat_template", "--input_template", "Q: {} A:", "--images_key", "image", "--shuffle_images"]
    (path / "config.yaml").write_text(resolve("rl", words).config_yaml)

    def trained_model(named: Path, *, asked_by: str) -> TrainedModel:
        assert (named, asked_by) == (Path("some/checkpoint"), "rft-train eval")
        return TrainedModel(path, path / "model")

    monkeypatch.setattr(evaluate, "trained_model", trained_model)
    return path


@pytest.mark.parametrize(
    ("argv", "names"), [([], False), (["run"], True), (["--seed", "run"], False), (["run", "--seed"], True)]
)
def test_the_first_word_names_a_run_unless_it_is_a_flag(argv: list[str], names: bool) -> None:
    assert names_run(argv) is names
    if not names:
        assert with_run(argv, "eval") == argv


def test_held_out_rows_are_evaluated_as_the_run_did(run: Path) -> None:
    config = run / "config.yaml"
    own = "eval_input_key: question\neval_label_key: answer\neval_n: 4\neval_temperature: 0.6\n"
    named = [line for line in config.read_text().splitlines() if line.split(":")[0] not in own]
    config.write_text("\n".join(named) + f"\n{own}")
    values = resolve("eval", with_run(["some/checkpoint"], "eval")).values
    assert (values["input_key"], values["label_key"]) == ("question", "answer")
    assert (values["eval_n"], values["temperature"]) == (4, 0.6)
    given = resolve("eval", with_run(["some/checkpoint", "--input_key", "input"], "eval")).values
    assert given["input_key"] == "input", "flags that are given come last"


def test_an_evaluation_repeats_what_the_run_did_but_for_how_it_trained(run: Path) -> None:
    resolved = resolve("eval", with_run(["some/checkpoint", "--seed", "8"], "eval"))
    values = resolved.values
    assert values["pretrain"] == str(run / "model")
    assert (values["eval_data"], values["reward"], values["generate_max_len"]) == ("test.jsonl", "exact", 12)
    assert (values["bf16"], values["apply_chat_template"], values["input_template"]) == (True, False, "Q: {} A:")
    assert values["images_key"] == "image"
    assert values["seed"] == 8, "flags that are given come last"
    plain = resolve("eval", ["--pretrain", "m"]).values
    for name in OF_TRAINING:
        if name in plain:
            assert values[name] == plain[name], name
    assert not any(f"--{name}" in with_run(["some/checkpoint"], "eval") for name in (*OF_TRAINING, "shuffle_images"))


def test_settings_are_flags_of_the_command_that_has_them() -> None:
    values: dict[str, Any] = {"seed": 5, "bf16": True, "apply_chat_template": False, "reward": "", "max_len": None}
    values |= {"temperature": 0.5, "no_setting": 1}
    words = as_words(values, "eval")
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    assert pairs == {"--seed": "5", "--bf16": "true", "--apply_chat_template": "false", "--temperature": "0.5"}
    assert list(pairs) == [f"--{name}" for name in schema("eval") if f"--{name}" in pairs]
    assert as_words({"adam_betas": [0.9, 0.95]}, "sft") == ["--adam_betas", "0.9", "0.95"]


def test_a_configuration_is_its_settings_without_the_header(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("recipe: {command: rl}\nseed: 3\n")
    assert read_values(path) == {"seed": 3}
    path.write_text("- a list\n")
    assert read_values(path) == {}
    path.unlink()
    with pytest.raises(DataError) as caught:
        read_values(path)
    assert (caught.value.problem.code, caught.value.problem.where) == ("run.no_config", str(tmp_path))


def test_a_run_as_the_model_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("step_000002", "step_000010", "quarantine_step_000012"):
        (run / "checkpoints" / step / "model").mkdir(parents=True)
    (run / "checkpoints" / "step_000020").mkdir()
    # a directory of checkpoints alone is no run
    assert newest_model(str(run)) == str(run)
    (run / "config.yaml").touch()
    newest = str(run / "checkpoints" / "step_000010" / "model")
    assert newest_model(str(run)) == newest
    for command in ("rl", "sft", "eval", "generate"):
        resolved = resolve(command, ["--pretrain", str(run)])
        assert (resolved.values["pretrain"], str(resolved.origins["pretrain"])) == (newest, "command line")
    # what a link stands for is written down, since it stands for another run tomorrow
    (tmp_path / "latest").symlink_to("run")
    assert newest_model(str(tmp_path / "latest")) == newest
    for inside in (run / "checkpoints" / "step_000002", tmp_path / "latest" / "checkpoints" / "step_000002"):
        assert newest_model(str(inside)) == str(inside), "no checkpoint without its manifest"
        (inside / "manifest.json").touch()
        assert newest_model(str(inside)) == str(inside / "model")
        (inside / "manifest.json").unlink()
    # a model beside a file of that name is a model
    (run / "config.json").touch()
    assert newest_model(str(run)) == str(run)
    assert newest_model("") == ""


def test_other_models_may_be_runs_as_well(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "checkpoints" / "step_000004" / "model").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "plain").mkdir()
    first, second, plain = (str(tmp_path / name) for name in ("first", "second", "plain"))
    inside = "checkpoints/step_000004/model"
    for name in ("critic_pretrain", "reference_pretrain", "teacher_pretrain", "judge_pretrain", "agree_with"):
        assert model_in_place_of_run(name, first) == f"{first}/{inside}"
    assert model_in_place_of_run("prompt_data", first) == first
    rewards = {
        first: f"{first}/{inside}",
        plain: plain,
        f"mine={first}": f"mine={first}/{inside}",
        # two models would have the same name
        f"{first}, {second}": f"first={first}/{inside},second={second}/{inside}",
        f"{plain},good={second}": f"{plain},good={second}/{inside}",
        "ORG/NAME@main": "ORG/NAME@main",
        "": "",
    }
    for given, found in rewards.items():
        assert model_in_place_of_run("reward_pretrain", given) == found
