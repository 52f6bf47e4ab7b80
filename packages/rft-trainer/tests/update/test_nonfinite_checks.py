"""What is not finite is refused before it is believed and before it is saved."""

from __future__ import annotations

import math

import pytest
import torch

from rft_core.errors import NumericsError
from rft_trainer.records.rollouts import Rollout
from rft_trainer.records.scores import RewardStatus
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.testing.bigram import BigramPolicy, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.update.nonfinite_checks import refuse_non_finite_samples, refuse_non_finite_weights


def rollout(index: int, *logprobs: float) -> Rollout:
    zeros = (0.0,) * len(logprobs)
    ids = (1,) * len(logprobs)
    return Rollout("p:1", index, ids, logprobs, zeros, "stop", 7, "x", None, RewardStatus.UNSCORED)


def make_saver(policy: BigramPolicy, writer: MemoryWriter) -> Saver:
    return Saver(
        writer,
        policy,
        PlainOptimizer([policy.table]),
        {"progress": Progress()},
        OneRank(),
        schedule=SaveSchedule(1, 0, 0.0),
        before_save=lambda: None,
        resume_command="rft-train resume here",
    )


def test_finite_log_probabilities_pass() -> None:
    refuse_non_finite_samples([[rollout(0, -0.5, -30.0)], [], [rollout(1)]], during="step 1", do="nothing")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sampled_token_without_a_probability_is_named(value: float) -> None:
    with pytest.raises(NumericsError, match=r"p:1#1, 2 tokens") as caught:
        refuse_non_finite_samples([[rollout(0, -0.5), rollout(1, -0.5, value)]], during="step 8", do="go back")
    assert caught.value.problem.code == "numerics.sampled_logprobs"
    assert "step 8; weights of step 7" in caught.value.problem.where
    assert caught.value.problem.do == "go back"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    weights = {"a": torch.ones(3), "b": torch.tensor([0.0, value])}
    with pytest.raises(NumericsError, match=r"1 of 2 weights .*: b") as caught:
        refuse_non_finite_weights(weights.items(), OneRank(), step=4, last_good=2, do="go back")
    assert caught.value.problem.code == "numerics.weights"
    assert "step 2" in caught.value.problem.state
    weights["b"] = torch.full((2,), torch.finfo(torch.float32).max)
    refuse_non_finite_weights(weights.items(), OneRank(), step=4, last_good=2, do="go back")


def test_a_model_that_is_not_finite_is_not_saved() -> None:
    policy, writer = BigramPolicy(4), MemoryWriter()
    saver = make_saver(policy, writer)
    saver.save(1, episode=0)
    with torch.no_grad():
        policy.table[1, 2] = math.nan
    with pytest.raises(NumericsError) as caught:
        saver.save(2, episode=0)
    assert caught.value.problem.code == "numerics.weights"
    assert caught.value.problem.do == "rft-train resume here"
    assert [step for step, _ in writer.saved] == [1]
    assert saver.saved_step == 1


def test_a_restored_step_is_saved_again_only_when_asked() -> None:
    writer = MemoryWriter()
    saver = make_saver(BigramPolicy(4), writer)
    saver.restore(3, {"progress": Progress(step=3).state()})
    saver.save(3, episode=1)
    assert writer.saved == []
    saver.save_again(episode=1)
    assert [step for step, _ in writer.saved] == [3]
    assert saver.saved_step == 3
