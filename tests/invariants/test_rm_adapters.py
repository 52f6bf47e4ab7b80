"""Adapters of reward models: they alone and the head are trained, killed runs go on, ranks take the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.compare import differences, final_checkpoint, read_rows
from support.references import KILLED, Restarts
from support.rm_runs import rm_words, write_rows
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

FLAGS = ("--max_epochs", "2", "--save_steps", "3", "--max_ckpt_num", "9", "--learning_rate", "1e-2")
FLAGS = (*FLAGS, "--eval_steps", "4", "--save_interval", "0", "--lora_rank", "4", "--patience", "50")
STRATEGIES = {"replicas": (), "fsdp": ("--fsdp",), "zero 2": ("--zero_stage", "2")}
HEADS = ("--pooling_method", "attn", "--probing_layer", "1", "--scale_for_train", "--lora_type", "dora")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums with the right and a wrong result."""
    folder = tmp_path_factory.mktemp("pairs")
    rows: list[dict[str, str]] = []
    for n in range(44):
        a, b = n % 7, n // 7
        rows.append({"input": f"{a}+{b}=", "chosen": f"{a + b:02d}", "rejected": f"{(a + b + 1) % 13:02d}"})
    return write_rows(folder, rows, 34)


def words(task: TinyTask, pairs: Path, run: Path, *more: str) -> list[str]:
    return rm_words(task, pairs, run, *FLAGS, *more)


@pytest.fixture(scope="module")
def reference(server: ForkServer, task: TinyTask, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run = tmp_path_factory.mktemp("reference") / "run"
    server.must_finish(*words(task, pairs, run))
    return run


def test_the_matrices_move_by_what_adapters_add_and_nothing_else_does(reference: Path) -> None:
    before = load_file(reference / "checkpoints" / "step_000000" / "model" / "model.safetensors")
    after = load_file(final_checkpoint(reference) / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "score.weight" in moved
    matrices = {name for name in before if name.endswith("_proj.weight")}
    assert moved - {"score.weight"} == matrices
    for name in sorted(matrices):
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4) <= 4, name
    rows = read_rows(reference / "evals.jsonl")
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]


@pytest.mark.parametrize("more", [(), HEADS], ids=["a linear head", "a pooled head on a layer"])
def test_a_killed_run_is_the_run_that_was_not(
    server: ForkServer, task: TinyTask, pairs: Path, reference: Path, runs: Path, more: tuple[str, ...]
) -> None:
    whole = reference
    if more:
        whole = runs / "whole"
        server.must_finish(*words(task, pairs, whole, *more))
    restarts = Restarts(server, words(task, pairs, runs / "run", *more), runs / "run")
    assert restarts.start([("signal_at", ["rm.logged", 5, "SIGKILL"])]).wait().code == KILLED
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(whole, runs / "run") == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_take_the_steps_of_one(
    server: ForkServer, task: TinyTask, pairs: Path, reference: Path, runs: Path, strategy: str
) -> None:
    server.must_finish(*words(task, pairs, runs / "run", *STRATEGIES[strategy]), num_ranks=2)
    expected, found = (read_rows(run / "metrics.jsonl") for run in (reference, runs / "run"))
    assert len(found) == len(expected) == 8
    for row, other in zip(found, expected, strict=True):
        assert row["rm/loss"] == pytest.approx(other["rm/loss"], rel=5e-5, abs=1e-6)
    saved, names = final_checkpoint(runs / "run") / "model", set[str]()
    for file in saved.glob("*.safetensors"):
        names |= load_file(file).keys()
    assert names == load_file(final_checkpoint(reference) / "model" / "model.safetensors").keys()
    adapters = load_file(saved / "adapter" / "adapter_model.safetensors")
    known = load_file(final_checkpoint(reference) / "model" / "adapter" / "adapter_model.safetensors")
    assert adapters.keys() == known.keys()
    for name, tensor in known.items():
        assert torch.allclose(adapters[name], tensor, rtol=1e-3, atol=1e-5), name


def test_what_is_written_scores_without_peft_and_is_a_reward_and_a_critic(
    server: ForkServer, task: TinyTask, reference: Path, runs: Path
) -> None:
    model = str(final_checkpoint(reference) / "model")
    more = ("--reward=", "--reward_pretrain", model, "--critic_pretrain", model, "--advantage_estimator", "gae")
    server.must_finish(*task.words("rl", runs / "run", *more, "--max_steps", "1", "--eval_data="))
    assert read_rows(runs / "run" / "metrics.jsonl")[0]["critic/loss"] > 0
    refused = server.run("export", str(reference), str(runs / "alone"), "--adapter")
    assert refused.code == 4
    assert "adapters of a reward model score nothing without its head" in refused.output
    assert not (runs / "alone").exists()
