"""Weights on their way: files, digests, CUDA handles as data, and the transports between GPUs on a double."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, fake_tensors, write_fake_model

from rft_core.errors import OptionsError, StorageError
from rft_engine.vllm import weight_transport
from rft_engine.vllm.cuda_ipc import decode, encode
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.settings import VllmSettings
from rft_engine.vllm.weight_transport import SyncClient, WeightTransport, resolve_transport
from rft_engine.weight_sync import weight_file
from rft_engine.weight_sync.fingerprints import WeightSource, element_digest
from rft_engine.weight_sync.fused_parameters import find_parameters
from rft_engine.weight_sync.weight_file import read_header, read_weight_file, shared_directory, write_weight_file


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(7).to(torch.bfloat16),
        "after_odd": torch.randn(3, 4),
        "turned": torch.randn(4, 3).T,
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3.5),
        "codes": torch.arange(5, dtype=torch.uint8),
    }
    path = tmp_path / "weights"
    num_bytes = write_weight_file(path, tensors.items())
    back = read_weight_file(path)
    path.unlink()
    assert num_bytes == 14 + 48 + 48 + 0 + 4 + 5
    assert {name: tensor.dtype for name, tensor in back.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_layout_is_that_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weight_file(path, iter([("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([[3]], dtype=torch.int64))]))
    data = path.read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + length]) == {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "I64", "shape": [1, 1], "data_offsets": [8, 16]},
    }
    assert data[8 + length :] == struct.pack("<ffq", 1.0, 2.0, 3)
    assert list(read_header(path)) == ["a", "b"]


def test_full_memory_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_file.os, "posix_fallocate", full)
    with pytest.raises(StorageError) as caught:
        write_weight_file(tmp_path / "weights", iter([("a", torch.zeros(4))]))
    assert caught.value.problem.code == "engine.weights.no_room"
    assert "TMPDIR" in caught.value.problem.do


def test_weights_that_do_not_fit_into_shared_memory_go_to_the_temporary_directory() -> None:
    assert shared_directory(2**62).parent != Path("/dev/shm")


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_a_digest_tells_where_it_looks_shapes_and_dtypes_apart(place: int) -> None:
    tensor = torch.randn(100, 101)
    same = element_digest(tensor, tensor.shape, torch.float32)
    assert element_digest(tensor.clone(), tensor.shape, torch.float32) == same
    assert element_digest(tensor, (101, 100), torch.float32) != same
    assert element_digest(tensor, tensor.shape, torch.bfloat16) != same
    assert element_digest(tensor.to(torch.bfloat16), tensor.shape, torch.bfloat16) == element_digest(
        tensor, tensor.shape, torch.bfloat16
    )
    moved = tensor + 1e-3 * (1 + tensor.abs())
    moved.view(-1)[place] += 1.0
    assert element_digest(moved, tensor.shape, torch.float32) != same


def test_rows_of_fused_and_padded_parameters_are_found() -> None:
    class Model:
        def __init__(self) -> None:
            self.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

        def named_parameters(self):
            yield "a.qkv_proj.weight", torch.arange(8.0).reshape(8, 1)
            yield "embed.weight", torch.arange(6.0).reshape(6, 1)
            yield "repacked.weight", torch.zeros(0)

    shapes = {
        "a.q_proj.weight": [4, 1],
        "a.k_proj.weight": [2, 1],
        "a.v_proj.weight": [2, 1],
        "embed.weight": [5, 1],
        "repacked.weight": [3, 1],
        "absent.weight": [1],
    }

    def rows(name: str) -> Any:
        tensor = find_parameters(Model(), shapes).get(name)
        return None if tensor is None else tensor.flatten().tolist()

    assert rows("a.q_proj.weight") == [0, 1, 2, 3]
    assert rows("a.k_proj.weight") == [4, 5]
    assert rows("a.v_proj.weight") == [6, 7]
    assert rows("embed.weight") == [0, 1, 2, 3, 4]
    assert rows("repacked.weight") is None
    assert rows("absent.weight") is None


def test_handles_pass_through_json_and_nothing_else_does() -> None:
    handle = (
        torch.Tensor,
        torch.Size([2, 3]),
        (3, 1),
        0,
        torch.UntypedStorage,
        torch.bfloat16,
        0,
        b"\x00\xff handle",
        4096,
        128,
        False,
        b"",
        7,
        b"event",
        True,
        None,
    )
    update = [{"GPU-1234": handle}, {"GPU-1234": handle}]
    assert decode(json.loads(json.dumps(encode(update)))) == update
    with pytest.raises(AssertionError, match="not among the values"):
        encode({"GPU-1234": (print,)})
    with pytest.raises(KeyError):
        decode({"class": "os.system"})
    with pytest.raises(AssertionError, match="not a dtype"):
        decode({"dtype": "load"})


class FakeSender:
    """The trainer's side of a transfer: the four calls in vLLM's order, with bytes in the place of handles."""

    def __init__(self, transport: str, client: SyncClient, source: Any, num_workers: int) -> None:
        self.client, self.source, self.num_workers = client, source, num_workers
        client.init_weight_transfer_engine({"packed": True})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        metadata = self.source.metadata()
        pairs = list(self.source)
        assert [(m.name, m.dtype, m.shape) for m in metadata] == [(n, t.dtype, tuple(t.shape)) for n, t in pairs]
        handles = [
            {"GPU-0": (torch.Tensor, t.shape, t.dtype, bytes(t.contiguous().flatten().view(torch.uint8).tolist()))}
            for _, t in pairs
        ]
        self.client.update_weights({"names": [m.name for m in metadata], "ipc_handles": handles})
        self.client.finish_weight_update()


def test_between_gpus_the_lifecycle_of_vllms_transfer_is_kept(tmp_path: Path) -> None:
    path = write_fake_model(tmp_path / "model")
    settings = VllmSettings(model_dir=path, max_rows=2, max_len=16)
    runtime = FakeVllm(is_cpu=False)
    local = LocalVllm(settings, runtime, in_process=False)
    assert local.facts.transport == "ipc"
    assert runtime.llm is not None
    assert runtime.llm.arguments["weight_transfer_backend"] == "ipc"
    wanted = fake_tensors(5)
    source = WeightSource(lambda: wanted.items(), path)
    transport = WeightTransport(settings, local.facts, source, local, FakeSender)
    transport.send()
    transport.send()
    [worker] = runtime.llm.workers
    assert worker.transfers == ["init ['packed']", *["start", "update", "finish"] * 2]
    assert all(torch.equal(worker.model.view(name), tensor) for name, tensor in wanted.items())
    assert worker.rft_fingerprints(source.shapes) == source.sent


@pytest.mark.parametrize(
    ("asked", "is_cpu", "in_process", "parallel", "wanted"),
    [
        ("auto", True, True, 1, "direct"),
        ("auto", False, True, 1, "direct"),
        ("auto", False, True, 2, "file"),
        ("auto", True, False, 1, "file"),
        ("auto", False, False, 1, "ipc"),
        ("auto", False, False, 4, "file"),
        ("nccl", False, False, 4, "nccl"),
        ("file", False, True, 1, "file"),
        ("direct", True, False, 1, None),
        ("direct", False, True, 2, None),
        ("ipc", False, True, 1, None),
        ("ipc", False, False, 2, None),
    ],
)
def test_a_transport_is_chosen_by_where_the_engine_is(asked, is_cpu, in_process, parallel, wanted) -> None:
    settings = VllmSettings(model_dir="x", max_rows=1, max_len=8, transport=asked, tensor_parallel_size=parallel)
    if wanted is None:
        with pytest.raises(OptionsError) as caught:
            resolve_transport(settings, is_cpu=is_cpu, in_process=in_process)
        assert caught.value.problem.do in {'transport="file"', 'transport="direct"'}
    else:
        assert resolve_transport(settings, is_cpu=is_cpu, in_process=in_process) == wanted


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        WeightSource(lambda: [], tmp_path)
    assert caught.value.problem.code == "engine.model_dir"


def test_a_free_port_can_be_listened_on() -> None:
    import socket

    port = weight_transport.free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        assert sock.getsockname()[1] == port
        assert weight_transport.free_port() != port, "it is taken"
