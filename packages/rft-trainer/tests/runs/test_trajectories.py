"""Trajectories are on disk when `save` returns, one file a step, whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core import fault_points
from rft_core.errors import DataError, StorageError
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup
from rft_trainer.records.scores import RewardStatus
from rft_trainer.runs.trajectories import TrajectorySaver


def group(number: int, rewards: list[float | None]) -> RolloutGroup:
    prompt = Prompt(f"train.jsonl:{number}", (1, 2), text=f"{number}+1=", label=str(number + 1), source="train.jsonl")
    rollouts = tuple(
        Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            completion_ids=(5, 6),
            behaviour_logprobs=(-0.5, -1.0),
            log_kept_mass=(0.0, 0.0),
            finish_reason="stop",
            weight_version=3,
            response_text=f"answer {index}",
            reward=reward,
            status=RewardStatus.OK if reward is not None else RewardStatus.FAILED,
        )
        for index, reward in enumerate(rewards)
    )
    return RolloutGroup(prompt, 0, number, rollouts)


ROW = {"prompt": "1+1=", "response": "2", "reward": 1.0}


def test_rollouts_of_groups_become_rows_of_prompt_response_and_reward(tmp_path: Path) -> None:
    saver = TrajectorySaver(output_dir=tmp_path / "deep" / "trajectories")
    file = saver.save([group(1, [1.0, 0.0]), group(2, [None])], step=10)
    assert file == tmp_path / "deep" / "trajectories" / "step_000010.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [(row["step"], row["prompt"], row["response"], row["reward"], row["status"]) for row in rows]
    assert kept == [
        (10, "1+1=", "answer 0", 1.0, "ok"),
        (10, "1+1=", "answer 1", 0.0, "ok"),
        (10, "2+1=", "answer 0", None, "failed"),
    ]
    assert rows[0]["label"] == "2"
    assert rows[0]["mean_logprob"] == -0.75


def test_the_directory_is_named_as_in_the_guide_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saver = TrajectorySaver()
    assert not (tmp_path / "trajectories").exists(), "nothing is made before there is something to keep"
    saver.save([ROW])
    assert (tmp_path / "trajectories" / "step_000001.jsonl").is_file()


def test_rows_of_ones_own_keep_all_their_fields(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path)
    saver.save([ROW | {"reward": torch.tensor(0.5), "note": "é", "scores": torch.tensor([1, 2])}], step=1)
    assert saver.read(1).rows == (ROW | {"step": 1, "reward": 0.5, "note": "é", "scores": [1, 2]},)
    saver.save([ROW | {"reward": math.nan}], step=2)
    (row,) = saver.read(2).rows
    assert (row["reward"], row["non_finite"]) == (None, ["reward"])


def test_without_a_step_files_are_numbered_after_the_highest(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path)
    saver.save([ROW], step=7)
    assert saver.save([ROW]).name == "step_000008.jsonl"
    assert TrajectorySaver(tmp_path).save([ROW]).name == "step_000009.jsonl", "also by a second saver"
    (tmp_path / "step_x.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    assert saver.steps() == [7, 8, 9]
    assert saver.read(5).rows == ()


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    saver = TrajectorySaver(tmp_path)
    saver.save([ROW, ROW], step=1)
    saver.save([ROW], step=1)
    assert len(saver.read(1).rows) == 1
    assert saver.steps() == [1]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1", "response": "2"}, "trajectory 1 has no reward; it has prompt, response"),
        ({}, "trajectory 1 has no prompt, response, reward; it has nothing"),
    ],
)
def test_a_row_without_its_parts_is_refused_and_nothing_is_written(
    row: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=told) as caught:
        TrajectorySaver(tmp_path / "new").save([ROW, row], step=1)
    assert caught.value.problem.code == "trajectories.incomplete"
    assert not (tmp_path / "new").exists()


@pytest.fixture
def no_space() -> Iterator[None]:
    def hook(name: str) -> None:
        if name == "run.rename":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    yield fault_points.install(hook)
    fault_points.install(None)


@pytest.mark.usefixtures("no_space")
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        TrajectorySaver(tmp_path).save([ROW], step=1)
    assert caught.value.problem.code == "storage.full"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        TrajectorySaver(tmp_path / "file" / "trajectories").save([ROW], step=1)
