"""vLLM behind the methods of the native engine: in this process (`VllmEngine`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rft_core.errors import ServiceError
from rft_engine.process.backend_engine import Backend, BackendEngine
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.vllm.local import LocalVllm
from rft_engine.vllm.lora import AdapterSource, AdapterTransport
from rft_engine.vllm.media import plain_media
from rft_engine.vllm.runtime import InstalledVllm, VllmRuntime
from rft_engine.vllm.weight_transport import SenderFactory, WeightTransport
from rft_engine.weight_sync.file_transport import Transport
from rft_engine.weight_sync.fingerprints import WeightProvider, WeightSource


class VllmEngine(BackendEngine):
    """Samples from a copy of the policy that vLLM holds in this process.

    A sample's tokens depend on its prompt, its key and the options only, and are those that the
    native engine draws under the same key, up to rounding. A call that passes its deadline is
    given up between two steps; a step that hangs inside vLLM can be ended in `VllmProcessEngine`
    only. One owner at a time.

    Example::

        engine = VllmEngine(VllmSettings(model_dir=path, max_rows=64, max_len=512), policy.named_tensors)
        engine.load_weights(1)
        [samples] = engine.generate([[5, 6, 7]], [[11, 12]], SamplingOptions(temperature=1.0, max_new_tokens=32))
    """

    def __init__(
        self, settings: ExternalEngineSettings, weights: WeightProvider, *, runtime: VllmRuntime | None = None
    ) -> None:
        """Start vLLM on the model directory.

        Args:
            settings: the model directory, sizes, and how vLLM is to run.
            weights: called at every `load_weights`: the policy's present tensors, whole, under their
                checkpoint names; with `adapter_config` its adapters, under peft's.
            runtime: vLLM, or a double of it.

        Raises:
            OptionsError: a setting that is out of range or that this build of vLLM cannot carry out.
            PreflightError: vLLM is missing or of another release.
        """
        self._runtime, self._weights = runtime, weight_source(settings, weights)
        super().__init__(settings, self._weights)

    def _start(self) -> Backend:
        return LocalVllm(self._settings, self._runtime or InstalledVllm(), in_process=True)

    def _make_transport(self) -> Transport:
        return weight_transport(self._settings, self._weights, self._backend)

    def _plain_media(
        self, prompts: Sequence[Sequence[int]], media: Sequence[object | None] | None
    ) -> list[dict[str, Any] | None]:
        return plain_media(prompts, media)

    def _backend_sleep(self, level: int) -> None:
        check_sleep(self._settings, self._backend, level)
        super()._backend_sleep(level)


def weight_source(settings: ExternalEngineSettings, weights: WeightProvider) -> AdapterSource | WeightSource:
    """Return the source of updates: adapters alone where the settings have their configuration, else all weights."""
    return AdapterSource(weights) if settings.adapter_config else WeightSource(weights, settings.model_dir)


def weight_transport(
    settings: ExternalEngineSettings,
    source: AdapterSource | WeightSource,
    backend: Backend,
    make_sender: SenderFactory | None = None,
) -> Transport:
    """Return the way for the tensors of `source` into a started vLLM."""
    if settings.adapter_config:
        assert isinstance(source, AdapterSource)
        return AdapterTransport(settings, source, backend)
    assert isinstance(source, WeightSource)
    return WeightTransport(settings, backend.facts, source, backend, make_sender)


def check_sleep(settings: ExternalEngineSettings, backend: Backend, level: int) -> None:
    """Raise `ServiceError` for a vLLM on a GPU that was started without `enable_sleep`."""
    if not settings.enable_sleep and not backend.facts.is_cpu:
        raise _sleep_not_enabled(level)


def _sleep_not_enabled(level: int) -> ServiceError:
    return ServiceError(
        code="engine.vllm.sleep",
        what=f"sleep(level={level}) without enable_sleep",
        where="vLLM engine",
        why="vLLM must allocate in a pool that it can give back, which is decided when it starts",
        state="the engine is awake and unchanged",
        do="VllmSettings(enable_sleep=True)",
    )
