"""A decoder in plain torch, trained on characters in the way of nanoGPT's recipe for a CPU, for a number of seconds.

    python benchmarks/peers/small_gpt.py TEXT --seconds 180 --seed 0

The recipe, of nanoGPT's README for a machine without a GPU: 4 blocks of width 128 with 4 heads,
context 64, batches of 12 windows at random places, learned positions, LayerNorm and linear layers without bias, GELU,
tied embeddings, no dropout; AdamW with betas (0.9, 0.99), decay 0.1 on matrices, clipping at 1, 100 steps of warm-up
and a cosine from 1e-3 to 1e-4. Its 2,000 steps take about three minutes there; here the number of steps is measured
first, so that the cosine ends with the time. The first 90 % of the characters train, and every one of the last 10 % is
scored, each with at most 64 characters before it in its window. The code is this project's own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 64, 12
PEAK, FLOOR, WARM_UP, DECAY = 1e-3, 1e-4, 100, 0.1
TRIED = 30
"""Steps that measure the speed, after 10 of warm-up; they train a model that is thrown away."""


class Block(nn.Module):
    """Attention and feed-forward part, each behind a norm and added to the residual."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.joined, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, length, _ = hidden_BTD.shape
        parts = self.joined(self.first(hidden_BTD)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden_BTD = hidden_BTD + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden_BTD + self.down(functional.gelu(self.up(self.second(hidden_BTD))))


class SmallGpt(nn.Module):
    """Characters to the logits of the next ones."""

    def __init__(self, vocab: int) -> None:
        """Draw the weights as GPT-2 does."""
        super().__init__()
        self.characters, self.places = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """[B, T] ids -> [B, T, V] logits."""
        hidden_BTD = self.characters(ids_BT) + self.places.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return functional.linear(self.norm(hidden_BTD), self.characters.weight)


@dataclass
class Trained:
    """What a run gave."""

    steps: int
    seconds: float
    validation_loss: float
    """Nats a character."""
    tokens_per_second: float


def rate(step: int, steps: int) -> float:
    """Learning rate of a step."""
    warm_up = min(WARM_UP, steps // 10)
    if step < warm_up:
        return PEAK * (step + 1) / (warm_up + 1)
    share = (step - warm_up) / max(steps - warm_up, 1)
    return FLOOR + 0.5 * (1 + math.cos(math.pi * share)) * (PEAK - FLOOR)


def train(ids: Tensor, vocab: int, steps: int, seed: int) -> tuple[SmallGpt, float]:
    """Train for a number of steps; the model and the seconds."""
    torch.manual_seed(seed)
    model = SmallGpt(vocab)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99))
    places = torch.arange(CONTEXT)
    began = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(len(ids) - CONTEXT, (BATCH, 1))
        windows = ids[starts + places]
        targets = ids[starts + places + 1]
        loss = functional.cross_entropy(model(windows).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, time.perf_counter() - began


@torch.no_grad()
def validation_loss(model: SmallGpt, ids: Tensor) -> float:
    """Mean loss of every character but the first, windows of the context one after the other."""
    total, whole = 0.0, (len(ids) - 1) // CONTEXT
    inputs, targets = ids[: whole * CONTEXT].view(whole, CONTEXT), ids[1 : whole * CONTEXT + 1].view(whole, CONTEXT)
    rest = ids[None, whole * CONTEXT : -1], ids[None, whole * CONTEXT + 1 :]
    for windows, wanted in [*zip(inputs.split(64), targets.split(64), strict=True), rest]:
        if windows.numel():
            total += functional.cross_entropy(model(windows).flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total / (len(ids) - 1)


def run(text: str, seconds: float, seed: int) -> Trained:
    """Train for so many seconds, and score the validation text."""
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    ids = torch.tensor([numbers[character] for character in text])
    cut = int(0.9 * len(ids))
    train(ids[:cut], len(characters), 10, seed)
    _, tried = train(ids[:cut], len(characters), TRIED, seed)
    steps = int(seconds / (tried / TRIED))
    model, taken = train(ids[:cut], len(characters), steps, seed)
    return Trained(steps, taken, validation_loss(model, ids[cut:]), steps * BATCH * CONTEXT / taken)


def main(argv: list[str]) -> int:
    """Print the result as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    print(json.dumps(vars(run(Path(chosen.text).read_text(), chosen.seconds, chosen.seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
