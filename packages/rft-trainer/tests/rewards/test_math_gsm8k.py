"""The published GSM8K files against the reward."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.math import Gsm8kReward

pytestmark = pytest.mark.data

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@pytest.fixture(scope="module")
def reward() -> Iterator[Gsm8kReward]:
    reward = Gsm8kReward(num_workers=1)
    yield reward
    reward.close()


def records(name: str) -> list[dict[str, object]]:
    path = Path(os.environ["RFT_DATA_DIR"]) / "gsm8k" / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "count"), [("test.jsonl", 1319), ("train.jsonl", 7473)])
def test_every_gold_solution_scores_one_against_its_own_label(reward: Gsm8kReward, name: str, count: int):
    items = [
        RewardItem(f"{name}:{line}", str(record["question"]), str(record["answer"]), str(record["answer"]), "stop", 1)
        for line, record in enumerate(records(name), start=1)
    ]
    assert len(items) == count
    wrong = [item.prompt_id for item, score in zip(items, reward(items), strict=True) if score.value != 1.0]
    assert wrong == []


def test_verdicts_on_model_solutions_agree_with_the_published_ones(reward: Gsm8kReward):
    items: list[RewardItem] = []
    published: list[bool] = []
    for line, record in enumerate(records("example_model_solutions.jsonl"), start=1):
        for model in MODELS:
            solution = record[model]
            assert isinstance(solution, dict)
            # these files mark the answer with "A:" on the last line
            response, label = (
                str(text).replace("\nA:", "\n####") for text in (solution["solution"], record["ground_truth"])
            )
            items.append(RewardItem(f"{line}:{model}", str(record["question"]), response, label, "stop", 1))
            published.append(bool(solution["is_correct"]))
    verdicts = [score.breakdown.get("correctness") == 1.0 for score in reward(items)]
    agreement = sum(v == p for v, p in zip(verdicts, published, strict=True)) / len(published)
    disagreeing = [item.prompt_id for item, v, p in zip(items, verdicts, published, strict=True) if v != p]
    print(f"agreement {agreement:.4f} over {len(published)} solutions; different: {disagreeing[:20]}")
    assert agreement >= 0.99
