"""Settings common to engines of other libraries: sizes, deadlines, and the errors of a failed start or call."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch

from rft_core.errors import OptionsError, ServiceError
from rft_engine.build_request import EngineBuildRequest
from rft_engine.process.gpu_processes import Inventory, held_by, other_processes, visible_device

Transport = Literal["auto", "direct", "file", "ipc", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    """Seconds after which a call is given up; the engine's own process is then ended."""

    start: float = 900.0
    generate: float = 3600.0
    load_weights: float = 600.0
    other: float = 120.0

    def __post_init__(self) -> None:
        for name in ("start", "generate", "load_weights", "other"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise OptionsError(
                    code="engine.deadlines",
                    what=f"{name} = {value}",
                    where=f"EngineDeadlines({name}=...)",
                    why="a deadline is a number of seconds above 0",
                    state="nothing was started",
                    do=f"{name}=600",
                )


def deadline_error(what: str, *, where: str, state: str, do: str) -> ServiceError:
    """Return the error that a call passed its deadline, in this process or in the engine's own."""
    why = "every call to an engine is bounded by a deadline"
    return ServiceError(code="engine.deadline", what=what, where=where, why=why, state=state, do=do)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEngineSettings:
    """An engine with its own copy of the weights; the class of a library says what that one lacks."""

    library: ClassVar[str] = "vllm"
    """Part of the codes of errors; its name in texts is `library_name`."""
    library_name: ClassVar[str] = "vLLM"

    model_dir: str | Path
    """Hugging Face directory: architecture, and the weights of version 0."""
    max_rows: int
    """Sequences decoded at once."""
    max_len: int
    """Maximum length of a prompt plus its completion, in tokens."""
    dtype: str = "auto"
    """Of weights and activations: auto (the directory's), float32, bfloat16 or float16."""
    tensor_parallel_size: int = 1
    """GPUs that share the model."""
    memory_utilization: float | None = None
    """Share of the device's memory that the library may take; None = its own default, and of vLLM what the cache of all
    rows needs: on a CPU, and on a GPU where `rft_engine.vllm.cache_share` reckons it."""
    quantization: str | None = None
    """None or "fp8": matrices are rounded to 8 bits as they are loaded (a GPU only)."""
    enable_sleep: bool = False
    """Allow `sleep`: the library then allocates in a pool that it can give back (a GPU only)."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts sooner, decodes slower."""
    seed: int = 0
    """Seed of the library's own generators; no sample depends on it."""
    transport: Transport = "auto"
    """How weights come in: see `rft_engine.vllm.weight_transport`."""
    adapter_config: str = ""
    """The adapter_config.json of adapters that alone are sent (vLLM only), as text; empty = all weights are."""
    deadlines: EngineDeadlines = field(default_factory=EngineDeadlines)

    def __post_init__(self) -> None:
        sizes = (("max_rows", self.max_rows, 1), ("max_len", self.max_len, 2))
        for name, value, least in (*sizes, ("tensor_parallel_size", self.tensor_parallel_size, 1)):
            if value < least:
                raise self.refusal(name, f"{name} = {value}", f"allowed: {least} or above", f"{name}={least}")
        share = self.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            why = "it is a share of the device's memory: above 0, at most 1"
            raise self.refusal("memory_utilization", f"memory_utilization = {share}", why, "memory_utilization=0.5")
        if self.quantization not in (None, "fp8"):
            why = 'weights change at every step and must be rounded as they arrive: only "fp8" does that'
            remedy = 'quantization="fp8"'
            raise self.refusal("quantization", f"quantization = {self.quantization!r}", why, remedy)

    def refusal(self, name: str, what: str, why: str, remedy: str) -> OptionsError:
        """Return the error that a setting cannot be carried out."""
        return OptionsError(
            code=f"engine.{self.library}.{name}",
            what=what,
            where=f"{self.library_name} engine ({name})",
            why=why,
            state="nothing was started",
            do=remedy,
        )

    def not_started(self, error: Exception, remedy: str, inventory: Inventory = lambda: ()) -> ServiceError:
        """Return the error that the library did not start; `remedy` applies unless its message is about memory.

        `inventory` gives the GPUs and who holds them; it is called only where the message is about memory.
        """
        words = " ".join(str(error).split())[:600] or type(error).__name__
        holders = ""
        if "memory" in words.lower():
            share = (self.memory_utilization or 0.9) / 2
            remedy = f"--engine_mem_util {share:.2g}, or a smaller --engine_max_rows or --max_len"
            device = visible_device(inventory(), 0)
            holders, others = held_by(device), other_processes(device)
            # to end a small process would not help
            if device is not None and sum(process.used_mib for process in others) > 0.1 * device.total_mib:
                remedy = f"end process {others[0].pid} ({others[0].name}), or {remedy}"
        return ServiceError(
            code=f"engine.{self.library}.start",
            what=f"{self.library_name} did not start: {words}",
            where=f"{self.library_name} engine for {self.model_dir}, {self.max_rows} rows of {self.max_len} tokens"
            + (f"; the device is held by {holders}" if holders else ""),
            why="weights, workspace and the cache of keys and values must fit into the memory that is free",
            state="nothing was started",
            do=remedy,
        )

    def too_slow(self, num_done: int, num_total: int, seconds: float) -> ServiceError:
        """Return the error that a call of `generate` passed its deadline."""
        return deadline_error(
            f"generate did not end within {seconds:g} s: {num_done} of {num_total} samples were done",
            where=f"{self.library_name} engine",
            state="the samples that were under way are dropped; the weights are unchanged",
            do=f"EngineDeadlines(generate={2 * seconds:g}), or a smaller rollout batch",
        )

    def config(self) -> dict[str, Any]:
        """config.json of the directory, the language model's part on top."""
        config: dict[str, Any] = json.loads((Path(self.model_dir) / "config.json").read_text())
        return {**config, **config.get("text_config", {})}

    def resolved_dtype(self) -> str:
        """Return the directory's dtype for "auto": the libraries' choice would round float32, unlike the policy."""
        if self.dtype != "auto":
            return self.dtype
        config = self.config()
        return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


SettingsT = TypeVar("SettingsT", bound=ExternalEngineSettings)


def engine_settings(kind: type[SettingsT], request: EngineBuildRequest) -> SettingsT:
    """Return the settings of a library's engine, a single one or one of several replicas, from a build request."""
    chosen = request.settings
    return kind(
        model_dir=request.model_dir,
        max_rows=chosen.engine_max_rows,
        max_len=request.max_len,
        dtype=request.dtype,
        tensor_parallel_size=chosen.engine_tp_size,
        memory_utilization=chosen.engine_mem_util,
        quantization="fp8" if chosen.engine_fp8 else None,
        enable_sleep=request.enable_sleep,
        enforce_eager=chosen.engine_enforce_eager or torch.device(request.device).type == "cpu",
        transport="file" if request.from_snapshot else "auto",
        adapter_config=request.adapter_config,
    )


def make_log_folder(request: EngineBuildRequest) -> None:
    """Create the folder of the log that the engine's process prints to, where one is named."""
    if request.log_path is not None:
        request.log_path.parent.mkdir(parents=True, exist_ok=True)
