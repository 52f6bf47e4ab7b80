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
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from rft_algos.errors import PeerError
from rft_dist.adamw import LocalAdamW, StepOutcome, nothing_to_train, total_norm
from rft_dist.collectives import Collectives
from rft_dist.tensor_bytes import tensor_bytes

_BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Bucket:
    dtype: torch.dtype
    parameters: tuple[Parameter, ...]


class ReplicatedOptimizer:
    """AdamW over parameters of which every rank holds a full copy.

    Example::

        optimizer = ReplicatedOptimizer(model.named_parameters(), SingleProcess(), betas=(0.9, 0.999),
                                        epsilon=1e-8, weight_decay=0.0, max_norm=1.0)
        for batch in micro_batches:
            optimizer.backward(loss_of(batch))
        outcome = optimizer.step(learning_rate=1e-6)

    Parameters that require no gradient are left out. Raises OptionsError where none requires one,
    and PeerError where the parameters differ between the ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        collectives: Collectives,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        max_norm: float,
        bucket_bytes: int = _BUCKET_BYTES,
        master: bool = False,
        offload: bool = False,
    ) -> None:
        """`master` and `offload` as in `LocalAdamW`."""
        everything = dict(named_parameters)
        self._parameters = {name: everything[name] for name in sorted(everything) if everything[name].requires_grad}
        if not self._parameters:
            raise nothing_to_train(len(everything))
        self._collectives = collectives
        self._max_norm = max_norm
        self._buckets = _cut_into_buckets(self._parameters.values(), bucket_bytes)
        verify_equal_weights(self._parameters.items(), collectives)
        self._adamw = LocalAdamW(
            self._parameters,
            betas=betas,
            epsilon=epsilon,
            weight_decay=weight_decay,
            master=master,
            offload=offload,
        )

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch; nothing is exchanged, also by the last."""
        loss.backward()

    def step(self, learning_rate: float) -> StepOutcome:
        """Sum the gradients over ranks, clip, update; gradients are cleared either way.

        Every rank must call it, also one that had no micro-batch. A parameter that no micro-batch
        of any rank touched has gradient zero: its moments decay. Where the norm is not finite on
        any rank, no rank updates. `learning_rate` is finite and at least 0.
        """
        assert 0 <= learning_rate < math.inf, f"learning rate {learning_rate}"
        self._sum_gradients()
        gradients = {name: _gradient(parameter) for name, parameter in self._parameters.items()}
        norm = total_norm(list(gradients.values()))
        applied = self._finite_everywhere(norm)
        if applied:
            if 0 < self._max_norm < norm:
                for gradient in gradients.values():
                    gradient.mul_(self._max_norm / norm)
            self._adamw.update(gradients, learning_rate)
        for parameter in self._parameters.values():
            parameter.grad = None
        return StepOutcome(norm, applied)

    def state_tensors(self) -> dict[str, Tensor]:
        """ "exp_avg/<name>", "exp_avg_sq/<name>" and "step/<name>" of every trained parameter, see `LocalAdamW`."""
        return self._adamw.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave, bit for bit; the next step equals the uninterrupted one.

        Raises CheckpointError, and changes nothing, for missing or unexpected names, another
        shape or another dtype.
        """
        self._adamw.load_state_tensors(tensors)

    def weights_hash(self) -> str:
        """SHA-256 of the trained parameters (`weights_hash`)."""
        return weights_hash(self._parameters.items())

    def _sum_gradients(self) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._collectives.world_size == 1:
            return
        for bucket in self._buckets:
            flat = torch.cat([_gradient(parameter).to(bucket.dtype).reshape(-1) for parameter in bucket.parameters])
            self._collectives.sum_in_place(flat)
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, piece in zip(bucket.parameters, flat.split(sizes), strict=True):
                _gradient(parameter).copy_(piece.view(parameter.shape))

    def _finite_everywhere(self, norm: float) -> bool:
        # The sums are equal on all ranks, and so is the norm; the exchange covers a rank whose
        # memory or arithmetic is at fault, since ranks that disagree here never agree again.
        refused = torch.tensor([0 if math.isfinite(norm) else 1], dtype=torch.int64)
        return int(self._collectives.max(refused).item()) == 0


def weights_hash(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256, in hexadecimal, over name, dtype, shape and bytes of every tensor, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda entry: entry[0]):
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def verify_equal_weights(named_tensors: Iterable[tuple[str, Tensor]], collectives: Collectives) -> None:
    """PeerError, on every rank, naming the ranks whose tensors differ from those of rank 0."""
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


def broadcast_weights(named_tensors: Iterable[tuple[str, Tensor]], collectives: Collectives) -> None:
    """Replace the tensors of every rank by those of rank 0, in name order."""
    for _, tensor in sorted(named_tensors, key=lambda entry: entry[0]):
        values = tensor.detach().contiguous()
        collectives.broadcast_in_place(values)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)


def _cut_into_buckets(parameters: Iterable[Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Runs of parameters of one reduction dtype and device, each of at most `bucket_bytes` or one parameter."""
    buckets: list[_Bucket] = []
    current: list[Parameter] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * _reduction_dtype(parameter).itemsize
        same = bool(current) and _kind(current[0]) == _kind(parameter)
        if current and (not same or size + num_bytes > bucket_bytes):
            buckets.append(_Bucket(_reduction_dtype(current[0]), tuple(current)))
            current, size = [], 0
        current.append(parameter)
        size += num_bytes
    buckets.append(_Bucket(_reduction_dtype(current[0]), tuple(current)))
    return buckets


def _kind(parameter: Parameter) -> tuple[torch.dtype, torch.device]:
    return _reduction_dtype(parameter), parameter.device


def _reduction_dtype(parameter: Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
