"""The trainer's end of vLLM's weight transfer between GPUs: CUDA IPC and NCCL."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (vLLM is an optional extra)

from __future__ import annotations

from math import prod

from rft_engine.vllm_transport import Sender, SourceView, SyncClient, free_port

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
