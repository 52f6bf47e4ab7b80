"""Runs whose rows are in a store: each is the run without one to the bit, also after kills and on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import differences, differing_tensors, read_rows, tensors
from support.references import KILLED, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("invariants")

SHORT = ("--max_steps", "3", "--save_steps", "1", "--rollout_log_interval", "1")
SHORT_ROWS = ("--max_steps", "3", "--save_steps", "1", "--eval_steps", "2")
WORDS = {
    # the routes read a column of every row
    "rl": (*SHORT, "--reward_routes", "07=exact,*=math", "--reward_source_key", "label"),
    "dpo": SHORT_ROWS,
    "rm": SHORT_ROWS,
    "sft": SHORT_ROWS,
}


def stored(variant: str, folder: Path) -> tuple[str, ...]:
    return (*WORDS[variant], "--data_store", "on", "--data_store_path", str(folder / "store"))


def same_training(expected: Path, found: Path) -> None:
    """The ledger names the data by another hash, and all else is the same."""
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        assert differing_tensors(tensors(expected, file), tensors(found, file)) == []
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert read_rows(expected / name) == read_rows(found / name)
    rollouts = sorted(path.name for path in (expected / "rollouts").glob("step_*.jsonl"))
    assert rollouts == sorted(path.name for path in (found / "rollouts").glob("step_*.jsonl"))
    for name in rollouts:
        assert read_rows(expected / "rollouts" / name) == read_rows(found / "rollouts" / name)


@pytest.mark.parametrize("variant", WORDS)
def test_a_run_with_a_store_is_the_run_without_one(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    server.must_finish(*task.words(variant, runs / "run", *stored(variant, runs)))
    expected = references.run(variant, *WORDS[variant])
    same_training(expected, runs / "run")
    if variant == "rl":
        assert len(list((expected / "rollouts").glob("step_*.jsonl"))) == 3


@pytest.mark.parametrize("variant", ["rl", "dpo"])
def test_two_ranks_with_a_store_are_two_ranks_without_one(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    server.must_finish(*task.words(variant, runs / "run", *stored(variant, runs)), num_ranks=2)
    same_training(references.run(variant, *WORDS[variant], num_ranks=2), runs / "run")


@pytest.mark.parametrize("variant", ["rl", "dpo"])
def test_kills_of_a_run_with_a_store_change_no_bit(
    server: ForkServer, task: TinyTask, runs: Path, variant: str
) -> None:
    words = stored(variant, runs)
    server.must_finish(*task.words(variant, runs / "expected", *words))
    restarts = Restarts(server, task.words(variant, runs / "run", *words), runs / "run")
    for point, nth in (("store.shard_written", 1), (f"{variant}.logged", 2), ("checkpoint.file.write.before", 7)):
        if point.startswith("store"):
            # the store of the run before is taken away, so that this one builds it
            (runs / "store").rename(runs / "earlier")
        assert restarts.start([("signal_at", [point, nth, "SIGKILL"])]).wait().code == KILLED, point
    restarts.finish()
    assert (restarts.fresh_starts, restarts.resumes > 0) == (2, True)
    assert differences(runs / "expected", runs / "run") == []
