"""Fully sharded data parallel (FSDP2): every rank keeps a block of each weight, gradient and moment.

Before a block of layers computes, its weights are gathered; afterwards they are dropped again, so
that at any moment one block of layers is whole. Gradients are summed over the ranks and each keeps
its block of the sum (Zhao et al., "PyTorch FSDP", VLDB 2023). With `shard_size` below the number of
ranks, blocks are spread over so many neighbours and repeated (hybrid sharding): less memory saved,
less traffic between machines.

Bytes of a rank for P parameters over S ranks, float32 AdamW: 16 P / S, and the gathered block.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rft_core.errors import OptionsError
from rft_dist.checkpoint_format.shards import Shard, ShardRequest, StoredComponent, full_shard, full_shards
from rft_dist.collectives import Collectives
from rft_dist.launch.single_process import init_single_process_group
from rft_dist.optim.adamw import is_optional, squared_norm
from rft_dist.strategies.data_parallel import share_sequences, weights_of
from rft_dist.strategies.dtensor_shards import ShardedWeights, is_first_copy, local, num_copies, start_of
from rft_dist.strategies.optimizer import AdamWOptimizer, AdamWOptions, restore_shards
from rft_dist.strategies.protocols import (
    DistributedModel,
    ReadBlock,
    ShardableModel,
    StrategyContext,
    narrow_dtype,
)
from rft_dist.strategies.sharded_matrices import ShardedMatrices

_METHOD = "rft_compute"


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Shard a model's weights over the ranks, and make the optimizer of its shards."""
    first_rows = model.release_trained_rows()
    data = share_sequences(model, context)
    shard_weights(model, context)
    optimizer = None
    if context.adam is not None:
        optimizer = ShardedOptimizer(
            model.trainable_parameters(), context.collectives, **context.adamw_options(model, first_rows=first_rows)
        )
    return DistributedModel(data=data, weights=weights_of(model, context, optimizer), optimizer=optimizer)


def shard_weights(model: ShardableModel, context: StrategyContext, mesh: DeviceMesh | None = None) -> FullyShardedModel:
    """Shard a model's weights, and run its forward with them gathered; `mesh` as of `FullyShardedModel`."""
    compute_dtype = narrow_dtype(context.settings)
    sharded = FullyShardedModel(
        model.module,
        model.layers,
        context.collectives,
        device=context.device,
        shard_size=context.settings.shard_size,
        compute_dtype=compute_dtype,
        cpu_offload=context.settings.fsdp_cpu_offload,
        mesh=mesh,
    )
    model.wrap_forward(sharded.compute)
    # after sharding: a model made without memory never has more than this rank's blocks
    model.load_pending(lambda read: sharded.load_shards(read, context.device), context.device, compute_dtype)
    return sharded


