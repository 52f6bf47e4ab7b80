"""Conversations through vLLM's CPU build: those of the native engine, in step and ahead of the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.talk_task import TalkTask, make_talk_task

from rft_cli.main import main
from rft_models.tokenization.chat_template import ChatTurnTemplate
from rft_models.tokenization.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TalkTask:
    """A model with heads of 32, which vLLM has attention for."""
    return make_talk_task(tmp_path_factory.mktemp("talks"), hidden=64, heads=2)


@pytest.fixture
def run(task: TalkTask, tmp_path: Path) -> Callable[..., Path]:
    def start(name: str, *more: object) -> Path:
        words = task.words("--environment", f"{task.own}:Echo", "--num_trajectories_to_save", 99, "--device", "cpu")
        assert main(["rl", *words, *map(str, more), "--save_path", str(tmp_path / name)]) == 0
        return tmp_path / name

    return start


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(path: Path, step: int) -> list[list[dict[str, Any]]]:
    """The turns of every conversation of a step."""
    return [row["turns"] for row in rows(path / "rollouts" / f"step_{step:06d}.jsonl")]


def test_conversations_are_those_of_the_native_engine(run: Callable[..., Path], task: TalkTask) -> None:
    native, vllm = run("native"), run("vllm", "--engine_type", "vllm")
    for step in (1, 2):
        assert told(vllm, step) == told(native, step)
    for row in rows(vllm / "metrics.jsonl"):
        assert row["turn/count_mean"] > 1.5
        assert row["environment/ok_share"] == 1.0
        assert row["engine/logprob_gap_max"] < 1e-3, "what was sampled is trained, token for token"
    text = ChatTurnTemplate(load_tokenizer(task.root / "model"))
    for turns in told(vllm, 1):
        for turn in turns[2:]:
            if turn["who"] == "environment":  # masked, and as the template writes it
                assert turn["num_tokens"] == len(text.observation([{"role": "user", "content": turn["text"]}]))
                assert "reward" not in turn


@pytest.mark.night
def test_conversations_ahead_of_the_trainer_are_those_of_native_replicas(run: Callable[..., Path]) -> None:
    ahead = ("--max_staleness", 1, "--async_deterministic", "--max_steps", 3)
    native, vllm = run("native", *ahead), run("vllm", *ahead, "--engine_type", "vllm")
    assert [row["async/staleness_max"] for row in rows(vllm / "metrics.jsonl")] == [0, 1, 1]
    for step in (1, 2, 3):
        assert told(vllm, step) == told(native, step)
