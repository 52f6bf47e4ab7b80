"""Test doubles that satisfy the loops' protocols: a bigram policy that learns, and an engine that samples it.

They let the loops run in milliseconds with exact arithmetic; nothing in a real run imports them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.keyed_random import uniforms
from rft_core.packed_tokens import PackedTokens


class BigramPolicy(nn.Module):
    """Bigram policy: log p(next | token) is a row of one trainable [V, V] table of logits."""

    def __init__(self, vocab_size: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab_size, vocab_size, dtype=dtype))

    def token_logprobs(
        self,
        tokens: PackedTokens,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs and entropies, as `protocols.Policy`."""
        token_ids_T = tokens.token_ids_T
        target_mask_T = _targets(tokens)
        previous_T = torch.cat([token_ids_T[:1], token_ids_T[:-1]])
        rows_TV = (self.table[previous_T] / temperature).log_softmax(-1)
        logprobs_T = rows_TV.gather(-1, token_ids_T[:, None])[:, 0]
        entropy_T = -(rows_TV.exp() * rows_TV).sum(-1)
        entropy_T = entropy_T if entropy_gradient else entropy_T.detach()
        zero = logprobs_T.new_zeros(())
        return torch.where(target_mask_T, logprobs_T, zero), torch.where(
            target_mask_T, entropy_T, zero
        ) if with_entropy else None

    def save_pretrained(self, directory: Path) -> None:
        """Write the table as JSON."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "table.json").write_text(json.dumps(self.table.tolist()))


class TokenCritic(nn.Module):
    """Critic whose value before a token is one trainable number of its predecessor."""

    def __init__(self, vocab_size: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab_size, dtype=dtype))

    def values(self, tokens: PackedTokens) -> Tensor:
        """Compute values, as `protocols.Critic`."""
        shown_T = _targets(tokens) & (tokens.positions_T > 0)
        return torch.where(shown_T, self.table[tokens.token_ids_T.roll(1)], 0.0)


class TokenScorer(nn.Module):
    """A reward model whose score of a text is the mean of a number a token; the heads have columns of their own."""

    def __init__(self, vocab_size: int, *, heads: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, vocab_size * heads, dtype=dtype).view(heads, vocab_size).T)

    def score_matrix(self, tokens: PackedTokens) -> Tensor:
        """Compute scores [S, heads], as `protocols.ScoringModel`."""
        segments_T = tokens.segment_ids_T
        num_segments = int(segments_T[-1]) + 1
        sums_SK = self.table.new_zeros(num_segments, self.table.shape[1])
        sums_SK = sums_SK.index_add(0, segments_T, self.table[tokens.token_ids_T])
        return sums_SK / segments_T.bincount(minlength=num_segments)[:, None]


def _targets(tokens: PackedTokens) -> Tensor:
    """[T] bool, the first tokens of segments among them where nothing masks them out."""
    mask_T = tokens.target_mask_T
    return torch.ones_like(tokens.token_ids_T, dtype=torch.bool) if mask_T is None else mask_T


@dataclass(frozen=True, slots=True)
class FakeCompletion:
    """One completion of a fake engine."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    finish_reason: str
    weight_version: int


class BigramEngine:
    """Fake engine that samples a `BigramPolicy` token by token with keyed randomness."""

    def __init__(self, policy: BigramPolicy) -> None:
        self._policy = policy
        self.version = 0

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[FakeCompletion]]:
        """Generate one completion a key; temperature 0 takes the most likely token. Nothing is truncated."""
        assert constraint is None, "the double draws freely"
        del media
        temperature, stop_token_ids = options.temperature, options.stop_token_ids
        budgets = budgets or [[options.max_new_tokens] * len(keys) for keys in sample_keys]
        table = (self._policy.table / (temperature or 1.0)).log_softmax(-1)
        return [
            [
                self._one(table, prompt[-1], key, temperature, limit, stop_token_ids)
                for key, limit in zip(keys, limits, strict=True)
            ]
            for prompt, keys, limits in zip(prompts, sample_keys, budgets, strict=True)
        ]

    def _one(
        self, table: Tensor, last: int, key: int, temperature: float, limit: int, stops: Sequence[int]
    ) -> FakeCompletion:
        draws = uniforms([key], limit)[0].tolist()
        tokens: list[int] = []
        logprobs: list[float] = []
        for draw in draws:
            cumulative = table[last].double().exp().cumsum(0)
            # times the sum, which rounding leaves a little off 1
            sampled = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
            chosen = sampled if temperature else int(table[last].argmax())
            logprobs.append(float(table[last, chosen]))
            tokens.append(chosen)
            last = chosen
            if last in stops:
                break
        reason = "stop" if tokens[-1] in stops else "length"
        return FakeCompletion(tuple(tokens), tuple(logprobs), (0.0,) * len(tokens), reason, self.version)

    def load_weights(self, version: int) -> None:
        """Set the version; the table is shared, so nothing is copied."""
        self.version = version

    def refresh(self) -> None:
        """Do nothing: the table is shared."""

    def sleep(self, level: int = 1) -> None:
        """Do nothing: there is no memory to release."""

    def wake(self) -> None:
        """Do nothing: there is no memory to restore."""


@dataclass(frozen=True, slots=True)
class PlainOutcome:
    """Result of one `PlainOptimizer` step."""

    gradient_norm: float
    applied: bool
    loss_scale: float | None = None


class PlainOptimizer:
    """Stochastic gradient descent on one process, refusing a gradient that is not finite."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Accumulate the gradients of a loss."""
        loss.backward()

    def own_norm(self) -> float | None:
        """Return the norm of the accumulated gradients."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0

    def discard(self) -> None:
        """Drop the accumulated gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> PlainOutcome:
        """Update w <- w - learning_rate * gradient, unless the gradient is not finite or above `largest_norm`."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
        finite = math.isfinite(norm) and norm <= largest_norm
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    if finite:
                        parameter -= learning_rate * parameter.grad
                    parameter.grad = None
        return PlainOutcome(norm, finite)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return an empty state: nothing is kept between steps."""
        return {}


class CopiedParameters:
    """A copy of named parameters (`protocols.BestWeights`), which a checkpoint holds."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(named_parameters)
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Copy the values as they are now."""
        self._kept = {name: value.detach().clone() for name, value in self._parameters.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the kept values in place."""
        for name, value in self._kept.items():
            self._parameters[name].copy_(value)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the kept values; the present ones before anything was kept."""
        return dict(self._kept or self._parameters)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `checkpoint_tensors()` returned."""
        self._kept = {name: value.detach().clone() for name, value in tensors.items()}


class OneRank:
    """Collectives of a single process."""

    rank = 0
    world_size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, the sum over one rank."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, the maximum over one rank."""
        return tensor

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the payload of the only rank."""
        return [data]


class DigitDecoder:
    """Decoder of token ids to their decimal numbers, joined by spaces."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Decode responses, one text a response."""
        return [" ".join(str(token) for token in row) for row in batch]


class MemoryWriter:
    """Checkpoint writer that keeps checkpoints in a list instead of on disk."""

    failed = False

    def __init__(self) -> None:
        self.saved: list[tuple[int, dict[str, object]]] = []
        self.kept: int | None = None

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, object],
        records: Mapping[str, object],
        policy: object,
        metadata: Mapping[str, object],
    ) -> None:
        """Store the step and its records."""
        del tensors, policy, metadata
        self.saved.append((step, dict(records)))

    def keep(self, step: int) -> None:
        """Remember the step that retention would spare."""
        self.kept = step

    def wait(self) -> None:
        """Do nothing: every save is complete when `save` returns."""
