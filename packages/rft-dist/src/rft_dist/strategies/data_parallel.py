"""AdamW over replicas: every rank holds all parameters and takes the same step.

One optimizer step:

    g   = sum over ranks of the gradients that the rank's micro-batches added up
    n   = |g|_2 over all parameters
    g  <- g * min(1, max_norm / n)                      (max_norm > 0)
    AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2)

Gradients are summed, not averaged: a loss carries its global denominator already, so ranks may
have different numbers of micro-batches, and one with none still takes part in the step.
Gradients are exchanged once a step, after the last micro-batch, in flat float32 buckets (float64
for float64 parameters) whose order is that of the parameter names.

Moments have the dtype of the parameter unless there are master copies: keep parameters in float32, or ask for those.
With master copies the micro-batches of float16 and bfloat16 weights are added up in float32 too: of gradients in
the smaller type there is one parameter's at a time.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from rft_core.errors import PeerError
from rft_dist.checkpoint_format.safetensors_pieces import tensor_bytes
from rft_dist.checkpoint_format.shards import StoredComponent
from rft_dist.collectives import Collectives
from rft_dist.optim.adamw import total_norm, trained_parameters
from rft_dist.planning.memory_estimate import BUCKET_BYTES
from rft_dist.strategies.dtensor_shards import ShardedWeights
from rft_dist.strategies.optimizer import AdamWOptimizer, AdamWOptions
from rft_dist.strategies.process_groups import DataParallelRanks
from rft_dist.strategies.protocols import DataRanks, DistributedModel, ShardableModel, StrategyContext, narrow_dtype
from rft_dist.strategies.sequence_parallel import SequenceGroup


@dataclass(frozen=True, slots=True)
class _Bucket:
    dtype: torch.dtype
    names: tuple[str, ...]


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Leave a model's weights as they are on every rank, and make the optimizer that keeps them equal."""
    data = share_sequences(model, context)
    optimizer = None
    if context.adam is not None:
        optimizer = DataParallelOptimizer(
            model.trainable_parameters(),
            context.collectives,
            **context.adamw_options(model, master=narrow_dtype(context.settings) is not None),
        )
    return DistributedModel(data=data, weights=weights_of(model, context, optimizer), optimizer=optimizer)


def weights_of(model: ShardableModel, context: StrategyContext, optimizer: AdamWOptimizer | None) -> ShardedWeights:
    """Return the weights of a distributed model by their names in checkpoints, which its module may not have.

    What is written there goes into the copies that `optimizer` steps on as well.
    """
    follow = None if optimizer is None else optimizer.follow
    return ShardedWeights(model.named_parameters, context.collectives.rank, written=follow)


def share_sequences(model: ShardableModel, context: StrategyContext) -> DataRanks:
    """Compute every sequence on a group of `sp_size` ranks; return the ranks that batches are divided among."""
    settings = context.settings
    if settings.sp_size == 1:
        return context.collectives
    group = SequenceGroup(context.collectives, settings.sp_size)
    model.enable_sequence_parallel(group, settings.sp_mode)
    return DataParallelRanks(context.collectives, group)


