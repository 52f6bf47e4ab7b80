"""A strategy that the product does not have: rank 0 alone keeps moments and steps, and sends the weights to the others.

The file is all that a strategy needs beside a setting and a row of the registry: `parallelize` and an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rft_dist.checkpoint_format.shards import StoredComponent
from rft_dist.optim.adamw import LocalAdamW, StepOutcome, clip, total_norm, trained_parameters
from rft_dist.strategies.dtensor_shards import ShardedWeights
from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Leave the weights on every rank, and the moments on rank 0."""
    weights = ShardedWeights(model.named_parameters, context.collectives.rank)
    optimizer = None if context.adam is None else ServerOptimizer(model, context)
    return DistributedModel(data=context.collectives, weights=weights, optimizer=optimizer)


class ServerOptimizer:
    """AdamW on rank 0 (`StrategyOptimizer`)."""

    def __init__(self, model: ShardableModel, context: StrategyContext) -> None:
        assert context.adam is not None
        self._ranks = context.collectives
        self._max_norm = context.adam.max_norm
        self._parameters = trained_parameters(model.trainable_parameters())
        self._adamw = LocalAdamW(
            self._parameters if self._ranks.rank == 0 else {"none": torch.zeros(1)},
            betas=context.adam.adam_betas,
            epsilon=context.adam.adam_epsilon,
            weight_decay=context.adam.l2,
            groups=context.parameter_groups(model),
        )

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        del last
        loss.backward()

    def own_norm(self) -> float | None:
        return total_norm([p.grad for p in self._parameters.values() if p.grad is not None])

    def discard(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._ranks.sum_in_place(gradients[name])
        norm = total_norm(list(gradients.values()))
        applied = norm <= largest_norm
        if self._ranks.rank == 0 and applied:
            clip(gradients.values(), norm, self._max_norm)
            self._adamw.update(gradients, learning_rate)
        for parameter in self._parameters.values():
            self._ranks.broadcast_in_place(parameter.detach())
            parameter.grad = None
        return StepOutcome(norm, applied)

    def state_tensors(self) -> dict[str, Tensor]:
        return self._adamw.state_tensors() if self._ranks.rank == 0 else {}

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return self.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self._ranks.rank == 0:
            self._adamw.load_state_tensors(tensors)

    def restore(self, stored: StoredComponent) -> None:
        self.load_state_tensors(stored.tensors())

    def swap_in_ema(self) -> AbstractContextManager[None]:
        return nullcontext()
