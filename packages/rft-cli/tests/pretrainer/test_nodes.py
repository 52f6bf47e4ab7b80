"""Machines of the guide's variables and flags: where their ranks meet, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_cli.pretrainer.nodes import nodes
from rft_core.errors import OptionsError
from rft_dist.launch.spawn import Nodes, rank_variables

TWO = {"NUM_NODES": "2", "GPUS_PER_NODE": "4", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


def set_all(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (TWO | changes).items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)


def test_the_environment_names_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch)
    found = nodes([])
    assert found == Nodes(2, 1, "head", 29500)
    variables = rank_variables(3, 4, 29500, found)
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("7", "8", "3")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"], variables["NODE_RANK"]) == ("head", "29500", "1")


def test_flags_and_a_file_name_them_too(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("distributed:\n  num_nodes: 2\n  gpus_per_node: 1\n")
    words = ["--config", str(file), "--distributed-node-rank", "0", "--distributed-master-addr", "head"]
    assert nodes(words) == Nodes(2, 0, "head", 12355)


def test_one_machine_needs_no_meeting_place_and_takes_one_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes(["--distributed-gpus-per-node", "2"]) is None
    set_all(monkeypatch, NUM_NODES="1", NODE_RANK="0")
    assert nodes([]) == Nodes(1, 0, "head", 29500)
    # another program's variables alone are not the guide's
    set_all(monkeypatch, NUM_NODES="", NODE_RANK="", GPUS_PER_NODE="")
    assert nodes([]) is None


def test_a_rank_that_was_placed_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK="0")
    assert nodes([]) is None


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"NODE_RANK": ""}, "export NODE_RANK=0"),
        ({"NODE_RANK": "2"}, "export NODE_RANK=1"),
        ({"MASTER_ADDR": ""}, "export MASTER_ADDR=HOST"),
        ({"GPUS_PER_NODE": ""}, "export GPUS_PER_NODE=8"),
        ({"NUM_NODES": "1"}, "export NUM_NODES=2"),
    ],
    ids=str,
)
def test_what_is_missing_is_named_with_its_variable(
    changes: dict[str, str], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, **changes)
    with pytest.raises(OptionsError) as caught:
        nodes([])
    assert caught.value.problem.code == "pretrainer.nodes"
    assert remedy in caught.value.problem.do
