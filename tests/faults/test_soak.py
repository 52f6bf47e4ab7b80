"""L1: faults of all kinds on the same runs, one after another, and not a bit differs from the run without any.

The seed and the number of a fault say what it is, so that a soak that fails is repeated by its seed.
"""

from __future__ import annotations

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
