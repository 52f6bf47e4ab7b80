"""Conversations from the command line with replicas, ahead of the trainer, on real ranks, and about images."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import differing_tensors, tensors
from support.talk_task import SeenTalkTask, TalkTask, make_seen_talk_task, make_talk_task

from rft_cli.commands import training
from rft_cli.config.resolve import resolve
from rft_cli.main import main
from rft_core import fault_points
from rft_core.errors import DataError
from rft_engine.replicas.process import ProcessReplica

pytestmark = [pytest.mark.xdist_group("multi_turn")]

AHEAD = ("--engine_replicas", 2, "--max_staleness", 1)
EXACT = (*AHEAD, "--async_deterministic")
SHOWN = ("--num_trajectories_to_save", 99)
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TalkTask:
    return make_talk_task(tmp_path_factory.mktemp("talks"))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> SeenTalkTask:
    return make_seen_talk_task(tmp_path_factory.mktemp("seen"))


@pytest.fixture
def run(task: TalkTask, tmp_path: Path) -> Run:
    """A run in this process with the environment Echo, which is a person's file."""

    def start(*more: object, name: str = "run", environment: str = "Echo") -> Path:
        chosen = task.words("--environment", f"{task.own}:{environment}", *SHOWN, *more, "--save_path", tmp_path / name)
        return training.train(resolve("rl", chosen), ["rft-train", "rl", *chosen], show_end=False)

    return start


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return tensors(path, "model/model.safetensors")


def talks_of(path: Path, steps: int = 2) -> list[list[dict[str, Any]]]:
    """The turns of every conversation."""
    files = [path / "rollouts" / f"step_{step:06d}.jsonl" for step in range(1, steps + 1)]
    found = [json.loads(line)["turns"] for file in files for line in file.read_text().splitlines()]
    assert len(found) == 12 * steps or len(found) == 16 * steps
    return found


def largest_difference(first: Path, second: Path) -> float:
    """Over all weights, relative to the largest of each tensor."""
    ours, theirs = weights_of(first), weights_of(second)
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-3)) for n in ours)


