"""A reward server that stays away on one rank: all ranks save their last whole step, and continue to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runs import EVERY_ENTRY, AheadRun, ThreadRank, repeats_its_prompt, run_on_ranks, trained_entries

from rft_core.errors import OutageError
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.runs.checkpointing import save_in_outage
from rft_trainer.runs.stop_signals import StopSignals


def away() -> OutageError:
    return OutageError(code="reward.outage", what="the server is away", where="--remote_rm_url", why="", do="")


def leaves(after: int) -> Callable[[Sequence[RewardItem]], list[Score]]:
    """A reward that is away from the call after so many responses on."""
    seen = [0]

    def reward(items: Sequence[RewardItem]) -> list[Score]:
        seen[0] += len(items)
        if seen[0] > after:
            raise away()
        return repeats_its_prompt(items)

    return reward


def stopped_run(run: AheadRun) -> AheadRun:
    """The run, until it has saved in the outage."""
    loop = run.loop
    with pytest.raises(OutageError) as outage:
        loop.run(StopSignals())
    episode = loop.ledger.epoch
    with pytest.raises(OutageError) as caught:
        save_in_outage(loop.saver, outage.value, loop.progress, run.ranks, episode=episode, resume_command="resume")
    run.close()
    assert caught.value.problem.code == "reward.outage"
    assert f"checkpoint of step {loop.progress.step}" in caught.value.problem.state
    return run


@pytest.mark.parametrize(("staleness", "deterministic"), [(None, False), (2, True), (1, False)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_ranks_save_and_the_resumed_run_trains_every_prompt_once(
    tmp_path: Path, staleness: int | None, deterministic: bool, num_ranks: int
) -> None:
    def run_of(name: str, rank: ThreadRank, **options: Any) -> AheadRun:
        path = tmp_path / f"{name}{rank.rank}"
        return AheadRun(path, staleness, deterministic=deterministic, collectives=rank, save_every=0, **options)

    def first_run(rank: ThreadRank) -> AheadRun:
        reward = leaves(30) if rank.rank == 0 else repeats_its_prompt
        return stopped_run(run_of("first", rank, reward=reward))

    def all_of(work: Callable[[ThreadRank], AheadRun]) -> list[AheadRun]:
        ended = run_on_ranks(num_ranks, work)
        failed = [one for one in ended if isinstance(one, BaseException)]
        assert failed == []
        return [one for one in ended if isinstance(one, AheadRun)]

    whole = all_of(lambda rank: run_of("whole", rank).go())
    first = all_of(first_run)
    step = first[0].loop.progress.step
    assert step < whole[0].loop.progress.step
    assert step > 0 or staleness, "with a queue the rewards may be those of the first steps"
    assert [run.writer.saved[-1][0] for run in first] == [step] * num_ranks
    second = all_of(lambda rank: run_of("second", rank).resume_from(first[0]).go())
    assert trained_entries(first[0], second[0]) == EVERY_ENTRY
    if deterministic or staleness is None:
        assert torch.equal(second[0].policy.table, whole[0].policy.table)
