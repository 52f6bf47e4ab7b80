"""Conversations from the command line: a run with a tool, its files, its resume, and an environment of one's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.compare import differing_tensors, tensors
from support.talk_task import OWN, TEMPLATE, TalkTask, make_talk_task

from rft_cli.commands import eval as eval_command
from rft_cli.commands import training
from rft_cli.config.resolve import resolve
from rft_core.errors import DataError, ServiceError
from rft_models.tokenization.chat_template import ChatTurnTemplate
from rft_models.tokenization.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("multi_turn")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TalkTask:
    return make_talk_task(tmp_path_factory.mktemp("talks"))


@pytest.fixture
def folder(task: TalkTask) -> Path:
    return task.root


@pytest.fixture
def words(task: TalkTask) -> list[str]:
    return task.words()


@pytest.fixture
def run(words: list[str], tmp_path: Path) -> Callable[..., Path]:
    def start(*more: object, name: str = "run") -> Path:
        chosen = [*words, *(str(word) for word in more), "--save_path", str(tmp_path / name)]
        return training.train(resolve("rl", chosen), ["rft-train", "rl", *chosen], show_end=False)

    return start


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def weights_of(path: Path) -> dict[str, Any]:
    return tensors(path, "model/model.safetensors")


def test_an_environment_of_ones_own_trains_in_a_process(run: Callable[..., Path], folder: Path) -> None:
    path = run("--environment", f"{folder}/own.py:Echo", "--eval_data", folder / "heldout.jsonl")
    row = rows_of(path)[-1]
    assert row["turn/count_mean"] > 1.5, row
    assert row["environment/ok_share"] == 1.0
    assert row["turn/observation_tokens_mean"] > 3
    assert row["engine/logprob_gap_max"] < 1e-3  # what was sampled is what was trained, token for token
    told = [json.loads(line) for line in (path / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    turns = told[0]["turns"]
    assert [turn["who"] for turn in turns[:2]] == ["environment", "policy"]
    assert turns[0]["text"] == "go"
    assert told[0]["reward"] == pytest.approx(sum(turn.get("reward", 0.0) for turn in turns))
    assert told[0]["num_tokens"] == sum(turn["num_tokens"] for turn in turns if turn["who"] == "policy")
    before = json.loads((path / "summary.json").read_text())["eval"]["before"]
    assert before["n"] == 6


def test_contexts_are_the_rendered_conversations(run: Callable[..., Path], folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    text = ChatTurnTemplate(tokenizer)
    path = run("--environment", f"{folder}/own.py:Echo", "--max_steps", 1, "--num_trajectories_to_save", 12)
    rows = [json.loads(line) for line in (path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        for turn in row["turns"]:
            if turn["who"] == "environment" and turn["text"] != "go":
                told = text.observation([{"role": "user", "content": turn["text"]}])
                assert turn["num_tokens"] == len(told)


def test_a_resumed_run_is_the_run_to_the_bit(run: Callable[..., Path], words: list[str], folder: Path) -> None:
    environment = ("--environment", f"{folder}/own.py:Echo", "--advantage_estimator", "gae", "--turn_gamma", 0.9)
    whole = run(*environment, "--max_steps", 4, name="whole")
    parts = run(*environment, "--max_steps", 4, "--save_steps", 2, "--max_ckpt_num", 5, name="parts")
    chosen = [*words, *map(str, environment), "--max_steps", "4", "--load_checkpoint", "--ckpt_path"]
    chosen += [str(parts / "checkpoints" / "step_000002"), "--save_path", str(parts.parent / "resumed")]
    resumed = training.train(resolve("rl", chosen), ["rft-train", "rl", *chosen], show_end=False)
    assert differing_tensors(weights_of(whole), weights_of(resumed)) == []


def test_the_cut_of_the_batch_and_the_rows_of_the_engine_change_nothing(run: Callable[..., Path], folder: Path) -> None:
    environment = ("--environment", f"{folder}/own.py:Echo")
    one = rows_of(run(*environment, "--micro_train_batch_size", 12, name="one"))
    cut = rows_of(run(*environment, "--micro_train_batch_size", 5, "--engine_max_rows", 4, name="cut"))
    names = (
        "reward/mean",
        "policy/loss",
        "policy/gradient_norm",
        "completion/length_mean",
        "turn/count_mean",
        "policy/entropy",
    )
    for left, right, close in zip(one, cut, (1e-5, 1e-3), strict=True):  # one update of Adam lies between the rows
        wanted = pytest.approx([right[name] for name in names], rel=close, abs=1e-6)
        assert [left[name] for name in names] == wanted


def test_a_failing_environment_gives_no_number_and_says_its_line(run: Callable[..., Path], folder: Path) -> None:
    environment = ("--environment", f"{folder}/own.py:Broken", "--environment_workers", 2)
    line = 1 + OWN[: OWN.index("raise KeyError")].count("\n")
    with pytest.raises(ServiceError, match=rf"own\.py:{line}") as caught:
        run(*environment)
    assert caught.value.problem.code == "reward.too_many_failed"
    row = rows_of(run(*environment, "--max_unscored_share", 1, name="go on"))[0]
    assert 0 < row["environment/failed_share"] < 1
    assert row["drop/unscored"] == round(12 * row["environment/failed_share"])
    assert row["reward/min"] > 0 or row["reward/mean"] == row["reward/mean"]


def test_the_calculator_is_evaluated_as_it_is_trained(
    run: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run("--environment", "calculator", "--eval_data", folder / "heldout.jsonl")
    told = json.loads((path / "summary.json").read_text())["eval"]["after"]
    eval_command.run([str(path), "--output", str(path / "answers.jsonl")])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (again["eval/accuracy"], again["eval/n"]) == (told["accuracy"], 6)
    answers = [json.loads(line) for line in (path / "answers.jsonl").read_text().splitlines()]
    assert all(row["turns"][1]["who"] == "policy" for row in answers)


def test_a_template_that_rewrites_history_is_refused_before_anything_starts(
    run: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(folder / "model")
    shutil.copytree(folder / "model", tmp_path / "rewriting")
    tokenizer.hf_tokenizer.chat_template = "{{ messages|length }}" + TEMPLATE
    tokenizer.save_pretrained(tmp_path / "rewriting")
    with pytest.raises(DataError) as caught:
        run("--environment", "calculator", "--pretrain", tmp_path / "rewriting")
    assert caught.value.problem.code == "text.chat_turns"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
