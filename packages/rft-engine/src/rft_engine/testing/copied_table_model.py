"""Test doubles of an engine with weights of its own: a policy of three tensors, and a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rft_engine.testing.table_model import FakeDecodableModel

VOCAB, STATES, CARRY = 6, 9, 3


class TablePolicy:
    """Three tensors, whose logits are a table of states: rows x columns + bias.

    Example::

        policy, twin = TablePolicy(), FakeCopy()
        engine = NativeEngineOnCopy(twin, policy.provider, max_rows=4, max_len=32)
    """

    def __init__(self) -> None:
        self.tensors = tensors_of(0)
        self.num_calls = 0
        self.fails_after: int | None = None
        """Tensors after which the provider breaks off."""

    def step(self, seed: int, size: float = 1.0) -> None:
        """Change every tensor, as an optimizer step does."""
        self.tensors = {name: old + size * tensors_of(seed)[name] for name, old in self.tensors.items()}

    def provider(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as an engine's weight provider does."""
        self.num_calls += 1
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if number == self.fails_after:
                raise OSError("a rank is gone")
            yield name, tensor

    def logprobs(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-prob of every token of the completions."""
        table, rows = table_of(self.tensors).log_softmax(-1), list[list[float]]()
        for prompt, completion in zip(prompts, completions, strict=True):
            state, row = 0, list[float]()
            for position, token in enumerate([*prompt, *completion]):
                if position >= len(prompt):
                    row.append(float(table[state, token]))
                state = (CARRY * state + token + 1) % STATES
            rows.append(row)
        return rows


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Values of the three tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"rows": (STATES, 1), "columns": (STATES, VOCAB), "bias": (VOCAB,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def table_of(tensors: dict[str, Tensor]) -> Tensor:
    """Return logits of the table model, [states, V]."""
    return tensors["rows"] * tensors["columns"] + tensors["bias"]


class FakeCopy(FakeDecodableModel):
    """A copy of such a policy; `loses` are tensors that it reports as written and does not write."""

    dtype = torch.float32

    def __init__(self) -> None:
        # NaN until weights come: whatever is drawn without them is seen
        super().__init__(torch.full((STATES, VOCAB), torch.nan), carry=CARRY)
        self.held: dict[str, Tensor] = {}
        self.loses: set[str] = set()
        self.came: set[str] = set()

    def begin(self) -> None:
        self.held = self.held or {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
        self.came = set()

    def write(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        self.came.add(name)
        if name not in self.loses:
            self.held[name].copy_(tensor)
        return name, self.held[name]

    def finish(self) -> None:
        assert self.came == set(self.held)
        self.log_SV = table_of(self.held)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.held.items()

    def own_name(self, name: str) -> str:
        return name

    def drop(self) -> None:
        self.held, self.log_SV = {}, torch.full((STATES, VOCAB), torch.nan)
