"""L1: faults of all kinds on the same runs, one after another, and not a bit differs from the run without any.

A process that lives through its faults takes no more memory for them.

The seed and the number of a fault say what it is, so that a soak that fails is repeated by its seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fault_counts import counted
from support.runs import ForkServer
from support.setup import TinyTask
from support.soak import OF_REPLICAS, OF_TWO_RANKS, Soak

pytestmark = pytest.mark.xdist_group("faults")


@counted(len(OF_TWO_RANKS), 240)
def test_l1_faults_of_every_kind_change_no_bit_of_two_ranks(
    server: ForkServer, task: TinyTask, runs: Path, number: int
) -> None:
    soak = Soak(server, task, runs, OF_TWO_RANKS, seed=1)
    soak.faults(number)
    print(f"\n{soak.page()}")
    assert number < len(OF_TWO_RANKS) or set(soak.counts) == set(OF_TWO_RANKS)


@counted(len(OF_REPLICAS), 40)
def test_l1_engines_that_die_change_no_bit(server: ForkServer, task: TinyTask, runs: Path, number: int) -> None:
    soak = Soak(server, task, runs, OF_REPLICAS, more=("--engine_replicas", "2"), num_ranks=1, seed=2)
    soak.faults(number)
    print(f"\n{soak.page()}")
    assert number < len(OF_REPLICAS) or set(soak.counts) == set(OF_REPLICAS)


REWARD = """
calls = 0


def score(responses, labels):
    global calls
    calls += 1
    if calls % 160 == 0:
        raise ValueError("planted")
    return [float(str(label) in response) for response, label in zip(responses, labels)]
"""
"""Right answers earn 1; in one step of twenty a call raises."""


@pytest.mark.parametrize(
    ("variant", "steps"),
    [
        pytest.param("sft", 300, id="few"),
        pytest.param("rl", 2000, marks=[pytest.mark.night, pytest.mark.timeout(6 * 3600)], id="night"),
    ],
)
def test_l1_a_process_that_lives_through_its_faults_does_not_grow(
    server: ForkServer, task: TinyTask, runs: Path, variant: str, steps: int
) -> None:
    (runs / "reward.py").write_text(REWARD)
    words = [
        "--max_steps",
        f"{steps}",
        "--eval_steps",
        "0",
        "--save_steps",
        "10",
        "--max_rows_set_aside",
        f"{100 * steps}",
    ]
    words += ["--num_episodes", f"{steps}"] if variant == "rl" else ["--max_epochs", f"{steps}"]
    if variant == "rl":
        words += ["--reward", f"{runs / 'reward.py'}:score", "--max_unscored_share", "0.5"]
    # every second save finds the disk full, and the loss of one row is not finite
    faults = [("refuse_every", ["checkpoint.publish.before", 2, "ENOSPC"]), ("spoil_rows", ["policy", [3]])]
    server.must_finish(*task.words(variant, runs / "run", *words), preludes=faults, longest=10.0 * steps)
    rows = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == steps
    assert rows[-1]["policy/rows_set_aside"] >= 1
    assert any("reward/unscored" in row for row in rows) == (variant == "rl")
    held = [row["memory/rss_mib"] for row in rows]
    growth = (max(held[-10:]) - max(held[90:100])) / ((steps - 100) / 100)
    print(f"\n{variant}: {growth:.2f} MiB in 100 steps")
    assert growth < 1.0
