"""LightRFT's names train: the guide's two snippets, and the code that a script hands to a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import differing_tensors, read_rows, tensors
from support.trainer_task import TrainerTask, custom_reward_fn, same_model
from torch import Tensor

from rft_cli.lightrft.trainer import RolloutBatch, SPMDPPOTrainer, TrajectorySaver, register_patch, unregister_patch
from rft_cli.main import main
from rft_core.errors import OptionsError, ServiceError

pytestmark = [pytest.mark.xdist_group("lightrft_api"), pytest.mark.usefixtures("script")]


def weights(run: Path) -> dict[str, Tensor]:
    """Those of the last checkpoint."""
    return tensors(run, "model/model.safetensors")


class CustomTrainer(SPMDPPOTrainer):
    """The guide's subclass: only responses that are better than their group teach."""

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        return super().compute_advantages(batch).clamp(min=0.0)


class TransparentTrainer(SPMDPPOTrainer):
    """Overrides everything and changes nothing."""

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        assert batch.rewards_N.shape == batch.group_ids_N.shape
        return super().compute_advantages(batch)

    def ppo_train(self) -> Any:
        told = super().ppo_train()
        self.strategy.update_engine_weights(self.actor)  # as the guide does
        return told


# the two snippets of the guide


def test_a_reward_function_trains_and_the_result_says_before_and_after(
    trainer_task: TrainerTask, tmp_path: Path
) -> None:
    trainer = SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn)
    result = trainer.fit()
    assert result.run_directory == tmp_path / "run"
    assert result.before is not None
    assert result.after is not None
    assert (result.before["step"], result.after["step"], result.after["n"]) == (0, 3, 3)
    assert result.before["reward"] != result.after["reward"], "three steps changed the answers"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", 3)
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_function_in_process_and_the_same_function_in_a_file_give_the_same_run(
    plain: Path, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    assert main(["rl", *trainer_task.words(), "--save_path", str(tmp_path / "run")]) == 0
    assert same_model(plain, tmp_path / "run")
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert read_rows(plain / name) == read_rows(tmp_path / "run" / name)


def test_overridden_advantages_change_the_weights(fit: Callable[..., Path], plain: Path) -> None:
    custom = weights(fit(CustomTrainer))
    assert len(differing_tensors(custom, weights(plain))) > len(custom) // 2


RECORDS: dict[str, dict[str, Any]] = {
    "group_norm": {},
    "running scale": {"reward_running_norm": True, "reward_running_norm_minus_mean": True, "reward_clip": 0.5},
    "divergence in the reward": {"use_kl_loss": False, "init_kl_coef": 0.5, "kl_estimator": "k1", "kl_target": 0.1},
    "whitened": {"advantage_estimator": "reinforce++", "advantages_norm": True, "advantage_clip": 1.0},
    "critic": {"advantage_estimator": "gae", "critic_learning_rate": 0.01},
    "greedy baseline": {"advantage_estimator": "remax"},
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_algorithms_own_advantages_through_an_override_are_the_same_to_the_bit(
    name: str, fit: Callable[..., Path], plain: Path
) -> None:
    own = fit(**RECORDS[name]) if RECORDS[name] else plain
    through = fit(TransparentTrainer, **RECORDS[name])
    assert same_model(own, through)
    assert read_rows(own / "metrics.jsonl") == read_rows(through / "metrics.jsonl")
    assert name == "group_norm" or not same_model(own, plain)


def test_a_critic_learns_the_algorithms_returns_beside_advantages_of_ones_own(fit: Callable[..., Path]) -> None:
    rows = read_rows(fit(CustomTrainer, **RECORDS["critic"]) / "metrics.jsonl")
    assert all(row["critic/updates"] == row["policy/updates"] == 1 for row in rows)


class Listed(SPMDPPOTrainer):
    """One number a sequence, as a list."""

    def compute_advantages(self, batch: RolloutBatch) -> Any:
        return (batch.rewards_N - batch.rewards_N.mean()).tolist()


class Tensored(SPMDPPOTrainer):
    """The same numbers for every token, as a tensor."""

    def compute_advantages(self, batch: RolloutBatch) -> Tensor:
        return (batch.rewards_N - batch.rewards_N.mean())[batch.segment_ids_T]


def test_advantages_of_sequences_and_of_tokens_are_both_taken(fit: Callable[..., Path], plain: Path) -> None:
    listed = fit(Listed)
    assert same_model(listed, fit(Tensored))
    assert not same_model(listed, plain)


class Forgetful(SPMDPPOTrainer):
    """The body of the guide's snippet: `pass`."""

    def compute_advantages(self, batch: RolloutBatch) -> Any:
        pass


def test_an_override_without_advantages_is_refused_by_name(trainer_task: TrainerTask, tmp_path: Path) -> None:
    trainer = Forgetful(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn)
    with pytest.raises(OptionsError, match="compute_advantages returned NoneType") as caught:
        trainer.fit()
    assert caught.value.problem.code == "lightrft.no_advantages"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "interrupted"


# reward functions


def test_responses_without_a_score_are_left_out_and_counted(fit: Callable[..., Path], plain: Path) -> None:
    def sometimes(responses: list[str], labels: list[str]) -> Any:
        return [None, *custom_reward_fn(responses, labels)[1:]]

    run = fit(reward_fn=sometimes, max_unscored_share=0.5)
    assert [row["drop/unscored"] for row in read_rows(run / "metrics.jsonl")] == [2, 2, 2]
    assert not same_model(run, plain)
    with pytest.raises(ServiceError, match="2 of 8 rollouts of step 1 have no reward") as caught:
        fit(reward_fn=sometimes)
    assert caught.value.problem.code == "reward.too_many_failed"


def test_a_tensor_of_rewards_is_as_good_as_a_list(fit: Callable[..., Path], plain: Path) -> None:
    def as_tensor(responses: list[str], labels: list[str]) -> Tensor:
        return torch.tensor(custom_reward_fn(responses, labels), dtype=torch.float64)

    assert same_model(plain, fit(reward_fn=as_tensor))


def test_what_a_reward_function_raises_ends_the_run_with_its_own_traceback(
    trainer_task: TrainerTask, tmp_path: Path
) -> None:
    def broken(responses: list[str], labels: list[str]) -> Any:
        raise KeyError("no such rule")

    trainer = SPMDPPOTrainer(**trainer_task.settings | {"eval_data": ""}, save_path=tmp_path / "run", reward_fn=broken)
    with pytest.raises(KeyError, match="no such rule") as caught:
        trainer.fit()
    (note,) = caught.value.__notes__
    assert "broken, called with the responses to " in note
    assert note.endswith(("train:0", "train:1", "train:2", "train:3", "train:4", "train:5"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "interrupted"


# trajectories and patches


def test_a_saver_gets_every_rollout_of_every_step(fit: Callable[..., Path], plain: Path, tmp_path: Path) -> None:
    saver = TrajectorySaver(output_dir=tmp_path / "trajectories")
    run = fit(trajectory_saver=saver)
    assert saver.steps() == [1, 2, 3]
    rows = [saver.read(step).rows for step in saver.steps()]
    assert [len(found) for found in rows] == [8, 8, 8]
    means = [sum(row["reward"] for row in found) / 8 for found in rows]
    assert means == pytest.approx([row["reward/mean"] for row in read_rows(run / "metrics.jsonl")])
    assert same_model(plain, run)


def test_a_patch_acts_on_policy_and_engine_alike(fit: Callable[..., Path], plain: Path) -> None:
    def patch_your_model(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        original = mlp.forward
        mlp.forward = lambda hidden: 0.5 * original(hidden)

    register_patch("qwen2", patch_your_model)
    try:
        run = fit()
    finally:
        unregister_patch("qwen2", patch_your_model)
    assert not same_model(run, plain)
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in read_rows(run / "metrics.jsonl"))
