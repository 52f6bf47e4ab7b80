"""A run under the names of the pre-trainer's guide goes on from its middle as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def losses(run: Path) -> list[float]:
    """Loss of each step."""
    return [json.loads(line)["sft/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_the_guide_resumes_from_a_path(rft_train: Callable[..., Any], tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("Before we proceed any further, hear me speak. " * 80)
    words = [
        "pretrain",
        "--prompt_data",
        text,
        "--tokenizer",
        "char",
        "--depth",
        "1",
        "--device",
        "cpu",
        "--task",
        "lm",
    ]
    words += ["--model-max-seq-len", "32", "--training-batch-size", "8", "--max_steps", "4", "--save_steps", "2"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert rft_train(*words, "--checkpoint-checkpoint-dir", straight).code == 0
    middle = straight / "checkpoints" / "step_000002"
    found = rft_train(*words, "--checkpoint-checkpoint-dir", resumed, "--checkpoint-resume-from-checkpoint", middle)
    assert found.code == 0, found.err
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    text_of_run = (straight / "config.yaml").read_text()
    assert yaml.safe_load(text_of_run)["hidden_size"] == 64
    assert "# from --depth 1" in text_of_run
    missing = rft_train(*words, "--checkpoint-resume-from-checkpoint", tmp_path / "missing", "--json_errors")
    assert missing.code != 0
    assert "missing does not exist" in missing.problem["where"]
