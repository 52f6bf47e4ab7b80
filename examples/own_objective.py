"""An odd objective: imitate good answers, and unlearn bad ones as far as a bound on their probability.

loss = mean over tokens of  -log p        for answers to be learned (advantage above 0)
                            relu(log p - log bound)   for answers to be unlearned, plus an entropy bonus

python examples/own_objective.py
torchrun --nproc_per_node=2 examples/own_objective.py
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import rft
from rft_models.tiny_models.text import build_character_model

BOUND = math.log(0.01)
ENTROPY_BONUS = 0.001


def learn_and_unlearn(logprobs: Tensor, batch: rft.TokenBatch, counts: rft.Counts, entropy: Tensor) -> Tensor:
    """Return the share of a micro-batch; `entropy` is computed because the function has a parameter of that name."""
    learned = batch.advantages_T > 0
    losses = torch.where(learned, -logprobs, torch.relu(logprobs - BOUND)) - ENTROPY_BONUS * entropy
    # tokens of the whole step, on all ranks: never a mean over the micro-batch
    return torch.where(batch.loss_mask_T, losses, 0.0).sum() / counts.num_loss_tokens


def main(steps: int = 40) -> tuple[float, float]:
    """Train a tiny model that is made here; return the mean log-probs of learned and of unlearned answers."""
    model = Path(tempfile.mkdtemp()) / "model"
    build_character_model(model, alphabet="0123456789+=", hidden=32, layers=1, heads=2, ffn=32, seed=0)
    settings = {"actor_learning_rate": 0.01, "max_steps": steps, "micro_train_batch_size": 4}
    with rft.open_loop(model, device="cpu", **settings) as loop:
        rows = [(f"{n}+{n}=", str(2 * n)) for n in range(8)] + [(f"{n}+{n}=", "9") for n in range(8)]
        batch = loop.policy.demonstrations(rows).with_advantages([1.0] * 8 + [-1.0] * 8)
        for step in range(steps):
            metrics = loop.trainer.forward_backward(batch, learn_and_unlearn)
            outcome = loop.trainer.step()
            if loop.is_first and step % 10 == 0:
                print(f"step {step + 1}  loss={metrics['policy/loss']:.4f}  norm={outcome.gradient_norm:.3f}")
        rows_of = batch.rows(loop.policy.logprobs(batch))
        learned, unlearned = (torch.cat(part).mean() for part in (rows_of[:8], rows_of[8:]))
        if loop.is_first:
            print(f"log-prob a token: {learned:.2f} learned, {unlearned:.2f} unlearned")
    return float(learned), float(unlearned)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
