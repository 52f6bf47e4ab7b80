"""Typical wrong commands: the right name is among the first three that are proposed, without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rft_cli.main import main
from rft_cli.pretrainer.translation import TASK, field_of, spellings

BASE = ["pretrain", "--prompt_data", "x.txt", "--json_errors"]
COMMANDS = {
    # a slip of the fingers, in the guide's style
    "--model-hiden-size 64": "hidden_size",
    "--model-hidden-sise 64": "hidden_size",
    "--model-num-layer 4": "num_layers",
    "--model-layers 4": "num_layers",
    "--model-n-heads 4": "num_heads",
    "--model-num-head 4": "num_heads",
    "--model-usemoe": "use_moe",
    "--model-use-mo": "use_moe",
    "--model-topk 2": "top_k",
    "--model-num-expert 8": "num_experts",
    "--model-droput 0.1": "dropout",
    "--model-max-seq-length 64": "max_seq_len",
    "--model-vocabsize 300": "vocab_size",
    "--training-batchsize 64": "train_batch_size",
    "--training-batch 64": "train_batch_size",
    "--training-epoch 3": "max_epochs",
    "--training-num-epochs 3": "max_epochs",
    "--training-learning-rate-max 1e-3": "learning_rate",
    "--training-weight-deacy 0.1": "l2",
    "--training-grad-clip-val 1.0": "max_norm",
    "--training-warmup-epoch 1": "warmup_epochs",
    "--optimization-use-ampp": "use_amp",
    "--optimization-usecompile": "use_compile",
    "--optimization-num-worker 4": "data_store_workers",
    "--optimization-pin-mem": "dataloader_pin_memory",
    "--checkpoint-dir-path out": "save_path",
    "--checkpoint-resume-from auto": "resume_from_checkpoint",
    "--checkpoint-keep-last 3": "max_ckpt_num",
    "--logging-log-intervall 10": "log_interval",
    "--distributed-gpu-per-node 2": "nproc",
    # a right field in a wrong group, and a wrong group
    "--training-hidden-size 64": "hidden_size",
    "--model-batch-size 64": "train_batch_size",
    "--optimizer-use-amp": "use_amp",
    "--trainning-epochs 3": "max_epochs",
    # a value that a switch or a choice does not take
    "--model-use-moe=maybe": "use_moe",
    "--training-scheduler-type cosin": "cosine",
    "--training-scheduler-type step": "lr_schedule",
    "--task regression": "pretrain",
}
FILES = {
    "training:\n  batch_sise: 64\n": "train_batch_size",
    "model:\n  hiden_size: 64\n": "hidden_size",
    "optimization:\n  use_ampp: false\n": "use_amp",
    "trainning:\n  epochs: 3\n": "training",
    "training.epoch: 3\n": "max_epochs",
}


def proposed(problem: dict[str, str]) -> list[str]:
    """The first three names or values that a problem proposes: its remedy, then those which it calls nearest."""
    near = re.findall(r"nearest(?: here)?: ([^;]+)", problem["why"])
    texts = [problem["do"], *(near[0].split(", ") if near else [])]
    words = [word.lstrip("-") for text in texts for word in text.split() if text != "rft-train pretrain --help"]
    return list(dict.fromkeys(re.sub(r"[-.]", "_", word.rstrip(":")) for word in words))[:3]


def is_answered(problem: dict[str, str], wanted: str) -> bool:
    rows = {name: field_of(name) for name in spellings().table if name != TASK.name}
    right = {wanted, *(name for name, row in rows.items() if wanted in (row.to, row.name))}
    return not right.isdisjoint(proposed(problem))


def problems_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    code = main([*BASE, *words])
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert "Traceback" not in printed
    record = json.loads(printed.splitlines()[-1])
    assert record["problem"]["code"] != "unexpected"
    return record.get("problems") or [record["problem"]]


@pytest.mark.parametrize("words", COMMANDS, ids=str)
def test_a_wrong_flag_is_answered_with_the_right_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = problems_of(words.split(), capsys)
    assert is_answered(problem, COMMANDS[words]), problem


@pytest.mark.parametrize("text", FILES, ids=lambda text: text.replace("\n", ";"))
def test_a_wrong_key_is_answered_with_file_line_and_the_right_one(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "run.yaml").write_text(text)
    (problem,) = problems_of(["--config", str(file)], capsys)
    line = 1 if text.startswith("training.") else 2
    assert problem["where"] == f"{file}:{line}"
    assert is_answered(problem, FILES[text]), problem


def test_there_are_more_than_forty_of_them() -> None:
    assert len(COMMANDS) + len(FILES) >= 40


def test_two_errors_of_one_command_are_both_reported(capsys: pytest.CaptureFixture[str]) -> None:
    found = problems_of(["--model-hiden-size", "64", "--training-batch-size", "none"], capsys)
    assert [problem["code"] for problem in found] == ["option.unknown", "option.value"]


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    [problem] = problems_of(["--config", "missing.yaml"], capsys)
    assert "missing.yaml" in problem["what"]
