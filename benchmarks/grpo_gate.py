"""The equality gate: the same completions through both systems must give the same loss and gradients.

Nothing is timed before this holds. Ours runs `pack` and `Updater` with its objective, policy and
optimizer, cut into micro-batches as in the benchmark; TRL's side is its public `compute_loss` in
training mode on the batch that its own generation would have handed over, cut likewise, followed
by `backward`. To make the comparison say something

- completions differ in length, so that TRL pads and ours does not;
- the old log-probabilities differ from the present ones by up to 0.4, so that the clip acts;
- rewards are those of the texts, and the advantages of both are computed from them by our side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from grpo_case import ADVANTAGE_EPSILON, MICRO_BATCH, Case, text_reward
from grpo_sides import make_optimizer, make_trainer, make_updater, our_prompts
from torch import Tensor

from rft_algos.advantages import group_norm
from rft_core.keyed_random import uniforms
from rft_dist.collectives import SingleProcess
from rft_dist.optim.adamw import StepOutcome
from rft_dist.strategies.data_parallel import DataParallelOptimizer
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_trainer.batches.packing import pack
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Prompt, TrainingSample

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the two sides are apart; every number is relative to TRL's."""

    loss: float
    gradient: float
    """The largest relative L2 distance of a parameter's gradient."""
    parameter: str
    """The parameter it belongs to."""
    entropy: float
    clip_fraction: float
    """Share of tokens whose ratio was clipped, on our side; above 0, or the clip was not compared."""

    @property
    def holds(self) -> bool:
        """Whether timing may begin."""
        return max(self.loss, self.gradient, self.entropy) <= TOLERANCE and self.clip_fraction > 0


class GradientKeeper(DataParallelOptimizer):
    """The optimizer of a run that keeps the summed gradients instead of stepping on them."""

    gradients: dict[str, Tensor]

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        self.gradients = {name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None}
        return StepOutcome(0.0, True)


def check(case: Case, directory: Path) -> Agreement:
    """Run both sides on one batch and compare."""
    policy = load_policy(directory).train()
    assert policy.tokenizer is not None
    samples, rewards = _samples(case, policy)
    groups_N = torch.arange(case.num_sequences) // case.group_size
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_norm(rewards_N, groups_N, epsilon=ADVANTAGE_EPSILON).tolist()
    samples = [_with_advantage(s, a) for s, a in zip(samples, advantages, strict=True)]
    ours, gradients = _our_gradients(policy, samples)
    trl_loss, trl_entropy, trl_gradients = _trl_gradients(case, directory, samples)
    distances = {name: _relative(gradients[name], expected) for name, expected in trl_gradients.items()}
    worst = max(distances, key=lambda name: distances[name])
    return Agreement(
        loss=abs(ours["policy/loss"] - trl_loss) / abs(trl_loss),
        gradient=distances[worst],
        parameter=worst,
        entropy=abs(ours["policy/entropy"] - trl_entropy) / trl_entropy,
        clip_fraction=ours["policy/clip_fraction"],
    )


def _samples(case: Case, policy: CausalPolicy) -> tuple[list[TrainingSample], list[float]]:
    """Random completions of 1/2 to all of the allowed length, and the rewards of their texts."""
    assert policy.tokenizer is not None
    generator = torch.Generator().manual_seed(11)
    prompts: list[Prompt] = our_prompts(case, policy, case.prompts)
    samples: list[TrainingSample] = []
    for number in range(case.num_sequences):
        prompt = prompts[number // case.group_size]
        length = case.new_tokens - int(torch.randint(0, case.new_tokens // 2, (1,), generator=generator))
        completion = torch.randint(3, case.vocab, (length,), generator=generator).tolist()
        samples.append(
            TrainingSample(str(number), prompt.token_ids + tuple(completion), len(prompt.token_ids), advantage=0.0)
        )
    texts = policy.tokenizer.decode_batch([s.token_ids[s.prompt_length :] for s in samples])
    return _with_old_logprobs(policy, samples), [text_reward(text) for text in texts]


@torch.no_grad()
def _with_old_logprobs(policy: CausalPolicy, samples: list[TrainingSample]) -> list[TrainingSample]:
    batch = pack(samples)
    logprobs_T, _ = policy.token_logprobs(batch.tokens)
    noise_T = ((uniforms([3], len(logprobs_T))[0] - 0.5) * 0.8).float()
    rows = (logprobs_T + noise_T).split([s.num_tokens for s in samples])
    return [
        TrainingSample(
            s.sample_id, s.token_ids, s.prompt_length, 0.0, old_logprobs=tuple(row[s.prompt_length :].tolist())
        )
        for s, row in zip(samples, rows, strict=True)
    ]


def _with_advantage(sample: TrainingSample, advantage: float) -> TrainingSample:
    return TrainingSample(
        sample.sample_id, sample.token_ids, sample.prompt_length, advantage, old_logprobs=sample.old_logprobs
    )


def _our_gradients(policy: CausalPolicy, samples: list[TrainingSample]) -> tuple[dict[str, float], dict[str, Tensor]]:
    optimizer = make_optimizer(policy, GradientKeeper)
    assert isinstance(optimizer, GradientKeeper)
    totals = MetricTotals()
    make_updater(policy, optimizer)(samples, 0, totals)
    return totals.merged(SingleProcess()), optimizer.gradients


def _trl_gradients(
    case: Case, directory: Path, samples: list[TrainingSample]
) -> tuple[float, float, dict[str, Tensor]]:
    """(loss, mean entropy, gradients) of TRL's `compute_loss`, summed over its micro-batches."""
    trainer = make_trainer(case, directory, 1, None)
    model = trainer.model.train()
    num_micro_batches = case.num_sequences // MICRO_BATCH
    trainer.current_gradient_accumulation_steps = num_micro_batches  # set by `train`, which generates
    whole = _trl_inputs(samples)
    loss = 0.0
    for start in range(0, case.num_sequences, MICRO_BATCH):
        part = {
            name: value if name == "num_items_in_batch" else value[start : start + MICRO_BATCH]
            for name, value in whole.items()
        }
        share = trainer.compute_loss(model, part)
        share.backward()
        loss += float(share.detach())
    weights = [float(part.sum()) for part in whole["completion_mask"].split(MICRO_BATCH)]
    entropies = trainer._metrics["train"]["entropy"]  # TRL has no other way to ask for its metrics before `log`
    entropy = sum(e * w for e, w in zip(entropies, weights, strict=True)) / sum(weights)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, entropy, gradients


def _trl_inputs(samples: list[TrainingSample]) -> dict[str, Any]:
    """The batch that TRL's generation hands to `compute_loss`; prompts here have one length."""
    completions = [torch.tensor(s.token_ids[s.prompt_length :]) for s in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in completions], batch_first=True)
    prompts = torch.tensor([s.token_ids[: s.prompt_length] for s in samples])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        "old_per_token_logps": pad([torch.tensor(s.old_logprobs) for s in samples], batch_first=True),
        "num_items_in_batch": mask.sum(),
    }


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
