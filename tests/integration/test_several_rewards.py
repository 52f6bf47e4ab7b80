"""Several rewards by name in a run: both parts stand in its metrics, and their weighted sum is its reward."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rft_cli.main import main
from rft_models.tiny_models.text import build_character_model

WEIGHTS = {"math": 0.9, "format": 0.1}
FORMS = (r"<think>so</think><answer>\boxed{%s}</answer>", r"\boxed{%s}", "<think>so</think><answer>")
"""Right in answer and form, in the answer alone, in neither."""


def run(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(list(words)) == 0


def write(path: Path, rows: Iterable[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def model_that_knows_the_forms(folder: Path, answers: list[str]) -> str:
    """Return a small model that answers each of the questions in one of the forms."""
    build_character_model(folder / "new", alphabet="".join(map(chr, range(32, 127))), hidden=64, ffn=128)
    rows = [{"input": f"Q{n}", "output": form.replace("%s", text)} for n, text in enumerate(answers) for form in FORMS]
    words = ["--pretrain", str(folder / "new"), "--prompt_data", write(folder / "demonstrations.jsonl", rows)]
    words += ["--output_key", "output", "--train_batch_size", "12", "--max_epochs", "150", "--learning_rate", "0.01"]
    run("sft", *words, "--max_len", "64", "--save_path", str(folder / "sft"))
    return str(max((folder / "sft" / "checkpoints").glob("step_*[0-9]")) / "model")


@pytest.mark.data
def test_both_parts_are_metrics_of_the_run_and_their_weighted_sum_is_its_reward(tmp_path: Path, data_dir: Path) -> None:
    problems = read(data_dir / "gsm8k" / "train.jsonl")[:4]
    model = model_that_knows_the_forms(tmp_path, [row["answer"].rpartition("#### ")[2] for row in problems])
    # the labels are the solutions of the data set, with their mark
    rows = write(tmp_path / "train.jsonl", ({"input": f"Q{n}", "label": p["answer"]} for n, p in enumerate(problems)))
    words = ["--pretrain", model, "--prompt_data", rows, "--eval_data", rows, "--generate_max_len", "56"]
    words += ["--reward", "math,format", "--reward_weights", "math=0.9,format=0.1"]
    words += ["--rollout_batch_size", "4", "--n_samples_per_prompt", "8", "--train_batch_size", "32"]
    run("rl", *words, "--num_episodes", "3", "--save_path", str(tmp_path / "run"))
    metrics = read(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 3
    for row in metrics:
        assert "reward/unscored" not in row
        total = sum(weight * row[f"reward/{name}"] for name, weight in WEIGHTS.items())
        assert abs(total - row["reward/mean"]) <= 1e-9
        assert row["reward/math"] == row["reward/math/correctness"] > row["reward/format"] > 0.0
        assert row["reward/format"] == row["reward/format/order"] < row["reward/format/tags"]
    for row in (row for file in (tmp_path / "run" / "rollouts").glob("*.jsonl") for row in read(file)):
        assert row["reward"] == pytest.approx(sum(WEIGHTS[name] * row["breakdown"][name] for name in WEIGHTS))
    before = read(tmp_path / "run" / "evals.jsonl")[0]
    # by the correctness that math tells, also where the form is wrong
    assert before["eval/accuracy"] == sum(value >= 0.9 for value in before["rewards"]) / 4
