"""Rollouts ahead of two trainer ranks through the program: the run of one rank, through kills and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.compare import checkpoints, differences, final_checkpoint, relative_distance
from support.references import KILLED, Restarts
from support.runs import ForkServer, Prelude
from support.setup import TinyTask
from torch import Tensor

pytestmark = pytest.mark.xdist_group("faults")

AHEAD = ("--max_steps", "4", "--save_steps", "2", "--eval_steps", "4", "--rollout_log_interval", "1")
AHEAD = (*AHEAD, "--num_trajectories_to_save", "32", "--max_staleness", "1", "--no-async_save")
EXACT = (*AHEAD, "--async_deterministic")
PEER = 9
KILLS: list[tuple[Prelude, tuple[int, int]]] = [
    (("signal_at", ["rl.updated", 3, "SIGKILL"]), (KILLED, KILLED)),
    (("signal_rank_at", [1, "async.published", 3, "SIGKILL"]), (PEER, KILLED)),
    (("signal_rank_at", [0, "async.group_drawn", 15, "SIGKILL"]), (KILLED, PEER)),
    (("signal_rank_at", [1, "rl.logged", 3, "SIGKILL"]), (PEER, KILLED)),
]


@pytest.fixture(scope="module")
def two_ranks(server: ForkServer, task: TinyTask, memory_root: Path) -> Path:
    """Two ranks that nothing happens to."""
    run = memory_root / "two_ranks_ahead"
    server.must_finish(*task.words("rl", run, *EXACT), num_ranks=2)
    return run


def drawn(run: Path) -> list[list[tuple[Any, ...]]]:
    """What was trained, by step."""
    keys = ("prompt_id", "sample", "response", "reward", "finish_reason")
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [[tuple(json.loads(line)[key] for key in keys) for line in file.read_text().splitlines()] for file in files]


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, Tensor]:
    """Of the final checkpoint, from as many files as wrote them."""
    tensors: dict[str, Tensor] = {}
    for file in sorted((final_checkpoint(run) / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_run(found: Path, expected: Path) -> None:
    """The same samples under the same versions, and the same weights up to rounding."""
    assert drawn(found) == drawn(expected)
    assert len(drawn(found)) == 4
    told = ("async/staleness_mean", "async/staleness_max", "async/mixed_share", "reward/mean", "data/samples")
    assert [[row[name] for name in told] for row in rows(found)] == [
        [row[name] for name in told] for row in rows(expected)
    ]
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    assert relative_distance(ours.values(), [theirs[name] for name in ours]) < 1e-5


def test_two_ranks_train_the_run_of_one(server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path) -> None:
    server.must_finish(*task.words("rl", runs / "one", *EXACT))
    assert_same_run(two_ranks, runs / "one")
    assert [row["async/staleness_max"] for row in rows(two_ranks)] == [0, 1, 1, 1]


def test_weights_in_blocks_are_published_by_all_ranks_together(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    server.must_finish(*task.words("rl", runs / "fsdp", *EXACT, "--fsdp"), num_ranks=2)
    assert_same_run(runs / "fsdp", two_ranks)


def killed_and_resumed(server: ForkServer, words: list[str], run: Path, kill: Prelude, codes: tuple[int, int]) -> None:
    restarts = Restarts(server, words, run, num_ranks=2)
    ended = restarts.start([kill]).wait()
    assert (ended.code, *ended.other_codes) == codes, ended.output[-3000:]
    ended = restarts.finish()
    assert restarts.resumes == 1
    assert ended.other_codes == (0,)
    ledger = json.loads((final_checkpoint(run) / "state" / "ledger.json").read_text())
    assert (ledger["trained"], ledger["in_flight"]) == (32, []), "four steps of eight prompts, each once"
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]


@pytest.mark.night
def test_ranks_of_which_one_is_killed_go_on_to_the_run_that_was_not(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    kill, codes = KILLS[2]
    killed_and_resumed(server, task.words("rl", runs / "run", *EXACT), runs / "run", kill, codes)
    assert differences(two_ranks, runs / "run") == []


@pytest.mark.night
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("kill", "codes"), KILLS)
def test_ranks_killed_at_any_point_train_every_prompt_once(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path, kill: Prelude, codes: tuple[int, int], exact: bool
) -> None:
    words = task.words("rl", runs / "run", *(EXACT if exact else AHEAD))
    killed_and_resumed(server, words, runs / "run", kill, codes)
    if exact:
        assert differences(two_ranks, runs / "run") == []


@pytest.mark.night
def test_an_error_in_the_rollout_thread_of_one_rank_ends_all_and_is_named(
    server: ForkServer, task: TinyTask, two_ranks: Path, runs: Path
) -> None:
    run = runs / "run"
    refused: list[Prelude] = [("refuse_rank_at", [1, "async.group_drawn", 15, "EIO"])]
    ended = server.run(*task.words("rl", run, *EXACT), preludes=refused, num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PEER, 1), ended.output[-3000:]
    assert "rank 1" in ended.output
    assert "OSError" in ended.output
    assert checkpoints(run), "something was committed"
    server.must_finish("resume", str(run), num_ranks=2)
    assert differences(two_ranks, run) == []
