"""Bad input gives its exit code and the seven fields, and leaves no half-made run behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIELDS = {"code", "what", "where", "why", "state", "do", "bundle"}
BAD = {
    "an unknown flag": ("--rolout_batch_size 3", 2, "option.unknown", "--rollout_batch_size 3"),
    "a value out of bounds": ("--top_p 1.5", 2, "option.value", "--top_p 1"),
    "a batch that is no multiple": ("--train_batch_size 12", 2, "batch.not_a_multiple", "--train_batch_size 8"),
    "lengths beyond the model": ("--generate_max_len 1024", 2, "length.beyond_model", "--generate_max_len 120"),
    "a reward file that is not there": ("--reward none.py:f", 2, "reward.file_missing", "--reward none.py:reward_fn"),
    "a reward of another form": ("--reward {reward}:wrong_signature", 2, "reward.signature", "def wrong_signature"),
    "an unknown reward": ("--reward exakt", 2, "reward.unknown", "--reward exact"),
    "a chat template that is not there": ("--pretrain {plain} --apply_chat_template", 2, "prompt.no_chat_template", ""),
    "a GPU that is not there": ("--device cuda", 3, "device.no_cuda", "--device cpu"),
    "a tracker that is not installed": ("--use_wandb", 3, "extra.wandb", "uv sync --no-dev --inexact --extra wandb"),
    "a data file that is not there": ("--prompt_data none.jsonl", 4, "data.not_found", "ls"),
    "a column that is not there": ("--input_key inputt", 4, "data.missing_field", "--input_key input"),
    "a damaged data file": ("--prompt_data {broken}", 4, "data.cut", ""),
    "a model that is not there": ("--pretrain none", 4, "models.no_directory", ""),
    "a model cut off in the middle": ("--pretrain {damaged}", 4, "models.damaged_weights", ""),
    "no checkpoint": ("--load_checkpoint", 5, "checkpoint.nothing_to_resume", "start without --load_checkpoint"),
}


@pytest.fixture(scope="session")
def places(bench: Any) -> dict[str, str]:
    """Damaged copies of the good things."""
    broken = bench.root / "broken.jsonl"
    broken.write_text(bench.train.read_text() + '{"input": "1+1=", \n')
    damaged, plain = bench.root / "damaged", bench.root / "plain"
    shutil.copytree(bench.model, damaged)
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    shutil.copytree(bench.model, plain)
    for file in ("chat_template.jinja", "chat_template.json"):
        (plain / file).unlink(missing_ok=True)
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    return {"reward": str(bench.reward), "broken": str(broken), "damaged": str(damaged), "plain": str(plain)}


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no optional dependency and no GPU is there."""
    import sys

    import torch

    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_extras")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_and_leaves_nothing(
    name: str, places: dict[str, str], base_words: dict[str, list[str]], rft_train: Callable[..., Any]
) -> None:
    words, exit_code, code, remedy = BAD[name]
    outcome = rft_train("rl", *base_words["rl"], "--save_path", "run", *words.format(**places).split(), "--json_errors")
    assert outcome.code == exit_code, outcome.err
    assert set(outcome.problem) == FIELDS
    assert outcome.problem["code"] == code
    assert remedy in outcome.problem["do"]
    assert all(outcome.problem[field] for field in ("what", "where", "why", "state", "do"))
    assert outcome.problem["bundle"] == "", "the message is complete, and there is no run to look at"
    assert list(Path().rglob("*")) == [], "nothing is left behind"


@pytest.mark.usefixtures("without_extras")
def test_the_mended_command_starts_in_the_same_place(
    base_words: dict[str, list[str]], rft_train: Callable[..., Any]
) -> None:
    words = ["rl", *base_words["rl"], "--save_path", "run"]
    assert rft_train(*words, "--reward", "none.py:f").code == 2
    assert rft_train(*words).code == 0
    again = rft_train(*words, "--json_errors")
    assert (again.code, again.problem["code"]) == (2, "run.exists")
    assert again.problem["do"] == "rft-train resume run"
    assert rft_train("check", *words, "--json_errors").problem == again.problem


def test_a_run_that_is_over_is_not_resumed(base_words: dict[str, list[str]], rft_train: Callable[..., Any]) -> None:
    assert rft_train("rl", *base_words["rl"], "--save_path", "run").code == 0

    def kept() -> dict[Path, bytes]:
        """All but what a rank says."""
        files = (path for path in Path("run").rglob("*") if path.is_file() and path.parent.name != "logs")
        return {path: path.read_bytes() for path in files if path.name != "error.json"}

    before = kept()
    outcome = rft_train("resume", "run", "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (5, "run.finished")
    assert kept() == before


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        ("resume nowhere", 5, "run.not_found"),
        ("eval nowhere", 5, "checkpoint.nothing_to_resume"),
        ("runs show nowhere", 4, "run.unknown_name"),
        ("recipes show nowhere", 4, "recipe.not_found"),
        ("quickstart --step 3", 2, "option.quickstart"),
        ("distill", 2, "command.unknown"),
        ("rl --config nowhere", 2, "option.several"),
    ],
)
def test_what_is_not_there_is_told(words: str, exit_code: int, code: str, rft_train: Callable[..., Any]) -> None:
    outcome = rft_train(*words.split(), "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (exit_code, code)
    assert set(outcome.problem) == FIELDS
    assert all(outcome.problem[field] for field in ("what", "where", "why", "state", "do"))
    assert outcome.problem["bundle"] == "", "the message is complete, and there is no run to look at"
    assert list(Path().rglob("*")) == []


def test_a_person_reads_the_cause_first_and_then_what_to_do(rft_train: Callable[..., Any], bench: Any) -> None:
    outcome = rft_train("rl", "--pretrain", bench.model, "--top_p", "1.5")
    lines = outcome.err.splitlines()
    assert lines[0].startswith("error  --top_p = 1.5 is not allowed")
    assert [line.split()[0] for line in lines[1:]] == ["where", "why", "state", "do"]