@pytest.fixture(scope="module")
def plain(task: TalkTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, its own engine, every step waiting for its conversations."""
    path = tmp_path_factory.mktemp("plain") / "run"
    chosen = task.words("--environment", f"{task.own}:Echo", *SHOWN, "--save_path", path)
    return training.train(resolve("rl", chosen), ["rft-train", "rl", *chosen], show_end=False)


@pytest.fixture(scope="module")
def exact(task: TalkTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps ahead of the trainer that nothing stops."""
    path = tmp_path_factory.mktemp("exact") / "run"
    chosen = task.words("--environment", f"{task.own}:Echo", *SHOWN, *EXACT, "--max_steps", 4, "--save_path", path)
    return training.train(resolve("rl", chosen), ["rft-train", "rl", *chosen], show_end=False)


def test_replicas_hold_the_conversations_of_the_engine_in_the_process(run: Run, plain: Path) -> None:
    replicas = run("--engine_replicas", 2)
    assert talks_of(replicas) == talks_of(plain)
    assert all(row["engine/logprob_gap_max"] < 1e-3 for row in rows_of(replicas))


def test_conversations_ahead_train_and_are_evaluated(run: Run, task: TalkTask) -> None:
    path = run(*AHEAD, "--max_steps", 6, "--eval_data", task.held_out, "--environment_workers", 2)
    rows = rows_of(path)
    assert len(rows) == 6
    assert max(row["async/staleness_max"] for row in rows) == 1
    assert all(row["environment/ok_share"] == 1.0 for row in rows)
    assert rows[0]["turn/count_mean"] > 1.5
    assert rows[0]["engine/logprob_gap_max"] < 1e-3, "the first step has the weights that drew it"
    told = json.loads((path / "summary.json").read_text())["eval"]
    assert told["before"]["n"] == told["after"]["n"] == 6


def test_a_run_ahead_that_is_stopped_and_resumed_is_the_run_that_was_not(run: Run, exact: Path) -> None:
    assert [row["async/staleness_max"] for row in rows_of(exact)] == [0, 1, 1, 1]
    parts = run(*EXACT, "--max_steps", 4, "--save_steps", 2, "--max_ckpt_num", 5, name="parts")
    resumed = run(
        *EXACT, "--max_steps", 4, "--load_checkpoint", "--ckpt_path", parts / "checkpoints" / "step_000002",
        name="resumed",
    )  # fmt: skip
    assert differing_tensors(weights_of(exact), weights_of(resumed)) == []


@pytest.mark.night
def test_a_replica_that_dies_in_a_conversation_changes_no_token(
    run: Run, exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = ProcessReplica.draw
    deaths: list[int] = []

    def dies(self: ProcessReplica, call: Any) -> Any:
        behind = any(len(prefix) > 40 for prefix in call.prefixes)  # some turns were taken
        if behind and not deaths and self.number == 1:
            deaths.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        yield from drawn(self, call)

    monkeypatch.setattr(ProcessReplica, "draw", dies)
    path = run(*EXACT, "--max_steps", 4)
    assert deaths
    assert sum(row["engine/restarts"] for row in rows_of(path)) == 1
    assert talks_of(path, 4) == talks_of(exact, 4)
    assert differing_tensors(weights_of(exact), weights_of(path)) == []


@pytest.mark.night
def test_a_run_ahead_that_is_killed_goes_on_with_the_conversations_in_flight(run: Run, tmp_path: Path) -> None:
    """As fast as possible: a checkpoint has turns of open conversations, and all prompts are trained once."""
    words = (*AHEAD, "--max_steps", 6, "--save_steps", 1)

    class Killed(BaseException):
        pass

    def kill(name: str) -> None:
        steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) if name == "rl.logged" else 0
        if steps == 3:
            raise Killed

    fault_points.install(kill)
    try:
        with pytest.raises(Killed):
            run(*words)
    finally:
        fault_points.install(None)
    assert main(["resume", str(tmp_path / "run")]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["async/staleness_max"] <= 1 for row in rows)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[-1]
    ledger = next(json.loads(path.read_text()) for path in newest.rglob("*ledger*.json"))
    assert ledger["trained"] == 24


def test_two_real_ranks_train_the_conversations_of_one(run: Run, task: TalkTask, plain: Path, tmp_path: Path) -> None:
    words = task.words("--environment", f"{task.own}:Echo", *SHOWN, "--nproc", 2, "--save_path", tmp_path / "two")
    assert main(["rl", *words]) == 0
    found, expected = talks_of(tmp_path / "two"), talks_of(plain)
    assert found[:12] == expected[:12]
    # after an update: its sums are rounded in another order, so that a draw near a boundary may be another one
    num_others = sum(one != other for one, other in zip(found[12:], expected[12:], strict=True))
    assert num_others <= 2
    _same_rows(tmp_path / "two", plain)
    # the rounding of the sums, through two updates of Adam; of the second one another draw is a twelfth
    assert largest_difference(tmp_path / "two", plain) < (2e-2 if num_others else 1e-3)


@pytest.mark.night
def test_two_real_ranks_ahead_train_the_conversations_of_one(task: TalkTask, exact: Path, tmp_path: Path) -> None:
    words = task.words(
        "--environment", f"{task.own}:Echo", *SHOWN, *EXACT, "--engine_replicas", 1, "--max_steps", 4,
        "--nproc", 2, "--save_path", tmp_path / "two",
    )  # fmt: skip
    assert main(["rl", *words]) == 0
    assert talks_of(tmp_path / "two", 4) == talks_of(exact, 4)
    _same_rows(tmp_path / "two", exact)


def _same_rows(found: Path, expected: Path) -> None:
    names = ("reward/mean", "turn/count_mean", "completion/length_mean", "policy/loss", "policy/gradient_norm")
    for left, right in zip(rows_of(found)[:1], rows_of(expected)[:1], strict=True):  # before any update
        wanted = pytest.approx([right[name] for name in names], rel=1e-5, abs=1e-7)
        assert [left[name] for name in names] == wanted


def test_an_image_is_seen_in_every_turn(seen: SeenTalkTask, tmp_path: Path) -> None:
    runs = {
        "plain": ("--mixed_mm_data",),
        "replicas": ("--mixed_mm_data", "--engine_replicas", 2),
        "cut": ("--mixed_mm_data", "--micro_train_batch_size", 3),
    }
    for name, more in runs.items():
        assert main(["rl", *seen.words(*more, "--save_path", tmp_path / name)]) == 0
    for row in rows_of(tmp_path / "plain"):
        assert row["turn/count_mean"] > 1.5
        assert row["engine/logprob_gap_max"] < 1e-3, "what is trained has the images of what was drawn"
    conversations = talks_of(tmp_path / "plain")
    assert talks_of(tmp_path / "replicas") == conversations
    told = [turn["text"] for turns in conversations for turn in turns if turn["who"] == "environment" and turn["text"]]
    assert "<image> or <|image_pad|> again?" in told
    assert largest_difference(tmp_path / "cut", tmp_path / "plain") < 1e-3


@pytest.mark.night
def test_images_go_with_conversations_ahead(seen: SeenTalkTask, tmp_path: Path) -> None:
    for name, words in (("one", ()), ("two", ("--engine_replicas", 2))):
        more = ("--max_staleness", 1, "--async_deterministic", "--max_steps", 3, *words, "--mixed_mm_data")
        assert main(["rl", *seen.words(*more, "--save_path", tmp_path / name)]) == 0
    assert talks_of(tmp_path / "one", 3) == talks_of(tmp_path / "two", 3)
    assert [row["async/staleness_max"] for row in rows_of(tmp_path / "one")] == [0, 1, 1]


@pytest.mark.parametrize("more", [(), EXACT])
def test_an_environment_that_answers_with_an_image_is_refused_by_name(run: Run, more: tuple[object, ...]) -> None:
    with pytest.raises(DataError) as caught:
        run(*more, environment="Painter")
    assert caught.value.problem.code == "environment.image"
    assert "--images_key" in caught.value.problem.do


def test_a_misspelt_environment_is_told_before_what_else_is_missing(
    task: TalkTask, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in task.words("--environment", "calculater") if word != "--apply_chat_template"]
    capsys.readouterr()
    assert main(["rl", *words, "--json_errors"]) == 2
    problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
    assert (problem["code"], problem["do"]) == ("environment.unknown", "--environment calculator")
