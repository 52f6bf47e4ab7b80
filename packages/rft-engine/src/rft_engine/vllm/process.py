"""vLLM in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rft_core.errors import RftError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.process.gpu_processes import Inventory, nvidia_inventory, visible_device
from rft_engine.process.process_engine import ProcessEngine
from rft_engine.process.settings import ExternalEngineSettings, engine_settings, make_log_folder
from rft_engine.vllm.cache_share import started_for_rows
from rft_engine.vllm.engine import check_sleep, weight_source, weight_transport
from rft_engine.vllm.media import plain_media
from rft_engine.vllm.out_of_memory import memory_error
from rft_engine.vllm.settings import VllmSettings
from rft_engine.vllm.weight_transport import SenderFactory, open_sender
from rft_engine.weight_sync.file_transport import Transport
from rft_engine.weight_sync.fingerprints import WeightProvider

_WORKER = (sys.executable, "-m", "rft_engine.vllm.worker")


class VllmProcessEngine(ProcessEngine):
    """Samples from a copy of the policy that vLLM holds in a process of its own; else as `VllmEngine`.

    Example::

        engine = VllmProcessEngine(VllmSettings(model_dir=path, max_rows=64, max_len=512), policy.named_tensors)
        engine.load_weights(1)
        [samples] = engine.generate([[5, 6, 7]], [[11, 12]], SamplingOptions(temperature=1.0, max_new_tokens=32))
    """

    def __init__(
        self,
        settings: ExternalEngineSettings,
        weights: WeightProvider,
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        command: Sequence[str] = _WORKER,
        max_restarts: int = 3,
        make_sender: SenderFactory | None = None,
    ) -> None:
        """Start vLLM in a process of its own.

        Args:
            settings, weights: as for `VllmEngine`.
            environment, log_path, command, max_restarts: as for `ProcessEngine`.
            make_sender: the trainer's end of transports between GPUs; None = vLLM's own.
        """
        self._weights, self._make_sender = weight_source(settings, weights), make_sender
        super().__init__(
            settings,
            self._weights,
            environment=environment,
            log_path=log_path,
            command=command,
            max_restarts=max_restarts,
        )

    def _explain(self, log: str) -> RftError | None:
        return memory_error(self._settings, log, nvidia_inventory)

    def _make_transport(self) -> Transport:
        transport = self._backend.facts.transport
        # through a file nothing of vLLM is needed in this process
        make_sender = self._make_sender or (open_sender if transport in ("ipc", "nccl") else None)
        return weight_transport(self._settings, self._weights, self._backend, make_sender)

    def _plain_media(
        self, prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None
    ) -> list[dict[str, Any] | None]:
        return plain_media(prompts, media)

    def _backend_sleep(self, level: int) -> None:
        check_sleep(self._settings, self._backend, level)
        super()._backend_sleep(level)


def build(request: EngineBuildRequest, inventory: Inventory = nvidia_inventory) -> VllmProcessEngine:
    """Start the engine of a build request in a process of its own."""
    make_log_folder(request)
    settings = engine_settings(VllmSettings, request)

    def make(chosen: VllmSettings) -> VllmProcessEngine:
        return VllmProcessEngine(chosen, request.weights, environment=request.environment, log_path=request.log_path)

    is_cuda = torch.device(request.device).type == "cuda"
    # a GPU of its own is the first that its process sees
    device = visible_device(inventory(), 0, {**os.environ, **request.environment}) if is_cuda else None
    return started_for_rows(make, settings, device)
