"""Settings of inference: the engine, its size, and the sampling options.

Metadata keys of a field, read by the command line: `minimum`, `maximum` (inclusive), `above`
(exclusive), `bare` (the value of the flag given without one). No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rft_engine.registry import AUTO, ENGINES

if TYPE_CHECKING:
    EngineType = str
else:
    EngineType = Literal[(AUTO, *ENGINES)]  # the words of the flag are the rows of the registry


@dataclass(frozen=True, kw_only=True)
class EngineChoiceSettings:
    """Which inference engine."""

    engine_type: EngineType = AUTO
    """Inference engine; native = in this process, with the weights being trained; hf = transformers' generate with
    them; vllm = vLLM in its own process; sglang = SGLang in its own process (a GPU; not yet run on one); auto = vllm
    on a GPU where it is installed, else native."""


@dataclass(frozen=True, kw_only=True)
class EngineSizeSettings:
    """What an inference engine takes of the machine."""

    engine_tp_size: int = field(default=1, metadata={"minimum": 1})
    """GPUs that share one engine (tensor parallel; vllm and sglang)."""

    engine_mem_util: float | None = field(default=None, metadata={"above": 0.0, "maximum": 1.0})
    """Share of the device's memory that the engine may take (vllm and sglang; the others reserve none); none given =
    for vllm what its weights and engine_max_rows sequences need, for sglang its own default."""

    engine_fp8: bool = False
    """Quantize the engine's matrices to 8 bits at loading (vllm on a GPU only); the trainer's are unchanged."""

    engine_max_rows: int = field(default=512, metadata={"minimum": 1})
    """Maximum number of sequences decoded at once; fewer need less memory for the KV cache."""


@dataclass(frozen=True, kw_only=True)
class DecodingEngineSettings(EngineSizeSettings, EngineChoiceSettings):
    """The inference engine."""

    engine_enforce_eager: bool = False
    """Launch the kernels of a decode step one by one on a GPU, without CUDA graphs: starts faster, decodes slower
    (native, vllm, sglang; a CPU has no graphs)."""


@dataclass(frozen=True, kw_only=True)
class ComparedEnginesSettings(EngineSizeSettings):
    """The inference engines that are compared."""

    engines: str = ""
    """Engines joined by commas, such as native,vllm; empty = all that are known here."""

    @property
    def names(self) -> tuple[str, ...]:
        """The engines, once each, in the order of `ENGINES`; names that are not known come last."""
        requested = dict.fromkeys(part.strip() for part in self.engines.split(",") if part.strip())
        known = [name for name in ENGINES if name in requested or not requested]
        return (*known, *(name for name in requested if name not in ENGINES))


@dataclass(frozen=True, kw_only=True)
class EngineSettings(DecodingEngineSettings):
    """The inference engine, beside a trainer."""

    enable_engine_sleep: bool = True
    """Release the engine's memory while the trainer trains; native: drop the KV cache between rollouts."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn, and how long texts may be (in tokens)."""

    temperature: float = field(default=1.0, metadata={"minimum": 0.0})
    """Divisor of the logits before sampling; 0 = greedy (not for training)."""

    top_p: float = field(default=1.0, metadata={"above": 0.0, "maximum": 1.0})
    """Sample from the most likely tokens that together hold this probability; 1 = from all."""

    top_k: int = field(default=0, metadata={"minimum": -1})
    """Sample from this many most likely tokens; 0 or -1 = from all."""

    min_p: float = field(default=0.0, metadata={"minimum": 0.0, "maximum": 1.0})
    """Sample from the tokens that are at least this fraction as likely as the most likely one; 0 = from all."""

    prompt_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Maximum length of a prompt, in tokens."""

    generate_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Maximum length of a response, in tokens."""

    max_len: int | None = field(default=None, metadata={"minimum": 2})
    """Maximum length of prompt plus response for engine and trainer, in tokens; none = the sum of the two above."""

    constraint: str = ""
    """Task of an installed package among whose sequences every response is drawn, as TASK or TASK:ARGUMENT; empty =
    responses are free."""


@dataclass(frozen=True, kw_only=True)
class SearchedSamplingSettings(SamplingSettings):
    """Sampling or search of completions, and how long texts may be (in tokens)."""

    num_beams: int = field(default=0, metadata={"minimum": 0})
    """Best sequences of the constraint after each prompt, by beam search, in the place of samples; 0 = samples."""


@dataclass(frozen=True, kw_only=True)
class ProbeLengthSettings:
    """How long the compared texts may be, in tokens."""

    prompt_max_len: int = field(default=1024, metadata={"minimum": 1})
    """Maximum length of a prompt, in tokens."""

    generate_max_len: int = field(default=32, metadata={"minimum": 1})
    """Maximum length of a response, in tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainingSamplingSettings(SamplingSettings):
    """How completions are drawn for training."""

    use_fire: bool = False
    """Sample the first token at a high temperature, for variety within a group (FIRE)."""

    first_token_temperature: float = field(default=10.0, metadata={"above": 0.0})
    """Temperature of the first token (with `use_fire`)."""

    constraint_logprobs: Literal["allowed", "vocabulary"] = "allowed"
    """With a constraint, what a token's probability is a share of in the loss: allowed = the tokens that may follow,
    among which it was drawn; vocabulary = all tokens, as MiniOneRec trains."""

    group_source: Literal["samples", "beams", "weighted_beams"] = "samples"
    """With a constraint, the group of a prompt: samples = drawn from the policy; beams = the best sequences by beam
    search, each counted alike (a biased estimate, as in MiniOneRec); weighted_beams = these, each by its probability
    within the group."""


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """Engines side by side."""

    engine_replicas: int = field(default=1, metadata={"minimum": 1})
    """Number of engines that share the prompts of a step, each a process with all weights, for every rank; the number
    changes no token. 1 = one engine, in the trainer's process and on its weights where that is possible."""
