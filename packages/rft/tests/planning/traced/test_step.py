"""A traced step of every stage against the same step with values, and a deep decoder against the line of two others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.planning.traced import stages
from rft.planning.traced.stages import MicroBatchShape, TracedStage
from rft.planning.traced.step import StepToTrace, TracedStep, trace_step, traced_layers
from rft.resolved import flat
from rft.settings import DpoSettings, RlSettings, RmSettings, SftSettings
from rft_dist.planning.live_bytes import LiveBytes
from rft_models.policy.load import load_policy
from rft_models.policy.load_for_training import checkpointing_of, freezing_of, head_chunk_size
from rft_models.settings import ModelSettings, TrainedWeightsSettings
from rft_models.tiny_models.text import build_character_model
from rft_trainer.batches.packing import count, pack
from rft_trainer.metrics.totals import MetricTotals

SHAPE = MicroBatchShape(num_units=3, unit_tokens=64, vocab=18)
STAGES: dict[str, tuple[TracedStage, Any, Any]] = {
    "sft": (stages.SFT, SftSettings, ModelSettings),
    "dpo": (stages.DPO, DpoSettings, ModelSettings),
    "rl": (stages.RL, RlSettings, ModelSettings),
    "rm": (stages.RM, RmSettings, TrainedWeightsSettings),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(
        tmp_path_factory.mktemp("model") / "m", hidden=64, layers=6, heads=4, ffn=160, kv_heads=2
    )


def to_trace(model: Path, stage: str, **chosen: Any) -> StepToTrace:
    of_stage, kind, weights = STAGES[stage]
    settings = kind(model=weights(pretrain=str(model), **chosen))
    return StepToTrace(
        stage=of_stage,
        settings=settings,
        values=flat(settings),
        shape=SHAPE,
        dtype=torch.float32,
        device_type="cpu",
        num_layers=6,
        several=False,
        has_token_head=stage != "rm",
        sums_in_float32=False,
    )


def in_full(step: StepToTrace) -> TracedStep:
    """The step with all of its layers."""
    # no decoder has as many layers as this period
    return trace_step(replace(step, values={**step.values, "gradient_checkpointing_every": 100}))


def real_peak(step: StepToTrace) -> int:
    """Most bytes of the same step with values, beside the weights."""
    settings = step.settings
    has_head = step.has_token_head
    policy = load_policy(
        settings.model.pretrain,
        gradient_checkpointing=checkpointing_of(settings.model),
        freeze=freezing_of(settings.model) if has_head else None,
        head_chunk_size=head_chunk_size(settings.model) if has_head else None,
    ).train()
    loss = step.stage.loss(settings, policy, policy)
    samples = step.stage.samples(settings, step.values, step.shape)
    with LiveBytes() as live:
        loss(pack(samples), count(samples), MetricTotals()).loss.backward()
    return live.peak


@pytest.mark.parametrize(
    ("stage", "chosen"),
    [
        ("sft", {}),
        ("dpo", {}),
        ("rl", {}),
        ("rm", {}),
        ("sft", {"gradient_checkpointing": True}),
        ("sft", {"gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"}),
        ("rl", {"fused_linear_logprob": True, "chunk_size": 16}),
        ("dpo", {"freeze_prefix": "model.layers.0,model.layers.1"}),
    ],
    ids=str,
)
def test_a_traced_step_holds_what_the_step_holds(model: Path, stage: str, chosen: dict[str, Any]) -> None:
    step = to_trace(model, stage, **chosen)
    assert in_full(step).peak == pytest.approx(real_peak(step), rel=0.02)


@pytest.mark.parametrize("several", [False, True])
def test_a_deep_decoder_is_on_the_line_through_two_others(model: Path, several: bool) -> None:
    step = replace(to_trace(model, "sft"), several=several)
    line, full = trace_step(step), in_full(step)
    assert (line.layers, full.layers) == ((2, 4), (6,))
    assert line.peak == pytest.approx(full.peak, rel=0.01)
    assert line.all_gradients == full.all_gradients
    assert (line.gradients >= line.all_gradients) is several


def test_gradients_of_a_narrower_type_are_counted_in_float32(model: Path) -> None:
    step = replace(to_trace(model, "sft"), dtype=torch.bfloat16)
    assert trace_step(replace(step, sums_in_float32=True)).all_gradients == 2 * trace_step(step).all_gradients


def test_layers_are_traced_in_whole_periods() -> None:
    for every, expected in ((1, (2, 4)), (2, (2, 4)), (3, (6, 12)), (4, (4, 8))):
        assert traced_layers({"gradient_checkpointing_every": every}) == expected
