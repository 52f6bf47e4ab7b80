"""Optimizers of the strategies: one interface for all of them, and one step for those that step on `LocalAdamW`.

    g  = the gradient, summed over micro-batches and ranks        (of the tensors that this rank steps on)
    g <- g / S                                                    (S: loss scale of float16)
    n  = |g|_2 over all parameters of all ranks
    g <- g * min(1, max_norm / n)                                 (max_norm > 0)
    AdamW on this rank's tensors, unless n is not finite on any rank

What differs between strategies is how g and n come about.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Required, TypedDict, Unpack

from torch import Tensor
from torch.nn import Parameter

from rft_dist.checkpoint_format.shards import Shard, ShardRequest, ShardSink, StoredComponent
from rft_dist.collectives import Collectives
from rft_dist.optim.adamw import LocalAdamW, StepOutcome, clip, is_optional, rows_name, trained_parameters
from rft_dist.optim.loss_scaler import KEY, LossScaler, NoLossScaler
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.optim.placement import require_on_host
from rft_dist.strategies.dtensor_shards import start_of
from rft_dist.strategies.ema_swap import swap_in_ema


class StrategyOptimizer(Protocol):
    """Optimizer of a distributed model: every strategy hands out one, and checkpoints save and restore its state."""

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch; `last`: no other follows before `step`."""
        ...

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """Clip, update, clear the gradients, unless their norm is above `largest_norm`; every rank calls it."""
        ...

    def own_norm(self) -> float | None:
        """Return the L2 norm of the gradients that this rank accumulated; None where they arrive summed over ranks."""
        ...

    def discard(self) -> None:
        """Drop the gradients accumulated since the last step; every rank calls it."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Return what this rank keeps of the state, by name."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave on this rank, bit for bit."""
        ...

    def checkpoint_tensors(self) -> Mapping[str, Tensor] | Sequence[Shard]:
        """Return what this rank saves: all tensors by name, or shards, which with all ranks' cover each tensor once."""
        ...

    def restore(self, stored: StoredComponent) -> None:
        """Take the state from a checkpoint of any strategy and number of ranks; CheckpointError where it differs."""
        ...

    def swap_in_ema(self) -> AbstractContextManager[None]:
        """Replace the trained weights by their moving averages while the context is open; all ranks enter it."""
        ...


def restore_shards(state: ShardSink, stored: StoredComponent) -> None:
    """Read the shards that `state` requests; an optional tensor only if it was saved."""
    stored.load(_SavedShards(state, stored.names))


