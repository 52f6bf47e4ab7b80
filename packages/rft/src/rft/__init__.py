"""The library behind `rft-train`: from settings to a run. Reads no argv, prints nothing, holds no equation.

`rft.grpo`, `rft.rl`, `rft.sft`, `rft.dpo` and `rft.reward_model` train, `rft.evaluate` and `rft.generate` use a model,
`rft.Run` is a run as an object (docs/python.md), and `rft.open_loop` gives a policy and a trainer for a loop of one's
own (`rft.custom_loop`). The import of the package itself loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rft.custom_loop.objectives import objective as objective
    from rft.custom_loop.open_loop import CustomLoop as CustomLoop
    from rft.custom_loop.open_loop import open_loop as open_loop
    from rft.library.callbacks import STOP as STOP
    from rft.library.callbacks import Callback as Callback
    from rft.library.inference import EvaluationScores as EvaluationScores
    from rft.library.inference import evaluate as evaluate
    from rft.library.inference import generate as generate
    from rft.library.reward_service import serve_reward as serve_reward
    from rft.library.run import Run as Run
    from rft.library.training_calls import dpo as dpo
    from rft.library.training_calls import grpo as grpo
    from rft.library.training_calls import pretrain as pretrain
    from rft.library.training_calls import reward_model as reward_model
    from rft.library.training_calls import rl as rl
    from rft.library.training_calls import sft as sft
    from rft_trainer.batches.sequence_values import pair_values as pair_values
    from rft_trainer.batches.sequence_values import sequence_sums as sequence_sums
    from rft_trainer.batches.training_batch import TrainingBatch as TrainingBatch
    from rft_trainer.loops.trainer import Trainer as Trainer
    from rft_trainer.records.rollouts import Counts as Counts
    from rft_trainer.records.rollouts import TokenBatch as TokenBatch
    from rft_trainer.records.rollouts import TrainingSample as TrainingSample
    from rft_trainer.rollouts.sampled_groups import SampledGroups as SampledGroups
    from rft_trainer.rollouts.trained_policy import TrainedPolicy as TrainedPolicy

__version__ = "0.1.0"
__all__ = [
    "STOP",
    "Callback",
    "Counts",
    "CustomLoop",
    "EvaluationScores",
    "Run",
    "SampledGroups",
    "TokenBatch",
    "TrainedPolicy",
    "Trainer",
    "TrainingBatch",
    "TrainingSample",
    "dpo",
    "evaluate",
    "generate",
    "grpo",
    "objective",
    "open_loop",
    "pair_values",
    "pretrain",
    "reward_model",
    "rl",
    "sequence_sums",
    "serve_reward",
    "sft",
]

_PLACES = {
    "STOP": "rft.library.callbacks",
    "Callback": "rft.library.callbacks",
    "Counts": "rft_trainer.records.rollouts",
    "CustomLoop": "rft.custom_loop.open_loop",
    "EvaluationScores": "rft.library.inference",
    "Run": "rft.library.run",
    "SampledGroups": "rft_trainer.rollouts.sampled_groups",
    "TokenBatch": "rft_trainer.records.rollouts",
    "TrainedPolicy": "rft_trainer.rollouts.trained_policy",
    "Trainer": "rft_trainer.loops.trainer",
    "TrainingBatch": "rft_trainer.batches.training_batch",
    "TrainingSample": "rft_trainer.records.rollouts",
    "dpo": "rft.library.training_calls",
    "evaluate": "rft.library.inference",
    "generate": "rft.library.inference",
    "grpo": "rft.library.training_calls",
    "objective": "rft.custom_loop.objectives",
    "open_loop": "rft.custom_loop.open_loop",
    "pair_values": "rft_trainer.batches.sequence_values",
    "pretrain": "rft.library.training_calls",
    "reward_model": "rft.library.training_calls",
    "rl": "rft.library.training_calls",
    "sequence_sums": "rft_trainer.batches.sequence_values",
    "serve_reward": "rft.library.reward_service",
    "sft": "rft.library.training_calls",
}
"""Where each public name stands; it is imported when it is first asked for."""


_ELSEWHERE = {
    "GRPOTrainer": "rft.grpo(model, data, reward)",
    "GRPOConfig": "rft.grpo(model, data, reward, actor_learning_rate=1e-6): settings are keywords",
    "PPOTrainer": 'rft.rl(model, data, reward, advantage_estimator="gae")',
    "ppo": 'rft.rl(model, data, reward, advantage_estimator="gae")',
    "SFTTrainer": "rft.sft(model, data)",
    "SFTConfig": "rft.sft(model, data, learning_rate=1e-5): settings are keywords",
    "DPOTrainer": "rft.dpo(model, pairs)",
    "RewardTrainer": "rft.reward_model(model, pairs)",
    "train": "rft.rl(model, data, reward), or rft.sft(model, data)",
    "eval": "rft.evaluate(model, data, reward)",
    "load": "rft.Run(directory).model()",
}
"""Names of other libraries, and what is called in their place."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        instead = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
