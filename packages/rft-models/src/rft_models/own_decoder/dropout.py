"""Dropout of the family's blocks: torch's in transformers' hands, off in a policy, keyed in a run that trains with it.

A policy's masks are a function of (seed, optimizer step, sample, layer), as `keyed_masks.keyed_dropout` has them, so a
resumed run and other micro-batches have the same ones. Until they have a seed there is no dropout: reinforcement
learning compares log-probabilities of one policy, which masks would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rft_core.keyed_random import derive_key
from rft_models.keyed_masks.keyed_dropout import KeyedDropout, RowKeys


class BlockDropout(nn.Dropout):
    """y = x keep / (1 - p), with torch's masks or with keyed ones."""

    def __init__(self, p: float) -> None:
        super().__init__(float(p))
        self.rate = float(p)
        """p of the configuration; `p` itself is 0 while there is no dropout."""
        self._keyed: KeyedDropout | None = None

    def turn_off(self) -> None:
        """Drop nothing until `key`."""
        self.p = 0.0

    def key(self, key: int, rows: RowKeys) -> None:
        """Drop with masks of `key` and of the rows' keys."""
        self.p = self.rate
        # outside the module tree: it has no state, and a second dropout below this one would be counted twice
        object.__setattr__(self, "_keyed", KeyedDropout(self.rate, key, rows))

    def forward(self, input: Tensor) -> Tensor:
        """Zero entries of [1, T, D] and rescale the others, in training mode."""
        if not self.training or self.p == 0.0:
            return input
        return super().forward(input) if self._keyed is None else self._keyed(input)


def turn_off_dropout(model: nn.Module) -> None:
    """Let no block of a model drop entries until `key_dropout`."""
    for _, block in _blocks(model):
        block.turn_off()


def key_dropout(model: nn.Module, decoder: nn.Module, *, seed: int) -> RowKeys | None:
    """Let a model's blocks drop entries with masks of this seed.

    Args:
        model: the whole model, whose names of modules are part of the keys.
        decoder: what is given token ids and positions as keywords.
        seed: of the run.

    Returns:
        The keys of the rows, whose `update` is the number of the optimizer step; None: the model has no dropout.
    """
    blocks = [(name, block) for name, block in _blocks(model) if block.rate]
    if not blocks:
        return None
    rows = RowKeys()
    hook: Any = rows.hook
    decoder.register_forward_pre_hook(hook, with_kwargs=True)
    for name, module in blocks:
        module.key(derive_key(seed, f"dropout:{name}"), rows)
    return rows


def _blocks(model: nn.Module) -> Iterator[tuple[str, BlockDropout]]:
    for name, module in model.named_modules():
        if type(module) is BlockDropout:
            yield name, module
