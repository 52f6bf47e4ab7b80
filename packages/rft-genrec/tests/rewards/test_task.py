"""The reward as a user's run calls it: by the rows' columns, in a scoring process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rft_genrec.rewards.task import score
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.user_function import FileReward

IDS = [["<a_0>", "<b_0>", "<c_0>"], ["<a_0>", "<b_0>", "<c_1>"]]
FIRST, SECOND = map("".join, IDS)


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    items = {str(n): {"title": f"item {n}", "description": ""} for n in range(2)}
    (tmp_path / "tools.item.json").write_text(json.dumps(items))
    (tmp_path / "tools.index.json").write_text(json.dumps(dict(enumerate(IDS))))
    np.save(tmp_path / "tools.emb.npy", np.array([[1.0, 0.0], [1.0, 1.0]], dtype=np.float32))
    return tmp_path


def test_each_row_is_scored_against_its_own_target(catalogue: Path) -> None:
    extras = [{"catalogue": str(catalogue), "weights": {"rule": 1, "semantic": 0.5}, "history": [0]}] * 3
    extras = [{**one, "embeddings": str(catalogue / "tools.emb.npy")} for one in extras]
    found = score([FIRST, SECOND, "none"], [SECOND] * 3, extras=extras)
    assert [one and one["reward"] for one in found] == [pytest.approx(0.5 * 2**-0.5), pytest.approx(1.5), None]
    # the same history with another target, and the column as JSON
    [other, *_] = score([FIRST], [FIRST], extras=[json.dumps(extras[0])])
    assert other is not None
    assert other["parts"] == {"rule": 1.0, "semantic": pytest.approx(1.0), "correctness": 1.0}
    assert found[0] is not None
    assert found[0]["parts"]["correctness"] == 0.0


def test_a_run_calls_it_and_an_invalid_response_stays_without_a_reward(catalogue: Path) -> None:
    extras = {"catalogue": str(catalogue), "weights": {"rule": 1.0}}
    items = [
        RewardItem(f"row:{row}", "", text, label, "stop", 3, columns={"extras": extras})
        for row, label in enumerate((FIRST, SECOND))
        for text in (FIRST, "a hammer")
    ]
    reward = FileReward("rft_genrec.rewards.task", "score", kind="installed", columns={"extras": ""}, timeout=60.0)
    try:
        found = reward(items)
    finally:
        reward.close()
    assert [one.value for one in found] == [1.0, None, 0.0, None]
    assert found[1].status == "failed"
