"""A loop written by hand is the built-in one: the same weights after five steps, on one rank and on two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compare import read_rows
from support.custom_loops import LOOPS, NUM_STEPS, PAIRS, LoopTask, dpo, grpo, make_loop_task, run_on_ranks, sft
from support.runs import ForkServer
from torch import Tensor

from rft_cli.main import main
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import load_tokenizer

CLOSE = 1e-6
"""Largest difference of any weight, in float32, after five steps."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LoopTask:
    return make_loop_task(tmp_path_factory.mktemp("loops"))


def weights(folder: Path) -> dict[str, Tensor]:
    # several files where the ranks wrote them together
    files = (folder / f"step_{NUM_STEPS:06d}" / "model").glob("*.safetensors")
    return {name: tensor for file in sorted(files) for name, tensor in load_file(file).items()}


def largest_difference(run: Path, hand: Path) -> float:
    """Of the weights of a run and of a loop by hand."""
    one, other = weights(run / "checkpoints"), weights(hand)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def change(task: LoopTask, hand: Path) -> float:
    """The largest change of a weight by training."""
    before, after = load_file(task.model / "model.safetensors"), weights(hand)
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def test_grpo_by_hand_is_the_run(task: LoopTask, tmp_path: Path) -> None:
    assert main(task.rl_words(tmp_path / "run")) == 0
    metrics = grpo(task, tmp_path / "hand")
    assert change(task, tmp_path / "hand") > 0.02
    assert largest_difference(tmp_path / "run", tmp_path / "hand") <= CLOSE
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    for own, row in zip(metrics, rows, strict=True):
        assert {name: row[name] for name in own} == pytest.approx(own, rel=1e-6, abs=1e-12)


def test_demonstrations_by_hand_are_the_run(task: LoopTask, tmp_path: Path) -> None:
    assert main(task.sft_words(tmp_path / "run")) == 0
    sft(task, tmp_path / "hand")
    assert change(task, tmp_path / "hand") > 0.02
    assert largest_difference(tmp_path / "run", tmp_path / "hand") <= CLOSE


def plain_dpo(task: LoopTask, beta: float = 0.5) -> dict[str, Tensor]:
    """DPO with torch alone: one sequence at a time, the mean over pairs, clipped, AdamW; returns the weights."""
    policy, reference = (load_policy(task.model) for _ in range(2))
    encode, end = load_tokenizer(task.model).encode, load_tokenizer(task.model).eos_ids[:1]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    def logprob(model: Any, prompt: str, answer: str) -> Tensor:
        ids = [*encode(prompt), *encode(answer), *end]
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = len(encode(prompt))
        return rows[start - 1 : -1].gather(-1, torch.tensor(ids[start:])[:, None]).sum()

    batches = [PAIRS[:3], PAIRS[3:6]]
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for prompt, chosen, rejected in batches[step % 2]:
            gains = [
                logprob(policy.model, prompt, one) - logprob(reference.model, prompt, one).detach()
                for one in (chosen, rejected)
            ]
            losses.append(-torch.nn.functional.logsigmoid(beta * (gains[0] - gains[1])))
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in policy.model.named_parameters()}


def test_dpo_by_hand_is_that_of_a_plain_loop(task: LoopTask, tmp_path: Path) -> None:
    metrics = dpo(task, tmp_path / "hand")
    assert metrics[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[2]["dpo/margin"] > metrics[0]["dpo/margin"] == 0.0
    expected, found = plain_dpo(task), weights(tmp_path / "hand")
    assert change(task, tmp_path / "hand") > 0.02
    gaps = {name: float((value - expected[name]).abs().max()) for name, value in found.items()}
    # Adam divides by the size of a gradient: where that is next to nothing, its rounding is seen
    assert max(gaps.values()) <= 3e-5, gaps


STRATEGIES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "fsdp": {"fsdp": True},
    "zero_1": {"zero_stage": 1},
    "zero_3": {"zero_stage": 3},
    "shared_sequences": {"sp_size": 2},
    "parts_of_every_matrix": {"tp_size": 2},
}


@pytest.fixture(scope="module")
def by_hand(task: LoopTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every loop on two ranks with every strategy, one after another in the same two processes."""
    folder = tmp_path_factory.mktemp("by-hand")
    run_on_ranks(task, 2, [(loop, folder / name / loop, more) for name, more in STRATEGIES.items() for loop in LOOPS])
    return folder


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_two_ranks_loops_by_hand_are_the_runs_on_two_ranks(
    strategy: str, task: LoopTask, by_hand: Path, server: ForkServer, tmp_path: Path
) -> None:
    flags = [word for name, value in STRATEGIES[strategy].items() for word in (f"--{name}", str(value).lower())]
    hand = by_hand / strategy
    server.must_finish(*task.rl_words(tmp_path / "rl", *flags), num_ranks=2)
    server.must_finish(*task.sft_words(tmp_path / "sft", *flags), num_ranks=2)
    assert change(task, hand / "grpo") > 0.02
    assert largest_difference(tmp_path / "rl", hand / "grpo") <= CLOSE
    assert largest_difference(tmp_path / "sft", hand / "sft") <= CLOSE
    expected, found = plain_dpo(task), weights(hand / "dpo")
    # Adam divides by the size of a gradient: where that is next to nothing, its rounding is seen
    assert max(float((value - expected[name]).abs().max()) for name, value in found.items()) <= 3e-5