class FullyShardedModel(ShardedWeights):
    """A module whose weights are sharded over the ranks (FSDP2), in place.

    Example::

        sharded = FullyShardedModel(model, model.layers, collectives, device=torch.device("cpu"))
        loss = sharded.compute(lambda tokens: model(tokens).sum(), tokens)    # in place of calling it
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        collectives: Collectives,
        *,
        device: torch.device,
        shard_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Shard the parameters of `model` over the ranks, in place.

        Args:
            model: its parameters become distributed tensors; every rank must hold the same.
            layers: modules that are gathered one at a time, in the order of the forward; the rest is one group.
            collectives: the ranks.
            device: where it computes.
            shard_size: ranks that a weight is spread over, a divisor of their number; None = all.
            compute_dtype: weights are gathered in this type, while blocks, sums of gradients and moments keep theirs.
            cpu_offload: keep blocks, gradients and moments in host memory, and step there.
            reshard_after_forward: drop gathered weights between forward and backward.
            mesh: the ranks to spread over where those are not all, as of `TensorGroup.data_mesh`; None = all.

        Raises:
            OptionsError: `shard_size` does not divide the number of ranks.
        """
        super().__init__(model.named_parameters, collectives.rank)
        self.model = model
        self._cpu_offload = cpu_offload
        options: dict[str, Any] = {
            "mesh": _mesh(device, collectives.world_size, shard_size) if mesh is None else mesh,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=_reduce_dtype(compute_dtype)),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy(),
        }
        # layers before the model: what they do not hold becomes the group of the model
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a loss carries its global denominator: sums, not means
                module.set_force_sum_reduction_for_comms(True)
        # as a method of the model: FSDP2 gathers weights around forwards and registered methods only
        setattr(model, _METHOD, types.MethodType(_call, model))
        register_fsdp_forward_method(model, _METHOD)

    def compute(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that uses the model, with the weights outside of its layers gathered.

        Every rank must call as often as the others, forward and backward. The results are a tensor or a
        tuple; what goes backward is among them.
        """
        return getattr(self.model, _METHOD)(function, *arguments, **options)

    @torch.no_grad()
    def load_shards(self, read: ReadBlock, device: torch.device) -> None:
        """Allocate and fill the blocks of a model made without memory ("meta"); nothing is exchanged.

        Args:
            read: gives a block of a whole tensor, of any floating-point type.
            device: where the model computes; blocks that are kept in host memory get it there.
        """
        # `to_empty` drops the values of buffers too, and only parameters are read below
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.to_empty(device="cpu" if self._cpu_offload else device)
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name]  # they may be elsewhere than the blocks
        for name, parameter in self.model.named_parameters():
            block = local(parameter)
            if block.numel():
                block.copy_(read(name, start_of(parameter), tuple(block.shape)))


def _call(_: nn.Module, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


def _mesh(device: torch.device, world_size: int, shard_size: int | None) -> DeviceMesh:
    if world_size == 1:  # torch's meshes want a group, also of one
        init_single_process_group(device)
    if shard_size is None or shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    if shard_size < 1 or world_size % shard_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise OptionsError(
            code="fsdp.shard_size",
            what=f"shard_size = {shard_size}, {world_size} {'rank' if world_size == 1 else 'ranks'}",
            where="--shard_size",
            why=f"weights are sharded over equal groups of ranks; allowed: {', '.join(map(str, divisors))}",
            do=f"--shard_size {min(divisors, key=lambda size: abs(size - shard_size))}",
        )
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _reduce_dtype(compute_dtype: torch.dtype | None) -> torch.dtype | None:
    return None if compute_dtype is None else torch.float32


class ShardedOptimizer(AdamWOptimizer):
    """AdamW over shards: each rank steps on those that it keeps, with the norm of the full gradient; Muon on matrices.

    The same equations as `DataParallelOptimizer`; gradients arrive summed from the backward pass: every rank must call
    `backward` as often. What is kept between two micro-batches is a shard, not the full gradient.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        collectives: Collectives,
        **options: Unpack[AdamWOptions],
    ) -> None:
        """Set up moments for this rank's shards; `options` as of `AdamWOptimizer`."""
        named, groups = dict(named_parameters), options.get("groups")
        if groups is not None and groups.matrices:
            # in the order of their names, which every rank has
            matrices = ShardedMatrices({name: named[name] for name in sorted(groups.matrices)})
            options["groups"] = replace(groups, sharded=matrices)
        super().__init__(named.items(), collectives, local, **options)
        self._arrived: dict[str, Tensor] = {}

    def restore(self, stored: StoredComponent) -> None:
        """Read this rank's shards of the state; averages and a loss scale that were not saved begin anew."""
        restore_shards(self, stored)

    def checkpoint_tensors(self) -> list[Shard]:
        """Return this rank's blocks of the state; a block that several ranks hold comes from the lowest of them."""
        shards: list[Shard] = []
        for key, tensor in self._adamw.state_tensors().items():
            kind, _, name = key.partition("/")
            shape, start = self._place(name)
            if not is_first_copy(self._parameters[name], self._collectives.rank):
                continue
            if kind != "step":
                shards.append(Shard(key, shape, start, tensor.contiguous()))
            # the step count is one number a parameter: it comes from the rank with the first block
            elif not any(start):
                shards.append(full_shard(key, tensor))
        return shards + (full_shards(self._scaler.state_tensors()) if self._collectives.rank == 0 else [])

    def shard_requests(self) -> list[ShardRequest]:
        """The blocks of the state that this rank holds, those first that a checkpoint may lack."""
        requests = [
            ShardRequest(key, tuple(tensor.shape), tensor.dtype, (0,) * tensor.ndim, tuple(tensor.shape))
            for key, tensor in self._scaler.state_tensors().items()
        ]
        for key, tensor in self._adamw.state_tensors().items():
            kind, _, name = key.partition("/")
            shape, start = self._place(name) if kind != "step" else ((), ())
            requests.append(ShardRequest(key, shape, tensor.dtype, start, tuple(tensor.shape)))
        # optional ones first: `write` loads the state as soon as the last required one is there
        return sorted(requests, key=lambda each: not is_optional(each.name))

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Take one block, in the order of `shard_requests`; load the state once all required ones have come."""
        del start
        self._arrived[name] = tensor
        needed = {key for key in self.state_tensors() if not is_optional(key)}
        if needed <= self._arrived.keys():
            self.load_state_tensors(self._arrived)
            self._arrived = {}

    def _summed_gradients(self) -> dict[str, Tensor]:
        return {name: self._gradient(name) for name in self._local}

    def _gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        return torch.zeros_like(self._local[name]) if gradient is None else self._own(name, gradient)

    def _is_finite(self, norm: float) -> bool:
        return math.isfinite(norm)  # of a sum that has the same bits on every rank

    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> float:
        # shards that several ranks hold count once
        squares = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            own = squared_norm(gradient)
            if not bool(own.isfinite()):  # squares of finite numbers above 1e19 overflow float32
                own = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            squares += own.to("cpu") / num_copies(self._parameters[name], self._collectives.world_size)
        return math.sqrt(float(self._collectives.sum(squares)))
