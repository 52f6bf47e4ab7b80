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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from rft_dist.checkpoint_format.shards import Shard, ShardRequest, full_shard, full_shards
from rft_dist.collectives import Collectives
from rft_dist.launch.single_process import init_single_process_group
from rft_dist.optim.adamw import LocalAdamW, StepOutcome, clip, is_optional, squared_norm, trained_parameters
from rft_dist.optim.loss_scaler import KEY, LossScaler, NoLossScaler
from rft_dist.strategies.dtensor_shards import full_tensors, is_first_copy, local, num_copies, start_of

_METHOD = "rft_compute"
ReadBlock = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Name, index of the first element, shape -> that block of a whole tensor."""


class FullyShardedModel:
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
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.to_empty(device="cpu" if self._cpu_offload else device)
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name]  # they may be elsewhere than the blocks
        for name, parameter in self.model.named_parameters():
            block = local(parameter.detach())
            if block.numel():
                block.copy_(read(name, start_of(parameter), tuple(block.shape)))

    def full_tensors(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter) one by one, on every rank; `trained`: no frozen ones. See `dtensor_shards`."""
        return full_tensors((n, p) for n, p in self.model.named_parameters() if p.requires_grad or not trained)

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's block of the parameter), without an exchange."""
        for name, parameter in self.model.named_parameters():
            yield name, local(parameter.detach())


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
            what=f"shard_size = {shard_size}, {world_size} ranks",
            where="--shard_size",
            why=f"weights are spread over equal groups of ranks; allowed: {', '.join(map(str, divisors))}",
            do=f"--shard_size {min(divisors, key=lambda size: abs(size - shard_size))}",
        )
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _reduce_dtype(compute_dtype: torch.dtype | None) -> torch.dtype | None:
    return None if compute_dtype is None else torch.float32


class ShardedOptimizer:
    """AdamW over blocks: each rank steps on what it holds, with the norm of the whole gradient.

    The same equations as `DataParallelOptimizer`; gradients arrive summed from the backward pass.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        collectives: Collectives,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        max_norm: float,
        master: bool = False,
        offload: bool = False,
        ema_decay: float | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        """`master`, `offload` and `ema_decay` as in `LocalAdamW`; `scaler`: what float16 losses are scaled by."""
        self._parameters = trained_parameters(named_parameters)
        self._collectives = collectives
        self._max_norm = max_norm
        self._scaler = scaler or NoLossScaler()
        self._arrived: dict[str, Tensor] = {}
        self._blocks = {name: local(parameter.detach()) for name, parameter in self._parameters.items()}
        self._adamw = LocalAdamW(
            {name: block for name, block in self._blocks.items() if block.numel()},
            betas=betas,
            epsilon=epsilon,
            weight_decay=weight_decay,
            master=master,
            offload=offload,
            ema_decay=ema_decay,
        )

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch, summed over the ranks; every rank must call it as often.

        They are summed at once, also before the `last`: what is kept between two of them is a block, not the whole.
        """
        self._scaler.scaled(loss).backward()

    def step(self, learning_rate: float) -> StepOutcome:
        """Clip by the norm over all ranks, update, clear the gradients; all ranks or none.

        Raises:
            NumericsError: float16 overflows at the smallest loss scale.
        """
        assert 0 <= learning_rate < math.inf, f"learning rate {learning_rate}"
        gradients = {name: self._gradient(name) for name in self._blocks}
        scale = self._scaler.scale
        self._scaler.unscale(gradients.values())
        norm = self._norm(gradients)
        applied = math.isfinite(norm)  # of a sum that has the same bits on every rank
        if applied:
            clip(gradients.values(), norm, self._max_norm)
            self._adamw.update(gradients, learning_rate)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._scaler.update(finite=applied)
        return StepOutcome(norm, applied, scale)

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's blocks of what `LocalAdamW` keeps, and "loss_scale" where there is a scaler."""
        return self._adamw.state_tensors() | self._scaler.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back blocks that `state_tensors` gave on this rank."""
        self._adamw.load_state_tensors({name: tensor for name, tensor in tensors.items() if name != KEY})
        self._scaler.load_state_tensors(tensors)

    def shards(self) -> list[Shard]:
        """Return this rank's blocks of the state; a block that several ranks hold comes from the lowest of them."""
        shards: list[Shard] = []
        for key, tensor in self._adamw.state_tensors().items():
            kind, _, name = key.partition("/")
            parameter = self._parameters[name]
            start = start_of(parameter)
            if not is_first_copy(parameter, self._collectives.rank):
                continue
            if kind != "step":
                shards.append(Shard(key, tuple(parameter.shape), start, tensor.contiguous()))
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
            parameter = self._parameters[name]
            shape, start = (tuple(parameter.shape), start_of(parameter)) if kind != "step" else ((), ())
            requests.append(ShardRequest(key, shape, tensor.dtype, start, tuple(tensor.shape)))
        return sorted(requests, key=lambda each: not is_optional(each.name))

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Take one block, in the order of `shard_requests`; load the state once all required ones have come."""
        del start
        self._arrived[name] = tensor
        needed = {key for key in self.state_tensors() if not is_optional(key)}
        if needed <= self._arrived.keys():
            self.load_state_tensors(self._arrived)
            self._arrived = {}

    def _gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        return torch.zeros_like(self._blocks[name]) if gradient is None else local(gradient)

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """L2 norm of the whole gradient: blocks that several ranks hold count once."""
        squares = torch.zeros((), dtype=torch.float64)
        for name, gradient in gradients.items():
            own = squared_norm(gradient)
            if not bool(own.isfinite()):  # squares of finite numbers above 1e19 overflow float32
                own = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            squares += own.to("cpu") / num_copies(self._parameters[name], self._collectives.world_size)
        return math.sqrt(value) if (value := float(self._collectives.sum(squares))) == value else math.nan
