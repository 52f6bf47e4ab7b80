"""What all engines of `rollout.py` are given: models, prompts, lengths; and the floor of the work."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

PROMPT_TOKENS = 32
STOP_FREE = 0  # a token id that prompts do not use, for padding


@dataclass(frozen=True, slots=True)
class Case:
    """One model with one number of samples, and how long they are."""

    size: str
    vocab: int
    width: int
    layers: int
    ffn: int
    prompts: int
    samples: int
    tail: bool
    tokens: int = 64

    @property
    def name(self) -> str:
        return f"{self.size}, {self.prompts} x {self.samples}, {'long tail' if self.tail else f'{self.tokens} tokens'}"

    @property
    def heads(self) -> int:
        return max(2, self.width // 64)

    @property
    def kv_heads(self) -> int:
        return self.heads // 2 if self.heads % 2 == 0 else 1

    def budgets(self) -> list[list[int]]:
        """[prompts][samples]: all `tokens`, or one in sixteen 8 times the others' half."""
        if not self.tail:
            return [[self.tokens] * self.samples for _ in range(self.prompts)]
        short, numbers = self.tokens // 2, random.Random(11)
        total = self.prompts * self.samples
        long = set(numbers.sample(range(total), total // 16))
        flat = [8 * short if place in long else short for place in range(total)]
        return [flat[start : start + self.samples] for start in range(0, total, self.samples)]

    @property
    def longest(self) -> int:
        return max(budget for budgets in self.budgets() for budget in budgets)

    def prompt_ids(self) -> list[list[int]]:
        """Prompts of 32 tokens, no two alike."""
        numbers = random.Random(7)
        return [[numbers.randrange(1, self.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(self.prompts)]


SHAPES = {
    "0.6M": {"vocab": 1024, "width": 128, "layers": 2, "ffn": 512, "prompts": 64, "samples": 8},
    "10M": {"vocab": 8192, "width": 320, "layers": 5, "ffn": 1280, "prompts": 64, "samples": 8},
    "100M": {"vocab": 32000, "width": 768, "layers": 9, "ffn": 3072, "prompts": 16, "samples": 8},
}
CASES = tuple(Case(size=size, tail=tail, **shape) for size, shape in SHAPES.items() for tail in (False, True))


def build_directory(case: Case, directory: Path) -> Path:
    """A Hugging Face directory: Qwen2 with tied embeddings and random weights. No tokenizer: prompts are ids."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rft_models.tiny_models.text import draw_weights

    config = Qwen2Config(
        vocab_size=case.vocab,
        hidden_size=case.width,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=STOP_FREE,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    draw_weights(model, seed=0)
    model.save_pretrained(str(directory))
    return directory


def num_parameters(case: Case) -> int:
    """Of the matrices; tied ones once."""
    head_dim = case.width // case.heads
    kv = case.kv_heads * head_dim
    layer = 2 * case.width**2 + 2 * case.width * kv + 3 * case.width * case.ffn
    return case.layers * layer + case.vocab * case.width


def floor_seconds(case: Case, flop_rate: float, bandwidth: float) -> tuple[float, float]:
    """(multiply-adds of all tokens at the best rate, weights read once a step at the speed of a copy)."""
    budgets = [budget for row in case.budgets() for budget in row]
    tokens = sum(budgets) + case.prompts * PROMPT_TOKENS
    return 2 * num_parameters(case) * tokens / flop_rate, 4 * num_parameters(case) * case.longest / bandwidth


def best_rates(threads: int) -> tuple[float, float]:
    """(float32 multiply-adds a second by MKL or oneDNN, bytes read a second), the best of a few."""
    import torch

    from rft_models.layers.fast_linear import linear

    torch.set_num_threads(threads)
    left, right = torch.randn(512, 1024), torch.randn(4096, 1024)
    buffer = torch.ones(2**26)
    rate = bandwidth = 0.0
    with torch.inference_mode():
        for _ in range(5):
            for product in (linear, torch.nn.functional.linear):
                start = time.perf_counter()
                product(left, right)
                rate = max(rate, 2 * 512 * 1024 * 4096 / (time.perf_counter() - start))
            start = time.perf_counter()
            buffer.sum()
            bandwidth = max(bandwidth, buffer.nbytes / (time.perf_counter() - start))
    return rate, bandwidth
