"""LoRA adapters sent to a vLLM that holds the base weights: megabytes in place of all weights.

They are written as peft's directory into shared memory, and every worker loads it in the place of the one before.
vLLM adds their products to those of its matrices, so that these are never touched. The tensors that a worker read are
compared with those that were sent; the probe after every load checks that it computes with them.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (vLLM is an optional extra)

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.weight_sync.file_transport import Workers
from rft_engine.weight_sync.fingerprints import Fingerprint, WeightProvider, element_digest
from rft_engine.weight_sync.weight_file import shared_directory, write_weight_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter of another takes the next."""
_NUMBER = 1
_METHOD = "rft_load_adapter"


class AdapterSource:
    """The provider's adapters under peft's names of files, with digests of what was sent."""

    def __init__(self, provider: WeightProvider) -> None:
        self._provider = provider
        self.sent: Fingerprint = {}
        self.shapes: dict[str, list[int]] = {}
        """Of the model's own tensors that were sent: none."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in float32."""
        self.sent = {}
        for name, tensor in self._provider():
            value = tensor.detach().to(torch.float32)
            self.sent[name] = element_digest(value, value.shape, torch.float32)
            yield name, value


class AdapterTransport:
    """Sends the adapters of an `AdapterSource`."""

    def __init__(self, settings: ExternalEngineSettings, source: AdapterSource, workers: Workers) -> None:
        self._settings, self._source, self._workers = settings, source, workers

    def send(self) -> list[Fingerprint]:
        """Send the adapters; return the fingerprint of the tensors that each worker read.

        Raises:
            StorageError: no room for the files.
        """
        # all at once, because their size decides where the folder goes; adapters are small
        tensors = list(self._source.tensors())
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        folder = Path(tempfile.mkdtemp(prefix="rft-adapter-", dir=shared_directory(2 * size)))
        try:
            (folder / CONFIG).write_text(self._settings.adapter_config, encoding="utf-8")
            write_weight_file(folder / WEIGHTS, iter(tensors), 2 * len(tensors))
            return self._workers.rpc(_METHOD, [str(folder)], self._settings.deadlines.load_weights)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def loads_adapter(method: str) -> bool:
    """Return True when this method of the workers loads adapters."""
    return method == _METHOD


def adapter_arguments(settings: ExternalEngineSettings) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that make room for one adapter; nothing where there is none."""
    if not settings.adapter_config:
        return {}
    rank = int(json.loads(settings.adapter_config)["r"])
    # one slot is enough: each load takes the place of the one before
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(size for size in RANKS if size >= rank)}


def adapter_request(folder: str, *, replaces: bool) -> Any:
    """vLLM's name for the adapter; `replaces`: load it in the place of the one before."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("rft", _NUMBER, folder, load_inplace=replaces)
