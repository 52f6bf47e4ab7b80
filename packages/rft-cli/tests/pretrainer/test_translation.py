"""Every spelling of the guide is taken with its meaning, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.config.schema import schema
from rft.library import keyword_settings
from rft.library.keyword_settings import resolved as of_keywords
from rft.resolved import Resolved
from rft_cli.config.resolve import resolve
from rft_cli.main import main
from rft_cli.pretrainer.fields import ENVIRONMENT, FIELDS, GROUPS, GuideField

BASE = ["--prompt_data", "x.txt"]
ONES = {
    "hidden_size": "64", "num_heads": "4", "num_kv_heads": "2", "ffn_hidden_size": "96", "num_layers": "3",
    "dropout": "0.2", "use_glu": "true", "vocab_size": "300", "max_seq_len": "48", "use_moe": "true",
    "num_experts": "4", "top_k": "2", "batch_size": "64", "epochs": "3", "lr": "0.002", "weight_decay": "0.01",
    "num_samples": "100", "scheduler_type": "linear", "warmup_epochs": "0", "gradient_clip_val": "0.5",
    "run_validation": "false", "master_addr": "host", "master_port": "29500", "num_nodes": "1", "gpus_per_node": "2",
    "node_rank": "0", "backend": "nccl", "use_compile": "false", "use_amp": "true", "amp_dtype": "bfloat16",
    "num_workers": "2", "pin_memory": "true", "prefetch_factor": "4", "persistent_workers": "true",
    "checkpoint_dir": "out", "resume_from_checkpoint": "old", "save_interval": "2", "keep_last_n": "4",
    "save_best": "false", "log_interval": "5", "log_level": "DEBUG", "log_dir": "logs", "save_logs": "true",
}  # fmt: skip
"""A value of each field that is accepted."""
NEEDS = {
    **{name: ["--use_moe", "true"] for name in ("num_experts", "top_k")},
    "num_kv_heads": ["--num_heads", "4"],
}


def given(*words: str) -> Resolved[Any]:
    return resolve("pretrain", [*BASE, *words])


def refusal(*words: str) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        given(*words)
    return json.loads(caught.value.as_json())["problem"]


def forms(row: GuideField, folder: Path) -> list[list[str]]:
    """The spellings of a field with its value: flags with - and _, and keys below a group and with a point."""
    value = ONES[row.name]
    dashed = f"--{row.group}-{row.name.replace('_', '-')}"
    (nested := folder / "nested.yaml").write_text(f"{row.group}:\n  {row.name}: {value}\n")
    (dotted := folder / "dotted.yaml").write_text(f"{row.group}.{row.name}: {value}\n")
    found = [[dashed, value], [f"{dashed}={value}"], [f"--{row.flat_name}", value]]
    found += [["--config", str(nested)], ["--config", str(dotted)]]
    if row.kind is bool:
        found.append([dashed if value == "true" else f"--no{dashed[1:]}"])
        found.append([f"{dashed}={'yes' if value == 'true' else 'no'}"])
    return found


def test_there_are_43_fields_in_six_groups() -> None:
    assert len(FIELDS) == len({row.flat_name for row in FIELDS}) == len(ONES) == 43
    assert GROUPS == ("model", "training", "distributed", "optimization", "checkpoint", "logging")


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.flat_name)
def test_every_spelling_of_a_field_gives_the_same_settings(row: GuideField, tmp_path: Path) -> None:
    more = NEEDS.get(row.name, [])
    results = [given(*more, *words) for words in forms(row, tmp_path)]
    plain = given(*more)
    changed = [{name: v for name, v in each.values.items() if v != plain.values[name]} for each in results]
    assert all(each == changed[0] for each in changed)
    said = [note for note in results[0].notes if note not in plain.notes]
    # what changes nothing is the same here, is said, or is of the machines
    assert changed[0] or said or row.group == "distributed" or row.name in _AS_HERE
    if row.to in schema("pretrain"):
        assert row.to in changed[0] or ONES[row.name] in ("true", "false", "2")


_AS_HERE = ("warmup_epochs", "run_validation", "use_glu", "use_compile", "save_best", "save_logs")


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("--training-batch-size 64", "train_batch_size", 64),
        ("--epochs 3", "max_epochs", 3),
        ("--batch-size 64", "train_batch_size", 64),
        ("--training.lr 1e-4", "learning_rate", 1e-4),
        ("--no-model-use-glu", "use_glu", False),
        ("--model-use-moe=1", "use_moe", True),
        ("--checkpoint-resume-from-checkpoint", "load_checkpoint", True),
        ("--checkpoint-resume-from-checkpoint auto", "load_checkpoint", True),
        ("--checkpoint-resume-from-checkpoint runs/a", "ckpt_path", "runs/a"),
        ("--logging-log-level DEBUG", "debug", True),
        ("--distributed-gpus-per-node 2", "nproc", 2),
        ("--training-warmup-epochs 1 --training-epochs 4", "lr_warmup_ratio", 0.25),
        ("--training-warmup-epochs 3 --training-epochs 2", "lr_warmup_ratio", 1.0),
        ("--training-run-validation", "held_out_share", 0.1),
        ("--no-training-run-validation --held_out_share 0.2", "held_out_share", 0.0),
        ("--no-compile", "seed", 42),
        ("--no-amp --amp-dtype auto", "seed", 42),
        ("--task lm", "seed", 42),
    ],
)
def test_a_spelling_means_a_setting(words: str, setting: str, value: object) -> None:
    assert given(*words.split()).values[setting] == value


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ("--training-scheduler-type step", "--lr_schedule linear"),
        ("--training-scheduler-type plateau", "--lr_schedule cosine"),
        ("--distributed-backend gloo", "NCCL_BACKEND=gloo in front of the command"),
        ("--logging-log-level ERROR", "--log_interval 100"),
        ("--no-logging-save-logs", "leave --no-logging-save-logs out"),
        ("--task sft", "rft-train sft"),
        ("--task reward", "rft-train rm"),
        ("--task regression", "rft-train pretrain"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_the_reason(words: str, do: str) -> None:
    problem = refusal(*words.split())
    assert (problem["code"], problem["do"]) == ("option.refused", do)
    assert "cannot be used" in problem["what"]


@pytest.mark.parametrize(
    "words",
    [
        "--model-hidden-size 64 --hidden_size 32",
        "--training-epochs 3 --epochs 4",
        "--max_epochs 3 --training.epochs 4",
    ],
)
def test_two_values_under_two_names_are_refused(words: str) -> None:
    assert refusal(*words.split())["code"] == "option.given_twice"


def test_a_flag_wins_over_a_file_under_another_name(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("model:\n  hidden_size: 32\noptimization: {use_amp: false}\n")
    assert given("--config", str(file), "--hidden_size", "64").values["hidden_size"] == 64
    assert str(given("--config", str(file)).origins["hidden_size"]) == f"{file}:2"


@pytest.mark.parametrize("share", ["0.5", ""], ids=["said twice", "said once"])
def test_a_warm_up_in_epochs_and_one_in_a_share_are_not_both_taken(share: str) -> None:
    words = ["--training-warmup-epochs", "1"]
    if share:
        assert refusal(*words, "--lr_warmup_ratio", share)["code"] == "pretrainer.two_warmups"
    else:
        assert any("lr_warmup_ratio = 1, a share of all steps" in note for note in given(*words).notes)


def test_a_width_gives_its_feed_forward_from_flag_file_and_short_name(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("model.hidden_size: 64\n")
    for words in (["--model-hidden-size", "64"], ["--config", str(file)], ["--hidden_size", "64"]):
        assert given(*words).values["ffn_hidden_size"] is None


def test_variables_of_the_environment_come_after_files_and_before_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (file := tmp_path / "run.yaml").write_text("nproc: 4\n")
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    found = given("--config", str(file))
    assert (found.values["nproc"], str(found.origins["nproc"])) == (2, "environment variable GPUS_PER_NODE")
    assert given("--nproc", "3").values["nproc"] == 3
    monkeypatch.setenv("RANK", "0")
    assert given().values["nproc"] == 0, "a launcher has placed this rank"


def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "many")
    problem = refusal()
    assert problem["where"] == "environment variable GPUS_PER_NODE"
    assert problem["do"].startswith("export GPUS_PER_NODE=")


def test_every_variable_of_the_guide_gives_a_field() -> None:
    assert set(ENVIRONMENT) == {"GPUS_PER_NODE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    assert set(ENVIRONMENT.values()) <= {row.flat_name for row in FIELDS}


def test_no_other_command_takes_the_names_of_the_guide() -> None:
    with pytest.raises(SettingsError):
        resolve("sft", ["--pretrain", "m", "--prompt_data", "x", "--training-lr", "1e-3"])


def test_the_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--help"]) == 0
    printed = capsys.readouterr().out
    assert [row.name for row in FIELDS if f"{row.group}.{row.name}" not in printed] == []


@pytest.mark.parametrize("text", ["training:\n  batch_size: 64\n", "training.batch_size: 64\n"])
def test_files_of_the_library_have_the_names_of_the_guide_too(text: str, tmp_path: Path) -> None:
    file = tmp_path / "guide.yaml"
    file.write_text(text + "prompt_data: text.txt\nmodel:\n  hidden_size: 128\n")
    found = of_keywords("pretrain", {"num_layers": 3}, file)
    values = found.values
    assert (values["train_batch_size"], values["hidden_size"], values["num_layers"]) == (64, 128, 3)
    assert "guide.yaml" in str(found.origins["train_batch_size"])


def test_the_names_of_the_guide_are_keywords_of_the_library_too() -> None:
    keywords = {"prompt_data": "t.txt", "model_hidden_size": 64, "training_gradient_clip_val": 0.5}
    found = keyword_settings.resolved("pretrain", keywords)
    assert (found.values["hidden_size"], found.values["max_norm"]) == (64, 0.5)
    with pytest.raises(SettingsError, match="model_hidden_size"):
        keyword_settings.resolved("pretrain", {"prompt_data": "t.txt", "model_hiden_size": 64})