class DataParallelOptimizer(AdamWOptimizer):
    """AdamW over parameters of which every rank holds a full copy.

    Example::

        optimizer = DataParallelOptimizer(model.named_parameters(), SingleProcess(), betas=(0.9, 0.999),
                                        epsilon=1e-8, weight_decay=0.0, max_norm=1.0)
        for batch in micro_batches:
            optimizer.backward(loss_of(batch))
        outcome = optimizer.step(learning_rate=1e-6)

    Nothing is exchanged before `step`, also not by the last micro-batch. Parameters that require no gradient are
    left out. Raises OptionsError where none requires one, and PeerError where the parameters differ between the ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        collectives: Collectives,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Unpack[AdamWOptions],
    ) -> None:
        """`bucket_bytes`: gradients are exchanged in runs of at most so many; `options` as of `AdamWOptimizer`."""
        parameters = trained_parameters(named_parameters)
        # at the start: replicas that begin apart take the same steps for ever and never meet
        verify_equal_weights(parameters.items(), collectives)
        super().__init__(parameters.items(), collectives, lambda parameter: parameter, **options)
        master = options.get("master", False)
        self._buckets = _cut_into_buckets(self._parameters, bucket_bytes)
        self._sums: dict[str, Tensor] = {}
        self._dtypes = {name: _sum_dtype(parameter, master) for name, parameter in self._parameters.items()}
        self._sum_in_float32()

    def own_norm(self) -> float | None:
        """Return the L2 norm of this rank's gradients of the loss: they are not exchanged before `step`."""
        own = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        own += self._sums.values()
        return total_norm(own) / (self._scaler.scale or 1.0) if own else 0.0

    def discard(self) -> None:
        """Drop the accumulated gradients, and their sums in float32."""
        super().discard()
        self._sums = {}

    def restore(self, stored: StoredComponent) -> None:
        """Read the state in full on every rank."""
        self.load_state_tensors(stored.tensors())

    def weights_hash(self) -> str:
        """SHA-256 of the trained parameters (`weights_hash`)."""
        return weights_hash(self._parameters.items())

    def _sum_in_float32(self) -> None:
        """Register hooks that add each gradient of fewer bits to a float32 sum, and drop it, as soon as it exists."""
        for name, parameter in self._parameters.items():
            if parameter.dtype != self._dtypes[name]:
                # a weak reference: a parameter outlives its optimizer, whose sums must not stay alive with it
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, weakref.ref(self), name))

    def take_in(self, name: str, parameter: Tensor) -> None:
        """Add a gradient that has just arrived to the sum, and drop it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # another optimizer of the same parameter was first
            return
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient.float()

    def _summed_gradients(self) -> dict[str, Tensor]:
        gradients = self._local_gradients()
        self._sum_over_ranks(gradients)
        return gradients

    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> float:
        return total_norm(list(gradients.values()))

    def _local_gradients(self) -> dict[str, Tensor]:
        """Return the gradient sums of this rank's micro-batches; zeros where none touched a parameter."""
        sums, self._sums = self._sums, {}
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            own = sums.pop(name, None)
            own = parameter.grad if own is None else own
            # zeros, not a gap: every rank must bring the same buckets to the exchange
            gradients[name] = torch.zeros_like(parameter, dtype=self._dtypes[name]) if own is None else own
        return gradients

    def _sum_over_ranks(self, gradients: dict[str, Tensor]) -> None:
        """Sum the gradients over all ranks in place, one flat bucket at a time."""
        if self._collectives.world_size == 1:
            return
        for bucket in self._buckets:
            own = [gradients[name] for name in bucket.names]
            # a bucket at a time: a flat copy of all gradients would need their memory once more
            flat = torch.cat([gradient.to(bucket.dtype).reshape(-1) for gradient in own])
            self._collectives.sum_in_place(flat)
            for gradient, piece in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
                gradient.copy_(piece.view(gradient.shape))

    def _is_finite(self, norm: float) -> bool:
        # The sums are equal on all ranks, and so is the norm; the exchange covers a rank whose
        # memory or arithmetic is at fault, since ranks that disagree here never agree again.
        refused = torch.tensor([0 if math.isfinite(norm) else 1])
        return int(self._collectives.max(refused).item()) == 0


def _hand_over(optimizer: weakref.ref[DataParallelOptimizer], name: str, parameter: Tensor) -> None:
    """Pass an accumulated gradient to its optimizer; do nothing where that is gone, since parameters outlive it."""
    if (alive := optimizer()) is not None:
        alive.take_in(name, parameter)


def weights_hash(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256, in hexadecimal, over name, dtype, shape and bytes of every tensor, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda entry: entry[0]):
        # the shape and the dtype count too: equal bytes are not always equal weights
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def verify_equal_weights(named_tensors: Iterable[tuple[str, Tensor]], collectives: Collectives) -> None:
    """Raise PeerError, on every rank, naming the ranks whose tensors differ from those of rank 0."""
    # 64 bytes a rank are exchanged, and no weights
    hashes = [entry.decode() for entry in collectives.gather_bytes(weights_hash(named_tensors).encode())]
    different = [rank for rank, entry in enumerate(hashes) if entry != hashes[0]]
    if different:
        raise PeerError(
            code="replicas.weights_differ",
            what=f"weights of rank {different[0]} have SHA-256 {hashes[different[0]][:16]}, of rank 0 {hashes[0][:16]}",
            where=f"ranks {', '.join(map(str, different[:16]))} of {collectives.world_size}",
            why="data-parallel ranks take the same step only from the same weights",
            do="give every rank the same model directory and seed",
        )


def _cut_into_buckets(parameters: Mapping[str, Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Split parameters into runs of one reduction dtype and device, of at most `bucket_bytes` or one parameter each."""
    # cut by names and sizes alone, which are equal on all ranks: so are the buckets, without an exchange
    buckets: list[_Bucket] = []
    current: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        num_bytes = parameter.numel() * _reduction_dtype(parameter).itemsize
        same = bool(current) and _kind(parameters[current[0]]) == _kind(parameter)
        if current and (not same or size + num_bytes > bucket_bytes):
            buckets.append(_Bucket(_reduction_dtype(parameters[current[0]]), tuple(current)))
            current, size = [], 0
        current.append(name)
        size += num_bytes
    buckets.append(_Bucket(_reduction_dtype(parameters[current[0]]), tuple(current)))
    return buckets


def _kind(parameter: Parameter) -> tuple[torch.dtype, torch.device]:
    return _reduction_dtype(parameter), parameter.device


def _reduction_dtype(parameter: Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _sum_dtype(parameter: Parameter, master: bool) -> torch.dtype:
    """Return the dtype in which the gradients of micro-batches are accumulated."""
    return torch.float32 if master and parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
