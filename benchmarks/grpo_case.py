"""What both sides of `grpo_vs_trl.py` are given: one model, one list of prompts, one reward; and the floor."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

MICRO_BATCH = 8
"""Sequences of one forward and backward pass: the default of both systems."""
LEARNING_RATE = 1e-5
MAX_NORM = 1.0
ADVANTAGE_EPSILON = 1e-4
CLIP = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One model size with one kind of step; heads are a quarter of the width, two heads share a key."""

    vocab: int
    width: int
    layers: int
    prompt_tokens: int
    prompts: int = 8
    """Prompts of a step."""
    group_size: int = 8
    new_tokens: int = 64
    """Tokens of every response; with `may_end` the most of one."""
    may_end: bool = False
    """Whether a response ends where the model draws the end token: with nearly equal logits lengths are geometric with
    a mean of about `vocab` tokens, so that the longest of a step is several times the mean."""

    @property
    def name(self) -> str:
        """How the tables call it: vocabulary/width/layers/prompt tokens, and what differs from the usual step."""
        usual = f"{self.vocab}/{self.width}/{self.layers}/p{self.prompt_tokens}"
        group = f"/g{self.group_size}" if self.group_size != 8 else ""
        return usual + group + (f"/tail{self.new_tokens}" if self.may_end else "")

    @property
    def num_sequences(self) -> int:
        return self.prompts * self.group_size

    @property
    def heads(self) -> int:
        return 4

    @property
    def kv_heads(self) -> int:
        return 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def ffn(self) -> int:
        return 4 * self.width


CASES = tuple(
    Case(vocab, width, layers, prompt_tokens)
    for vocab, width, layers in ((4096, 256, 4), (1024, 64, 2), (32000, 256, 4))
    for prompt_tokens in (32, 192)
)
MORE_CASES = (
    Case(4096, 384, 4, 32),  # 10 million parameters
    Case(16384, 768, 10, 32, prompts=2),  # 100 million
    Case(4096, 256, 4, 32, group_size=16),
    Case(128, 256, 4, 32, new_tokens=512, may_end=True),
)


def words(case: Case) -> list[str]:
    """The vocabulary: three special tokens, then one token a word."""
    return ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(case.vocab - 3))]


def build_directory(case: Case, directory: Path) -> Path:
    """A complete Hugging Face directory: Qwen3 with tied embeddings and random weights, and a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from rft_models.tiny_models.text import draw_weights

    vocabulary = {word: number for number, word in enumerate(words(case))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=case.width,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    draw_weights(model, seed=0)
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    return directory


def prompt_texts(case: Case, num_prompts: int) -> list[str]:
    """Prompts of exactly `prompt_tokens` tokens, no two alike."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, case.vocab, (num_prompts, case.prompt_tokens), generator=generator)
    names = words(case)
    return [" ".join(names[token] for token in row) for row in ids.tolist()]


def text_reward(text: str) -> float:
    """A deterministic number in [0, 1) of the text, different for different texts: every group has signal."""
    parts = text.split()
    return sum(zlib.crc32(part.encode()) % 1009 for part in parts) / (1009 * max(len(parts), 1))


@dataclass(frozen=True, slots=True)
class Floor:
    """Products that a step cannot do without, and what they take at the best rate measured here."""

    generate_flop: float
    train_flop: float

    def seconds(self, rate: float) -> float:
        """At `rate` FLOP/s."""
        return (self.generate_flop + self.train_flop) / rate


def floor(case: Case, new_tokens: float) -> Floor:
    """FLOP of one step, 2 a multiply-add: weights and attention, each prompt read once in each phase.

    `new_tokens`: the mean length of a response.

    Every response token is one row of every matrix, in generation (forward) and in training (forward
    and twice that backward). The head runs where a token is predicted. A causal token of position
    t attends to t + 1 columns with 4 FLOP a column and width entry.
    """
    blocks = case.layers * (
        case.width * case.head_dim * (2 * case.heads + 2 * case.kv_heads) + 3 * case.width * case.ffn
    )
    head = case.vocab * case.width
    responses = case.num_sequences * new_tokens
    rows = case.prompts * case.prompt_tokens + responses
    prompt, end = case.prompt_tokens, case.prompt_tokens + new_tokens
    columns = case.prompts * (prompt**2 / 2 + case.group_size * (end**2 - prompt**2) / 2)
    attention = 4 * case.layers * case.heads * case.head_dim * columns
    forward = 2 * blocks * rows + 2 * head * responses + attention
    return Floor(forward, 3 * forward)


def product_rate() -> float:
    """FLOP/s of the fastest float32 product found here, over both libraries and three shapes of a step."""
    best = 0.0
    for rows, inner, columns in ((2048, 256, 1024), (2048, 1024, 256), (512, 256, 4096)):
        left, right = torch.randn(rows, inner), torch.randn(columns, inner)
        for product in (torch.nn.functional.linear, _onednn):
            best = max(best, 2 * rows * inner * columns / _best_seconds(lambda f=product, a=left, b=right: f(a, b)))
    return best


def _onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    from rft_models.layers.fast_linear import product_nt

    return product_nt(left, right)


def _best_seconds(work: object) -> float:
    assert callable(work)
    seconds = []
    for _ in range(12):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
