"""Memory that one rank keeps from step to step is told with the rank; that of a sound run does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

MIB = 2**20


def flags(steps: int) -> tuple[str, ...]:
    return ("--max_steps", f"{steps}", "--max_epochs", f"{steps}", "--eval_steps", "0", "--save_steps", f"{steps}")


def health(run: Path) -> dict[str, dict[str, Any]]:
    """The alarms of a run by name."""
    return {alarm["name"]: alarm for alarm in json.loads((run / "summary.json").read_text())["health"]}


def test_a_leak_of_one_rank_is_told_with_its_rank_and_the_steps_that_are_left(
    server: ForkServer, task: TinyTask, runs: Path
) -> None:
    run, leak = runs / "run", [("leak_in_rank", [1, "sft.logged", 8 * MIB])]
    server.must_finish(*task.words("sft", run, *flags(64)), preludes=leak, num_ranks=2)
    alarm = health(run)["memory_slope"]
    assert alarm["what"].startswith("the memory of the process of rank 1 grows by 8")
    assert "what is free now would be used up in about " in alarm["what"]
    assert alarm["value"] == pytest.approx(8.0, abs=1.0)
    other, own = ((run / "logs" / f"rank_{rank}.log").read_text().splitlines() for rank in (0, 1))
    (sites,) = [line for line in own if "the memory of this process grows" in line]
    assert "in the last 10 steps: 80 MiB at " in sites
    assert "preludes.py:" in sites
    assert not any("the memory of this process grows" in line for line in other)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["memory/growth_rank"], last["memory/largest_rss_rank"]) == (1, 1)
    assert last["memory/growth_mib"] == pytest.approx(8 * 40, abs=40)


def growth_per_100_steps(server: ForkServer, words: list[str], run: Path, steps: int) -> float:
    """MiB by which the largest of two processes grows behind the first hundred steps, over hundreds of steps."""
    server.must_finish(*words, num_ranks=2, longest=10.0 * steps)
    assert not {"memory_slope", "slow_memory_growth"} & set(health(run))
    held = [json.loads(line)["memory/largest_rss_mib"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(held) == steps
    return (max(held[-10:]) - max(held[90:100])) / ((steps - 100) / 100)


def test_the_memory_of_a_long_run_does_not_grow(server: ForkServer, task: TinyTask, runs: Path) -> None:
    # in so few steps the allocator still takes up to 2 MiB; a growth of 8 in 100 steps is told to a person
    assert growth_per_100_steps(server, task.words("sft", runs / "run", *flags(300)), runs / "run", 300) < 4.0


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", ["rl", "several_updates", "dpo", "pretrain"])
def test_the_memory_of_two_thousand_steps_does_not_grow(
    server: ForkServer, task: TinyTask, runs: Path, variant: str
) -> None:
    epochs = ("--num_episodes", "2000") if variant in ("rl", "several_updates") else ("--max_epochs", "2000")
    words = ("--max_steps", "2000", *epochs, "--eval_steps", "0", "--save_steps", "500")
    assert growth_per_100_steps(server, task.words(variant, runs / "run", *words), runs / "run", 2000) < 1.0
