"""What the plan of a reward model's run says of its pairs, its head and its loss."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rft.settings import RmSettings
from rft.stages.rm import rm_inputs
from rft_cli.config.resolve import resolve
from rft_cli.pages.preferences.reward_plan import loss_line, rm_lines, rm_model_lines
from rft_models.settings import TrainedWeightsSettings
from rft_models.tiny_models.text import build_character_model
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plan")
    build_character_model(folder / "model", hidden=16, layers=2, heads=2, ffn=16)
    rows = [{"input": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "1" * (1 + n)} for n in range(1, 9)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--pretrain", str(folder / "model"), "--prompt_data", str(folder / "pairs.jsonl")]


def lines(words: list[str]) -> dict[str, str]:
    resolved = resolve("rm", words)
    return {title: "\n".join(rows) for title, rows in rm_lines(resolved, rm_inputs(resolved.settings))}


def test_pairs_steps_and_what_is_left_out_are_said(words: list[str]) -> None:
    found = lines([*words, "--train_batch_size", "4", "--held_out_rows", "2", "--max_len", "13", "--max_epochs", "2"])
    assert "8 pairs from" in found["data"]
    assert "left out, longer than 13 tokens: pairs:7 (14)" in found["data"]
    assert "held out: 2 pairs, kept out of the training pairs by seed 42" in found["data"]
    assert "5 pairs / 4 = 2 steps an epoch, 4 steps at most" in found["batches"]
    assert "at most 8 pairs" in found["batches"]
    assert found["head"] == "score on the last state of the last layer, new"


def test_the_head_is_said(words: list[str]) -> None:
    more = ["--pooling_method", "attn", "--probing_layer", "1", "--scale_for_train"]
    assert lines([*words, *more])["head"] == (
        "score on the attention state of layer 1, new, scaled by a learned factor while training"
    )


def test_adapters_are_said_of_the_layers_that_the_head_reads(words: list[str]) -> None:
    machine: Any = SimpleNamespace(device="cpu")

    def said(*more: str) -> list[str]:
        resolved = resolve("rm", [*words, *more])
        return dict(rm_model_lines(resolved, machine))["adapters"]

    assert said() == []
    first, layers, head = said("--lora_rank", "2")
    assert first.startswith("lora of rank 2, scale 8: ")
    assert layers.startswith("on 14 layers: ")
    assert head == "the head is trained beside them, whole"
    assert said("--lora_rank", "2", "--probing_layer", "1")[1].startswith("on 7 layers: ")


@pytest.mark.parametrize(
    ("training", "data", "line"),
    [
        ({}, {}, "-log sigmoid(better - worse)"),
        ({"margin": 0.5}, {}, "-log sigmoid(better - worse - 0.5)"),
        ({"margin": 0.5}, {"margin_key": "m"}, "-log sigmoid(better - worse - margin of the row)"),
        ({"tie_margin": 0.2}, {}, "-log sigmoid(better - worse - 0.2); ties by Rao-Kupper"),
        ({"loss_type": "hps"}, {}, "cross-entropy over (better, worse)"),
        ({"center_rewards_coefficient": 0.01}, {}, "-log sigmoid(better - worse) + 0.01 (sum)^2"),
    ],
)
def test_the_loss_is_said_as_an_equation(training: dict[str, Any], data: dict[str, Any], line: str) -> None:
    settings = RmSettings(
        model=TrainedWeightsSettings(pretrain="m"),
        training=RewardTrainingSettings(**training),
        data=PairDataSettings(**data),
    )
    assert loss_line(settings) == f"{settings.training.loss_type}: {line}, mean over the pairs of a step"