@dataclass(frozen=True, slots=True)
class _SavedShards:
    """Sink that requests every required tensor, and an optional one only if it was saved."""

    state: ShardSink
    saved: Collection[str]

    def shard_requests(self) -> list[ShardRequest]:
        """Return the requests of the state, without optional tensors that were not saved."""
        requests = self.state.shard_requests()
        return [each for each in requests if each.name in self.saved or not is_optional(each.name)]

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Write a shard to the state (`ShardSink`)."""
        self.state.write(name, start, tensor)


class AdamWOptions(TypedDict, total=False):
    """Options of `AdamWOptimizer`, see `LocalAdamW`."""

    betas: Required[tuple[float, float]]
    epsilon: Required[float]
    weight_decay: Required[float]
    groups: ParameterGroups | None
    max_norm: Required[float]
    """The gradient is scaled down to this norm; 0 = never."""
    master: bool
    offload: bool
    host_weights: bool
    """The tensors that are stepped on are kept in host memory, and with them all of the state."""
    ema_decay: float | None
    scaler: LossScaler | None
    """Scales float16 losses; None = losses are not scaled."""
    first_rows: Mapping[str, int]
    """First row that is trained, by name, of matrices whose rows before it keep their bits."""


class AdamWOptimizer(ABC):
    """AdamW on the tensors that this rank keeps: full parameters, or its shards of them."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        collectives: Collectives,
        local: Callable[[Tensor], Tensor],
        **options: Unpack[AdamWOptions],
    ) -> None:
        """Set up moments for the parameters that require a gradient.

        Args:
            named_parameters: of the model; those that require no gradient are left out.
            collectives: the ranks.
            local: gives the part of a parameter that this rank steps on, sharing its memory.
            options: of AdamW.

        Raises:
            OptionsError: no parameter requires a gradient.
        """
        first_rows = options.get("first_rows", {})
        trained = trained_parameters(named_parameters)
        self._parameters = {rows_name(name, first_rows.get(name)): each for name, each in trained.items()}
        self._first_rows = {rows_name(name, first): first for name, first in first_rows.items()}
        self._block = local
        self._collectives = collectives
        self._max_norm = options["max_norm"]
        self._scaler = options.get("scaler") or NoLossScaler()
        self._local = {name: self._own(name, parameter.detach()) for name, parameter in self._parameters.items()}
        self._adamw = LocalAdamW(
            # a rank holds nothing of a parameter that has fewer rows than there are ranks
            {name: tensor for name, tensor in self._local.items() if tensor.numel()},
            betas=options["betas"],
            epsilon=options["epsilon"],
            weight_decay=options["weight_decay"],
            groups=options.get("groups"),
            master=options.get("master", False),
            offload=options.get("offload", False),
            ema_decay=options.get("ema_decay"),
        )
        self._host_setting = "fsdp_cpu_offload" if options.get("host_weights") else ""
        if options.get("offload"):
            self._host_setting = "adam_offload"

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, or of its gradient, that this rank steps on, sharing its memory."""
        block, first = self._block(tensor), self._first_rows.get(name)
        if first is None:
            return block
        return block[max(first - start_of(self._parameters[name])[0], 0) :]

    def _place(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of what all ranks step on of a parameter, and where this rank's part begins in it."""
        parameter = self._parameters[name]
        shape, start, first = tuple(parameter.shape), start_of(parameter), self._first_rows.get(name)
        if first is None:
            return shape, start
        return (shape[0] - first, *shape[1:]), (max(start[0] - first, 0), *start[1:])

    @abstractmethod
    def _summed_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every tensor that this rank steps on, summed over micro-batches and ranks."""

    @abstractmethod
    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the L2 norm of the full gradient."""

    @abstractmethod
    def _is_finite(self, norm: float) -> bool:
        """Return whether the step is applied; the same answer on every rank."""

    @abstractmethod
    def restore(self, stored: StoredComponent) -> None:
        """Take the state from a checkpoint, see `StrategyOptimizer`."""

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch."""
        del last
        self._scaler.scaled(loss).backward()

    def own_norm(self) -> float | None:
        """Return None: where weights are sharded the gradients of all ranks arrive summed."""
        return None

    def discard(self) -> None:
        """Drop the accumulated gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """Sum the gradients over ranks, clip, update; gradients are cleared either way.

        Every rank must call it, also one that had no micro-batch. A parameter that no micro-batch of any rank
        touched has gradient zero: its moments decay. Where the norm is not finite on any rank, or above `largest_norm`,
        no rank updates.
        `learning_rate` is finite and at least 0.

        Raises:
            NumericsError: float16 overflows at the smallest loss scale.
        """
        assert 0 <= learning_rate < math.inf, f"learning rate {learning_rate}"
        gradients = self._summed_gradients()
        # read before `update` moves it: the outcome has the scale of this step's losses
        scale = self._scaler.scale
        # before the norm, since `max_norm` is meant for gradients of the loss itself
        self._scaler.unscale(gradients.values())
        norm = self._gradient_norm(gradients)
        finite = self._is_finite(norm)
        # one norm of the sum over all ranks, so that they agree
        applied = finite and norm <= largest_norm
        if applied:
            clip(gradients.values(), norm, self._max_norm)
            self._adamw.update(gradients, learning_rate)
            self._require_host()
        # after a refused step too: its gradients must not go into the next one
        self.discard()
        # last, because it may raise: by now the gradients are cleared
        self._scaler.update(finite=finite)
        return StepOutcome(norm, applied, scale)

    def _require_host(self) -> None:
        """Raise `OptionsError` where what is kept in host memory is elsewhere, after the first update alone."""
        if not self._host_setting:
            return
        weights = self._local if self._host_setting == "fsdp_cpu_offload" else {}
        # before the first update the moments are not there, and later they stay where they are
        require_on_host(weights | self._adamw.state_tensors(), self._host_setting)
        self._host_setting = ""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the `LocalAdamW` state of this rank's tensors, and "loss_scale" where there is a scaler."""
        return self._adamw.state_tensors() | self._scaler.state_tensors()

    def checkpoint_tensors(self) -> Mapping[str, Tensor] | Sequence[Shard]:
        """Return all of the state: every rank has the same."""
        return self.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, bit for bit; the next step equals the uninterrupted one.

        Raises CheckpointError, and changes nothing, for missing or unexpected names, another
        shape or another dtype. A scale that is missing begins anew; one that is not needed is left.
        """
        self._adamw.load_state_tensors({name: tensor for name, tensor in tensors.items() if name != KEY})
        self._scaler.load_state_tensors(tensors)

    def follow(self, written: Tensor) -> None:
        """Step from the values that this rank's part of a parameter was given by something else than a step.

        A copy in float32 or in host memory would bring the values before back, and be saved with them.
        """
        self._adamw.follow(written)

    def swap_in_ema(self) -> AbstractContextManager[None]:
        """Replace the trained weights by their moving averages while the context is open."""
        return swap_in_ema(self._parameters, self._adamw.state_tensors)
