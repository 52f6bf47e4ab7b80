"""SGLang behind the methods of the native engine. Written after the source of SGLang 0.5.21; not yet run on a GPU.

SGLang needs processes of its own and ends them all when one fails, so it lives in a worker process
(`sglang.worker`). Deadlines, restarts, digests and versions are those of the vLLM engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import RftError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.process.gpu_processes import nvidia_inventory
from rft_engine.process.memory_share import started
from rft_engine.process.process_engine import ProcessEngine
from rft_engine.process.requests import Answers, GenerateCall, StepCounts
from rft_engine.process.settings import engine_settings, make_log_folder
from rft_engine.sglang.settings import START_REMEDY, SglangSettings, check_options, end_tokens, refusal
from rft_engine.weight_sync.file_transport import FileTransport, Transport
from rft_engine.weight_sync.fingerprints import WeightProvider, WeightSource

_MEMORY = re.compile(
    r"CUDA out of memory[^\n]*|Not enough memory[^\n]*|Cannot allocate memory|can't allocate memory[^\n]*"
)
"""What SGLang, torch and the system say of a start without memory."""
_WORKER = (sys.executable, "-m", "rft_engine.sglang.worker")


class SglangEngine(ProcessEngine):
    """Samples from a copy of the policy that SGLang holds in a process of its own.

    A sample's tokens depend on its prompt, its key, the weights and the options only. They are SGLang's own draws:
    another engine draws others under the same key. `sglang.settings` lists what is refused, and why.

    Example::

        engine = SglangEngine(SglangSettings(model_dir=path, max_rows=64, max_len=512), policy.named_tensors)
        engine.load_weights(1)
        [samples] = engine.generate([[5, 6, 7]], [[11, 12]], SamplingOptions(temperature=1.0, max_new_tokens=32))
    """

    def __init__(
        self,
        settings: SglangSettings,
        weights: WeightProvider,
        *,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        command: Sequence[str] = _WORKER,
        max_restarts: int = 3,
    ) -> None:
        """Start SGLang in a process of its own; arguments as for `ProcessEngine`.

        Raises:
            OptionsError: a setting that SGLang cannot carry out.
            PreflightError: SGLang is missing or of another release.
        """
        self._ends = end_tokens(settings.model_dir)
        self._weights = WeightSource(weights, settings.model_dir)
        super().__init__(
            settings,
            self._weights,
            environment=environment,
            log_path=log_path,
            command=command,
            max_restarts=max_restarts,
        )

    def _explain(self, log: str) -> RftError | None:
        # its processes end one another, so that often the log alone says why
        if not (found := _MEMORY.search(log)):
            return None
        return self._settings.not_started(RuntimeError(found[0]), START_REMEDY, nvidia_inventory)

    def _make_transport(self) -> Transport:
        facts = self._backend.facts
        return FileTransport(self._weights, self._backend, facts.dtype, self._settings.deadlines.load_weights)

    def _plain_media(
        self, prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None
    ) -> list[dict[str, Any] | None]:
        if media is not None and any(one is not None for one in media):
            why = "SGLang is given token ids only"
            raise refusal("images", "prompts with images", why, "--engine_type native or vllm")
        return []

    def _collect(self, call: GenerateCall, answers: Answers) -> StepCounts:
        """Refuse what SGLang cannot draw, then ask for it."""
        if call.constraint is not None:
            why = "SGLang draws the tokens itself, and its own grammars do not support a token trie"
            raise refusal("constraint", "generation within a token trie", why, "--engine_type native or vllm")
        check_options(SamplingOptions.from_fields(call.options), self._ends)
        return super()._collect(call, answers)

    def _backend_sleep(self, level: int) -> None:
        if not self._settings.enable_sleep:
            why = "SGLang must allocate in a pool that it can give back, which is decided when it starts"
            raise refusal("sleep", f"sleep(level={level}) without enable_sleep", why, "enable_sleep=True")
        super()._backend_sleep(level)


def build(request: EngineBuildRequest) -> SglangEngine:
    """Start the engine of a build request in a process of its own."""
    make_log_folder(request)
    settings = engine_settings(SglangSettings, request)
    return started(
        lambda chosen: SglangEngine(
            chosen, request.weights, environment=request.environment, log_path=request.log_path
        ),
        settings,
    )
