"""GRPO in one's own hands: sample, score, estimate advantages, take a step. Learns to answer with even digits.

    python examples/own_grpo.py
    torchrun --nproc_per_node=2 examples/own_grpo.py

The numbers are those of `rft-train rl --advantage_estimator grpo` with the same prompts, seed and rewards.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import rft
from rft_algos.advantages.group_relative import group_norm
from rft_models.tiny_models.text import build_character_model

PROMPTS = [f"{a}+{b}=" for a in range(1, 5) for b in range(1, 5)]


def reward(text: str) -> float:
    """Share of even digits."""
    return sum(letter in "02468" for letter in text) / max(len(text), 1)


def main(steps: int = 12) -> list[float]:
    """Train a tiny model that is made here; return the mean reward of every step."""
    model = Path(tempfile.mkdtemp()) / "model"
    build_character_model(model, alphabet="0123456789+=", hidden=32, layers=1, heads=2, ffn=32, seed=0)
    settings = {"actor_learning_rate": 0.01, "max_steps": steps, "generate_max_len": 4, "seed": 1}
    rewards_of_steps: list[float] = []
    with rft.open_loop(model, reference=True, device="cpu", **settings) as loop:
        policy, trainer = loop.policy, loop.trainer
        for step in range(steps):
            # the same arguments on every rank, which share the work out and all have the results
            sampled = policy.sample([PROMPTS[(4 * step + i) % len(PROMPTS)] for i in range(4)], n=8)
            rewards = torch.tensor([reward(one.response_text) for one in sampled.completions], dtype=torch.float64)
            batch = sampled.batch(group_norm(rewards, sampled.group_ids))
            batch = batch.with_logprobs(reference=policy.reference_logprobs(batch))
            metrics = trainer.forward_backward(batch, rft.objective("grpo"))
            outcome = trainer.step()
            trainer.publish()
            rewards_of_steps.append(float(rewards.mean()))
            if loop.is_first:
                kl, norm = metrics["kl/reference"], outcome.gradient_norm
                print(f"step {step + 1}  reward={rewards.mean():.3f}  kl={kl:.4f}  norm={norm:.3f}")
        # on all ranks, which write together
        saved = trainer.save(model.parent / "checkpoints")
        if loop.is_first:
            print(f"saved: {saved}")
    return rewards_of_steps


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
