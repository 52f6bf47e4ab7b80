"""Settings of inference: the engine, its size, and the sampling options.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

EngineType = Literal["auto", "native", "hf", "vllm", "sglang"]
KNOWN_ENGINES: tuple[str, ...] = tuple(name for name in get_args(EngineType) if name != "auto")


@dataclass(frozen=True, kw_only=True)
class EngineChoiceSettings:
    """Which inference engine."""

    engine_type: EngineType = "auto"
    """Inference engine; native = in this process, with the weights being trained; hf = transformers' generate with
    them; vllm = vLLM in its own process; sglang = SGLang in its own process (a GPU; not yet run on one); auto = vllm
    on a GPU where it is installed, else native."""


@dataclass(frozen=True, kw_only=True)
class EngineSizeSettings:
    """What an inference engine takes of the machine."""

    engine_tp_size: int = field(default=1, metadata={"minimum": 1})
    """GPUs that share one engine (tensor parallel; vllm and sglang)."""

    engine_mem_util: float | None = field(default=None, metadata={"above": 0.0, "maximum": 1.0})
    """Share of the device's memory that the engine may take (vllm and sglang; the others reserve none)."""

    engine_fp8: bool = False
    """Round the engine's matrices to 8 bits as they are loaded (vllm on a GPU alone); the trainer's stay."""

    engine_max_rows: int = field(default=512, metadata={"minimum": 1})
    """Sequences decoded at once; fewer rows take less memory for keys and values."""


@dataclass(frozen=True, kw_only=True)
class DecodingEngineSettings(EngineSizeSettings, EngineChoiceSettings):
    """The inference engine."""

    engine_enforce_eager: bool = False
    """Start the kernels of a decode step one by one on a GPU, without CUDA graphs: ready sooner, decodes slower
    (native, vllm, sglang; a CPU has no graphs)."""


@dataclass(frozen=True, kw_only=True)
class ComparedEnginesSettings(EngineSizeSettings):
    """The inference engines that are compared."""

    engines: str = ""
    """Engines joined by commas, such as native,vllm; empty = all that are known here."""

    @property
    def names(self) -> tuple[str, ...]:
        """The engines, once each, in the order of `KNOWN_ENGINES`; names that are not known come last."""
        requested = dict.fromkeys(part.strip() for part in self.engines.split(",") if part.strip())
        known = [name for name in KNOWN_ENGINES if name in requested or not requested]
        return (*known, *(name for name in requested if name not in KNOWN_ENGINES))


@dataclass(frozen=True, kw_only=True)
class EngineSettings(DecodingEngineSettings):
    """The inference engine, beside a trainer."""

    enable_engine_sleep: bool = True
    """Give the engine's memory back while training; native: drop its keys and values between rollouts."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn, and how long texts may be (in tokens)."""

    temperature: float = field(default=1.0, metadata={"minimum": 0.0})
    """Divides the logits before sampling; 0 = greedy (not for training)."""

    top_p: float = field(default=1.0, metadata={"above": 0.0, "maximum": 1.0})
    """Sample among the likeliest tokens that hold this probability together; 1 = all."""

    top_k: int = field(default=0, metadata={"minimum": -1})
    """Sample among this many likeliest tokens; 0 or -1 = all."""

    min_p: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 1.0})
    """Sample among tokens at least this share as likely as the likeliest; 0 = all."""

    prompt_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Longest prompt, in tokens."""

    generate_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Longest response, in tokens."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Cap on prompt plus response for engine and trainer, in tokens; none = the sum of the two above."""


@dataclass(frozen=True, kw_only=True)
class ProbeLengthSettings:
    """How long the compared texts may be, in tokens."""

    prompt_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Longest prompt."""

    generate_max_len: int = field(default=32, metadata={"minimum": 1})
    """Longest completion."""


@dataclass(frozen=True, kw_only=True)
class TrainingSamplingSettings(SamplingSettings):
    """How completions are drawn for training."""

    use_fire: bool = False
    """Draw the first token at a high temperature, for variety within a group (FIRE)."""

    first_token_temperature: float = field(default=10.0, metadata={"above": 0.0})
    """Temperature of the first token (with `use_fire`)."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """Engines side by side."""

    engine_replicas: int = field(default=1, metadata={"minimum": 1})
    """Engines that share the prompts of a step between them, each a process with the whole weights, for every rank;
    their number changes no token. 1 = one engine, which shares the trainer's process and weights where it can."""
