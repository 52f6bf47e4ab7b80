"""Ways for new weights to reach a running vLLM; none of them reads the model directory again.

- direct: the policy's own tensors, for a vLLM in this process on one device;
- file: a file in shared memory, which the engine's workers map; works everywhere;
- ipc: CUDA handles of the policy's tensors, for a process on the same GPU;
- nccl: broadcast to a process on other GPUs of this host.

All four end in vLLM's own layer-wise reload, which repacks, fuses, cuts and rounds each layer as
it did at the start and copies the result into the memory that kernels and CUDA graphs refer to.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_core.errors import OptionsError
from rft_engine.engine_base import EngineFacts
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.vllm.cuda_ipc import encode_update
from rft_engine.weight_sync.file_transport import FileTransport, Workers, torch_dtype
from rft_engine.weight_sync.fingerprints import Fingerprint, WeightSource


class Sender(Protocol):
    """The trainer's end of vLLM's weight transfer."""

    def send_weights(self) -> None: ...


SenderFactory = Callable[[str, "SyncClient", "SourceView", int], Sender]
"""Transport, client, source, number of workers -> the trainer's end; see `open_sender`."""


def resolve_transport(settings: ExternalEngineSettings, *, is_cpu: bool, in_process: bool) -> str:
    """Return the transport that `settings` select on this device and process.

    Raises:
        OptionsError: one that cannot work here.
    """
    many = settings.tensor_parallel_size > 1
    if settings.transport == "auto":
        if in_process:
            return "file" if many else "direct"
        return "file" if is_cpu or many else "ipc"
    if settings.transport == "direct" and (not in_process or many):
        raise _refusal("direct", "tensors of this process cannot be handed to another process", "file")
    if settings.transport in ("ipc", "nccl") and in_process:
        raise _refusal(settings.transport, "the engine in this process reads the policy's tensors directly", "direct")
    if settings.transport == "ipc" and many:
        raise _refusal("ipc", "a CUDA handle is valid only on its tensor's GPU, and the workers use others", "file")
    return settings.transport


class WeightTransport:
    """Sends the tensors of one source to one engine."""

    def __init__(
        self,
        settings: ExternalEngineSettings,
        facts: EngineFacts,
        source: WeightSource,
        workers: Workers,
        make_sender: SenderFactory | None = None,
    ) -> None:
        self._facts, self._source, self._workers = facts, source, workers
        self._seconds, self._dtype = settings.deadlines.load_weights, torch_dtype(facts.dtype)
        self._file = FileTransport(source, workers, facts.dtype, self._seconds)
        self._num_workers = settings.tensor_parallel_size
        self._make_sender = make_sender
        self._sender: Sender | None = None

    def send(self) -> list[Fingerprint]:
        """Send everything; return the fingerprint that each worker received, an empty list where none is reported.

        Raises:
            ServiceError: the source is not complete.
            StorageError: no room for the file.
        """
        if self._facts.transport == "direct":
            # all of it is asked for first: vLLM does not recover from an error in the middle
            tensors = list(self._source.tensors(self._dtype))
            self._workers.rpc("rft_load_tensors", [tensors], self._seconds)
            return []
        if self._facts.transport == "file":
            return self._file.send()
        if self._sender is None:
            assert self._make_sender is not None, "a transport over GPUs needs vLLM on the trainer's side"
            # made with the first update and kept: to join the workers is an exchange with all of them
            client = SyncClient(self._workers, self._seconds)
            view = SourceView(self._source, self._dtype)
            self._sender = self._make_sender(self._facts.transport, client, view, self._num_workers)
        self._sender.send_weights()
        return []


class SyncClient:
    """The four calls by which vLLM's trainer side drives its workers, over our own channel."""

    def __init__(self, workers: Workers, seconds: float) -> None:
        self._workers, self._seconds = workers, seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._workers.rpc("init_weight_transfer_engine", [init_info], self._seconds)

    def start_weight_update(self) -> None:
        self._workers.rpc("start_weight_update", [], self._seconds)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._workers.rpc("rft_update_weights", [encode_update(update_info)], self._seconds)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._workers.rpc("finish_weight_update", [], self._seconds)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Name, dtype and shape of a tensor, which vLLM needs before the tensor itself."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SourceView:
    """A `WeightSource` as vLLM's trainer side wants one: iterable again and again, described beforehand."""

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._facts: list[TensorFacts] = []

    def metadata(self) -> list[TensorFacts]:
        """One entry a tensor in order; the first call goes through the tensors once."""
        if not self._facts:
            for name, tensor in self._source.tensors(self._dtype):
                self._facts.append(TensorFacts(name, tensor.dtype, tuple(tensor.shape)))
        return self._facts

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._source.tensors(self._dtype)


def free_port() -> int:
    """Return a TCP port of this host on which no process listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _refusal(name: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(
        code="engine.vllm.transport",
        what=f"transport = {name!r}",
        where="vLLM engine (transport)",
        why=why,
        state="nothing was started",
        do=f'transport="{remedy}"',
    )


# (vLLM is an optional extra)


_LEAST_BUFFER_BYTES = 2**29


def open_sender(transport: str, client: SyncClient, source: SourceView, num_workers: int) -> Sender:
    """Join the workers and return the sender; this process is rank 0 of the transfer, the workers follow it."""
    if transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        # one buffer is shared and filled again and again: it must hold the largest tensor whole
        largest = max(prod(tensor.shape) * tensor.dtype.itemsize for tensor in source.metadata())
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(largest, _LEAST_BUFFER_BYTES))
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    nccl = NCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=free_port(), world_size=1 + num_workers, packed=True
    )
    return NCCLTrainerWeightTransferEngine.trainer_init(nccl, client=client, source=source)
