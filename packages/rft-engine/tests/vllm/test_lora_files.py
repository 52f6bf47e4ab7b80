"""The files of adapters on their way to vLLM: their room, what is written, and the request that names them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_engine.process.settings import EngineDeadlines
from rft_engine.vllm import lora
from rft_engine.vllm.lora import (
    AdapterSource,
    AdapterTransport,
    adapter_arguments,
    adapter_request,
    loads_adapter,
)
from rft_engine.vllm.settings import VllmSettings
from rft_engine.weight_sync.fingerprints import element_digest
from rft_engine.weight_sync.weight_file import read_weight_file

WEIGHT = torch.nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3))


def provider() -> Iterator[tuple[str, Tensor]]:
    yield "a", WEIGHT
    yield "b", torch.ones(4, dtype=torch.bfloat16)


def settings_of(config: str) -> VllmSettings:
    return VllmSettings(
        model_dir="x", max_rows=1, max_len=8, adapter_config=config, deadlines=EngineDeadlines(load_weights=9.0)
    )


def test_adapters_are_sent_in_float32_without_gradients() -> None:
    source = AdapterSource(provider)
    for _ in range(2):
        found = dict(source.tensors())
        assert {(tensor.dtype, tensor.requires_grad) for tensor in found.values()} == {(torch.float32, False)}
        assert found["a"].tolist() == WEIGHT.tolist()
        assert source.sent == {name: element_digest(value, value.shape, torch.float32) for name, value in found.items()}
    assert source.shapes == {}


@pytest.mark.parametrize("fails", [False, True])
def test_the_files_are_there_for_the_workers_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    room: list[int] = []
    asked: list[Any] = []
    expected: list[int] = []
    write = lora.write_weight_file

    def written(path: Path, tensors: Any, expected_tensors: int) -> int:
        expected.append(expected_tensors)
        return write(path, tensors, expected_tensors)

    class Workers:
        def rpc(self, method: str, arguments: Sequence[Any] = (), seconds: float | None = None) -> list[Any]:
            folder = Path(arguments[0])
            tensors = {
                name: tensor.tolist() for name, tensor in read_weight_file(folder / "adapter_model.safetensors").items()
            }
            asked.append((method, seconds, folder.parent, (folder / "adapter_config.json").read_text("utf-8"), tensors))
            assert len(arguments) == 1
            if fails:
                raise OSError("gone")
            return [{"a": "digest"}]

    monkeypatch.setattr(lora, "shared_directory", lambda size: (room.append(size), tmp_path)[1])
    monkeypatch.setattr(lora, "write_weight_file", written)
    config = json.dumps({"r": 4, "name": "é"}, ensure_ascii=False)
    transport = AdapterTransport(settings_of(config), AdapterSource(provider), Workers())
    if fails:
        with pytest.raises(OSError, match="gone"):
            transport.send()
    else:
        assert transport.send() == [{"a": "digest"}]
    assert asked == [("rft_load_adapter", 9.0, tmp_path, config, {"a": WEIGHT.tolist(), "b": [1.0] * 4})]
    assert (room, expected) == ([2 * (6 + 4) * 4], [4])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [1, 8, 16, 32, 64, 128, 256, 320, 512])
def test_an_adapter_takes_the_next_room_that_vllm_makes(room: int) -> None:
    below = max([size for size in (0, 1, 8, 16, 32, 64, 128, 256, 320) if size < room])
    for rank in (below + 1, room):
        assert adapter_arguments(settings_of(json.dumps({"r": rank}))) == {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": room,
        }
    assert adapter_arguments(settings_of("")) == {}


def test_only_the_load_of_adapters_is_one() -> None:
    assert loads_adapter("rft_load_adapter")
    assert not loads_adapter("rft_load_file")


@pytest.mark.parametrize("replaces", [True, False])
def test_every_adapter_has_the_same_name_and_number(monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
    module: Any = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda *given, **named: (given, named)
    for name, one in (("vllm", ModuleType("vllm")), ("vllm.lora", ModuleType("vllm.lora")), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, one)
    assert adapter_request("folder", replaces=replaces) == (("rft", 1, "folder"), {"load_inplace": replaces})
