"""Protocols of the part of SGLang's interface that is used, and the installed SGLang behind them.

Everything else in this package calls these protocols, so that the adapter is tested with a
double (`fake_sglang`) where no SGLang is installed. It has not yet run on a GPU.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (SGLang is an optional extra)

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from rft_core.errors import PreflightError, install_command
from rft_engine.sglang.pinned_api import version
from rft_engine.sglang.settings import set_environment


class Requests(Protocol):
    """The part of `sglang.Engine(...).tokenizer_manager` that is used."""

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None: ...


class SglangRoot(Protocol):
    """`sglang.Engine`: its coroutines run on its own loop, everything else is a plain call."""

    loop: asyncio.AbstractEventLoop

    @property
    def tokenizer_manager(self) -> Requests: ...

    async def async_generate(
        self,
        *,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        return_logprob: bool,
        top_logprobs_num: int,
    ) -> dict[str, Any]: ...

    def begin_weight_update(self) -> tuple[bool, str]: ...

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]: ...

    def end_weight_update(self) -> tuple[bool, str]: ...

    def flush_cache(self) -> Any: ...

    def release_memory_occupation(self, tags: list[str] | None = None) -> None: ...

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None: ...

    def shutdown(self) -> None: ...


class SglangRuntime(Protocol):
    """Calls needed of an installed SGLang."""

    def make_engine(self, arguments: dict[str, Any]) -> SglangRoot: ...


class InstalledSglang:
    """The SGLang of this environment."""

    def __init__(self) -> None:
        """Check that SGLang is installed in the pinned release.

        Raises:
            PreflightError: it is not installed, or not the release that this adapter was written for.
        """
        set_environment()
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:  # a folder of that name is not the package
            what = "SGLang is not installed, and the engine sglang was asked for"
            raise _unusable("engine.sglang.missing", what, "generation with SGLang needs its package")
        from sglang.version import __version__ as installed

        if str(installed).split("+")[0] != version():
            why = f"the adapter follows the source of SGLang {version()}, parts of which are not its public interface"
            raise _unusable("engine.sglang.version", f"SGLang {installed} is installed, {version()} is needed", why)

    def make_engine(self, arguments: dict[str, Any]) -> SglangRoot:
        """`sglang.Engine(**arguments)`; it starts processes of its own and asks for the main thread."""
        from sglang import Engine

        return Engine(**arguments)


def _unusable(code: str, what: str, why: str) -> PreflightError:
    return PreflightError(
        code=code,
        what=what,
        where="--engine_type sglang",
        why=why,
        state="nothing was started",
        do=f"{install_command('sglang')}, or --engine_type native",
    )
