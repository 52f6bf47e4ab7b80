"""Transports between GPUs: what vLLM's trainer side is made of, once, and the calls that its client makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_engine.engine_base import EngineFacts
from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm import weight_transport
from rft_engine.vllm.cuda_ipc import encode_update
from rft_engine.vllm.settings import VllmSettings
from rft_engine.vllm.weight_transport import SourceView, SyncClient, TensorFacts, WeightTransport, open_sender

PACKAGE = "vllm.distributed.weight_transfer"


class Source:
    """Two tensors; counts how often they are gone through."""

    num_bytes, num_tensors = 40, 2

    def __init__(self, largest: int = 6) -> None:
        self.largest = largest
        self.dtypes: list[torch.dtype] = []

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self.dtypes.append(dtype)
        yield "a", torch.zeros(3, dtype=dtype)
        yield "b", torch.zeros(1, dtype=dtype).expand(2, self.largest)


class Workers:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
        self.asked.append((method, list(arguments), seconds))
        return []


def transport_of(name: str, make_sender: Any = None) -> tuple[WeightTransport, Source, Workers]:
    settings = VllmSettings(
        model_dir="x", max_rows=1, max_len=8, tensor_parallel_size=2, deadlines=EngineDeadlines(load_weights=9.0)
    )
    source, workers = Source(), Workers()
    facts = EngineFacts("bfloat16", 5, False, name)
    return WeightTransport(settings, facts, source, workers, make_sender), source, workers  # type: ignore[arg-type]


def test_tensors_of_this_process_are_handed_over_together() -> None:
    transport, source, workers = transport_of("direct")
    assert transport.send() == []
    [(method, [tensors], seconds)] = workers.asked
    assert (method, seconds, source.dtypes) == ("rft_load_tensors", 9.0, [torch.bfloat16])
    assert [(name, tensor.dtype) for name, tensor in tensors] == [("a", torch.bfloat16), ("b", torch.bfloat16)]


@pytest.mark.parametrize("name", ["ipc", "nccl"])
def test_a_sender_is_made_with_the_first_update_and_kept(name: str) -> None:
    made: list[Any] = []
    sent: list[int] = []

    def make_sender(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(send_weights=lambda: sent.append(1))

    transport, source, workers = transport_of(name, make_sender)
    assert (transport.send(), transport.send()) == ([], [])
    [(kind, client, view, num_workers)] = made
    assert (kind, num_workers, sent) == (name, 2, [1, 1])
    assert [tensor.dtype for _, tensor in view] == [torch.bfloat16] * 2
    update = {"names": ["a"], "ipc_handles": [{"GPU-0": (torch.Tensor,)}]}
    client.init_weight_transfer_engine({"packed": True})
    client.start_weight_update()
    client.update_weights(update)
    client.finish_weight_update("3")
    assert workers.asked == [
        ("init_weight_transfer_engine", [{"packed": True}], 9.0),
        ("start_weight_update", [], 9.0),
        ("rft_update_weights", [encode_update(update)], 9.0),
        ("finish_weight_update", [], 9.0),
    ]
    assert source.dtypes == [torch.bfloat16]


def test_a_transport_between_gpus_needs_a_sender() -> None:
    with pytest.raises(AssertionError):
        transport_of("ipc")[0].send()


def test_tensors_are_described_once_and_gone_through_again_and_again() -> None:
    source = Source()
    view = SourceView(source, torch.float32)  # type: ignore[arg-type]
    wanted = [TensorFacts("a", torch.float32, (3,)), TensorFacts("b", torch.float32, (2, 6))]
    assert view.metadata() == wanted
    assert view.metadata() == wanted
    assert len(source.dtypes) == 1
    assert [name for name, _ in view] == [name for name, _ in view] == ["a", "b"]
    assert len(source.dtypes) == 3


@pytest.mark.parametrize(
    ("transport", "largest", "wanted"),
    [
        ("ipc", 6, {"rank": 0, "packed": True, "packed_buffer_size_bytes": 2**29}),
        ("ipc", 2**27, {"rank": 0, "packed": True, "packed_buffer_size_bytes": 2 * 2**27 * 4}),
        (
            "nccl",
            6,
            {"rank": 0, "master_address": "127.0.0.1", "master_port": 4321, "world_size": 4, "packed": True},
        ),
    ],
)
def test_the_trainer_is_rank_0_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch, transport: str, largest: int, wanted: dict[str, Any]
) -> None:
    for kind, name in (("ipc", "IPC"), ("nccl", "NCCL")):
        engine = SimpleNamespace(trainer_init=lambda info, kind=kind, **ends: (kind, info, ends))
        module = ModuleType(f"{PACKAGE}.{kind}_engine")
        setattr(module, f"{name}TrainerInitInfo", lambda **fields: fields)
        setattr(module, f"{name}TrainerWeightTransferEngine", engine)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.distributed", PACKAGE):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setattr(weight_transport, "free_port", lambda: 4321)
    client = SyncClient(Workers(), 9.0)
    view = SourceView(Source(largest), torch.float32)  # type: ignore[arg-type]
    found: Any = open_sender(transport, client, view, 3)
    assert found == (transport, wanted, {"client": client, "source": view})
