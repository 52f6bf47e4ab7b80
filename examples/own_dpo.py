"""DPO in one's own hands: pairs of answers, log-probs of a reference, a loss of 5 lines. Learns to add.

python examples/own_dpo.py
torchrun --nproc_per_node=2 examples/own_dpo.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from torch import Tensor

import rft
from rft_algos.losses.preference import dpo as dpo_losses
from rft_models.tiny_models.text import build_character_model

PAIRS = [(f"{a}+{b}=", str(a + b), str(a + b + wrong)) for a in range(5) for b in range(5) for wrong in (1, 3)]
"""(prompt, chosen, rejected)."""


def dpo(logprobs: Tensor, batch: rft.TokenBatch, counts: rft.Counts) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """Return the share of a micro-batch in the mean over all pairs of the step, and how many are in order."""
    assert batch.reference_logprobs_T is not None
    chosen, rejected = rft.pair_values(rft.sequence_sums(logprobs, batch), batch)
    reference = rft.pair_values(rft.sequence_sums(batch.reference_logprobs_T, batch), batch)
    losses = dpo_losses(chosen, rejected, *reference, beta=0.5)
    in_order = (chosen - reference[0] > rejected - reference[1]).sum()
    return losses.sum() / counts.num_units, {"dpo/accuracy": (in_order, len(losses))}


def main(epochs: int = 3) -> list[float]:
    """Train a tiny model that is made here; return the share of pairs in order at every step."""
    model = Path(tempfile.mkdtemp()) / "model"
    build_character_model(model, alphabet="0123456789+=", hidden=32, layers=1, heads=2, ffn=32, seed=0)
    accuracies: list[float] = []
    settings = {"actor_learning_rate": 0.003, "lr_schedule": "constant", "lr_warmup_ratio": 0.0}
    with rft.open_loop(model, reference=True, device="cpu", **settings) as loop:
        pairs = loop.policy.pairs(PAIRS)
        # the reference never changes, so it is asked once
        pairs = pairs.with_logprobs(reference=loop.policy.reference_logprobs(pairs))
        for epoch in range(epochs):
            for batch in pairs.split(10):
                metrics = loop.trainer.forward_backward(batch, dpo)
                loop.trainer.step()
                accuracies.append(metrics["dpo/accuracy"])
                if loop.is_first:
                    print(f"epoch {epoch + 1}  loss={metrics['policy/loss']:.4f}  accuracy={accuracies[-1]:.2f}")
        # on all ranks, which write together
        saved = loop.trainer.save(model.parent / "checkpoints")
        if loop.is_first:
            print(f"saved: {saved}")
    return accuracies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
