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
from rft_trainer.update.nonfinite_checks import (
    refuse_more_steps,
    refuse_non_finite_samples,
    refuse_non_finite_shares,
    refuse_non_finite_weights,
)


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
    groups = [[rollout(0, -0.5, -30.0)], [], [rollout(1)]]
    refuse_non_finite_samples(groups, during="step 1", do="nothing")
    with pytest.raises(NumericsError):
        refuse_non_finite_samples([*groups, [rollout(2, math.nan)]], during="step 1", do="nothing")


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


class RankOf(OneRank):
    """A rank of two; the other one says whether something is wrong, and what."""

    world_size = 2

    def __init__(self, is_wrong: bool, theirs: bytes = b"null", *, first: bool = True) -> None:
        self.is_wrong, self.theirs, self.first = is_wrong, theirs, first
        self.gathered = 0

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.maximum(tensor, torch.tensor([int(self.is_wrong)]))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.gathered += 1
        return [data, self.theirs] if self.first else [self.theirs, data]


def test_shares_that_are_all_finite_are_not_exchanged() -> None:
    ranks = RankOf(False)
    refuse_non_finite_shares([[rollout(0, -0.5)]], ranks, during="step 1", do="nothing")
    assert ranks.gathered == 0


def test_the_first_share_with_such_a_sample_is_named_on_all_ranks() -> None:
    theirs = b'["the engine gave nothing for q:1#2, 3 tokens", 5]'
    for share, ranks, expected, version in (
        ([rollout(0, -0.5)], RankOf(True, theirs), "q:1#2", 5),
        ([rollout(1, math.nan)], RankOf(True, theirs), "p:1#1, 1 tokens", 7),
        ([rollout(1, math.nan)], RankOf(True, theirs, first=False), "q:1#2", 5),
        ([rollout(3, math.nan)], RankOf(False), "p:1#3, 1 tokens", 7),
    ):
        with pytest.raises(NumericsError) as caught:
            refuse_non_finite_shares([share], ranks, during="evaluation", do="go back")
        assert expected in caught.value.problem.what
        assert caught.value.problem.where == f"evaluation; weights of step {version}"
        assert caught.value.problem.do == "go back"


def test_so_many_refused_steps_in_a_row_are_skipped_and_no_more() -> None:
    refuse_more_steps(2, 2, where="step 4", saved_step=1, do="lower the rate")
    refuse_more_steps(0, 0, where="step 4", saved_step=None, do="lower the rate")
    with pytest.raises(NumericsError) as caught:
        refuse_more_steps(3, 2, where="step 4", saved_step=1, do="lower the rate")
    problem = caught.value.problem
    assert (problem.code, problem.where, problem.do) == ("numerics.non_finite", "step 4", "lower the rate")


def check_weights(weights: dict[str, torch.Tensor], ranks: OneRank, last_good: int | None = 2) -> None:
    refuse_non_finite_weights(weights.items(), ranks, step=4, last_good=last_good, do="go back")


def test_weights_of_all_ranks_are_named_once_and_in_order() -> None:
    bad = {"b": torch.tensor([math.nan]), "a": torch.ones(1)}
    with pytest.raises(NumericsError) as caught:
        check_weights(bad, RankOf(True, b'["c", "a", "b"]'))
    assert caught.value.problem.what.startswith("3 of 2 weights")
    assert caught.value.problem.what.endswith("a, b, c")
    with pytest.raises(NumericsError) as caught:
        check_weights({"a": torch.ones(1)}, RankOf(True, b'["far"]'), None)
    assert caught.value.problem.what.endswith(": far")
    assert "no checkpoint was saved before" in caught.value.problem.state


def test_finite_weights_are_not_exchanged_and_no_weights_are_fine() -> None:
    ranks = RankOf(False)
    check_weights({"a": torch.ones(2)}, ranks)
    check_weights({}, ranks)
    assert ranks.gathered == 0
    with pytest.raises(NumericsError):
        check_weights({}, RankOf(True, b'["far"]'))
