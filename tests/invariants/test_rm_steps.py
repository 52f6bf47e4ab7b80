"""Step reward models: they learn to call steps, go on to the bit, take the same steps on ranks, and reward a policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import differences, final_checkpoint, read_rows
from support.references import KILLED, Restarts
from support.rm_runs import rm_words, write_rows
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--loss_type", "steps", "--step_separator", "=", "--step_reduction", "product", "--max_epochs", "6")
FLAGS = (*FLAGS, "--save_steps", "6", "--max_ckpt_num", "9", "--learning_rate", "1e-2", "--eval_steps", "12")
FLAGS = (*FLAGS, "--save_interval", "0")
STRATEGIES = {"replicas": (), "fsdp": ("--fsdp",), "adapters": ("--lora_rank", "4")}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps that are good where they end with 1; all steps behind a bad one are bad."""
    folder = tmp_path_factory.mktemp("steps")
    rows: list[dict[str, object]] = []
    for n in range(60):
        wrong = n % 4
        texts = [f"{(n + k) % 10}+{'2' if k == wrong else '1'}" for k in range(3)]
        rows.append({"prompt": f"{n % 10}+1", "completions": texts, "labels": [k < wrong for k in range(3)]})
    return write_rows(folder, rows, 40)


def words(task: TinyTask, steps: Path, run: Path, *more: str) -> list[str]:
    return rm_words(task, steps, run, *FLAGS, *more)


@pytest.fixture(scope="module")
def reference(server: ForkServer, task: TinyTask, steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run = tmp_path_factory.mktemp("reference") / "run"
    server.must_finish(*words(task, steps, run))
    return run


def test_steps_are_learned_and_a_killed_run_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, steps: Path, reference: Path, runs: Path
) -> None:
    last = read_rows(reference / "evals.jsonl")[-1]
    assert last["eval/accuracy"] > last["eval/majority"] + 0.2
    assert last["eval/first_error"] > 0.7
    restarts = Restarts(server, words(task, steps, runs / "run"), runs / "run")
    assert restarts.start([("signal_at", ["rm.logged", 8, "SIGKILL"])]).wait().code == KILLED
    restarts.finish()
    assert differences(reference, runs / "run") == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_take_the_steps_of_one(
    server: ForkServer, task: TinyTask, steps: Path, runs: Path, strategy: str
) -> None:
    more = (*STRATEGIES[strategy], "--max_steps", "4")
    alone = tuple(word for word in more if word != "--fsdp")
    server.must_finish(*words(task, steps, runs / "one", *alone))
    server.must_finish(*words(task, steps, runs / "two", *more), num_ranks=2)
    for row, other in zip(*(read_rows(runs / name / "metrics.jsonl") for name in ("one", "two")), strict=True):
        for name in ("rm/loss", "rm/step_score", "policy/gradient_norm"):
            assert other[name] == pytest.approx(row[name], rel=1e-4), name
    first, second = (read_rows(runs / name / "evals.jsonl")[-1] for name in ("one", "two"))
    assert second["eval/loss"] == pytest.approx(first["eval/loss"], rel=1e-4)


def test_a_policy_is_trained_on_its_reward(server: ForkServer, task: TinyTask, reference: Path, runs: Path) -> None:
    model = str(final_checkpoint(reference) / "model")
    more = ("--reward=", "--reward_pretrain", f"prm={model}", "--max_steps", "1", "--eval_data=")
    server.must_finish(*task.words("rl", runs / "run", *more))
    assert 0 < read_rows(runs / "run" / "metrics.jsonl")[0]["reward/mean"] < 1
