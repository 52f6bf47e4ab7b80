"""What goes to a vLLM engine and what comes back, as plain data, and the checks on both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_algos.errors import OptionsError, ServiceError
from rft_engine.records import Completion


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a started engine says of itself."""

    dtype: str
    """Of its weights as loaded: float32, bfloat16 or float16."""
    vocab_size: int
    is_cpu: bool
    transport: str
    """How weights reach it: direct, file, ipc or nccl."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Samples wanted of an engine; sample s is drawn under `keys[s]`."""

    version: int
    """Weights that must sample them."""
    options: dict[str, Any]
    """Fields of `SamplingOptions`."""
    keys: Sequence[int]
    prompts: Sequence[Sequence[int]]
    requests: Sequence[tuple[int, int]]
    """(sample, prompt) pairs that are still to be done."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One finished sample."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    log_kept_mass: list[float]
    finish_reason: str
    version: int


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Figures of one call: the engine's steps, and prompt tokens that no cache held."""

    num_steps: int
    num_prefill_tokens: int


def check_prompts(
    prompts: Sequence[Sequence[int]],
    sample_keys: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_len: int,
    vocab_size: int,
) -> None:
    """Raise `OptionsError` for a prompt that is empty, too long or holds a token that the model has not."""
    if len(prompts) != len(sample_keys):
        what = f"{len(prompts)} prompts, {len(sample_keys)} lists of sample keys"
        raise _refusal("engine.sample_keys", what, "every prompt has its list of keys", "one list of keys a prompt")
    room = max_len - max_new_tokens
    for index, prompt in enumerate(prompts):
        if not prompt:
            what = f"prompt {index} has no tokens"
            raise _refusal("engine.empty_prompt", what, "there is nothing to continue", f"leave prompt {index} out")
        if len(prompt) > room:
            what = (
                f"prompt {index} has {len(prompt)} tokens, "
                f"max_len - max_new_tokens = {max_len} - {max_new_tokens} = {room}"
            )
            remedy = f"max_len={len(prompt) + max_new_tokens}"
            raise _refusal("engine.prompt_too_long", what, "a prompt and its completion share max_len tokens", remedy)
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            what = f"prompt {index} holds token {token}, the model knows 0 to {vocab_size - 1}"
            remedy = "encode the prompts with the tokenizer of this model"
            raise _refusal("engine.unknown_token", what, "a prompt consists of the model's tokens", remedy)


def completion_of(result: SampleResult, call: GenerateCall, vocab_size: int) -> Completion:
    """The record of one result.

    Raises:
        ServiceError: what the engine answered cannot be a sample of this call.
    """
    fault = _fault_of(result, call, vocab_size)
    if fault:
        raise ServiceError(
            code="engine.garbage",
            what=f"sample {result.sample} of the engine's answer {fault}",
            where="vLLM engine",
            why="a completion has tokens of the model, a finite log-probability for each, and an end",
            state="no sample of this call was used",
            do="start the engine again; --engine_type native if it happens again",
        )
    return Completion(
        token_ids=tuple(result.token_ids),
        logprobs=tuple(result.logprobs),
        log_kept_mass=tuple(result.log_kept_mass),
        finish_reason="stop" if result.finish_reason == "stop" else "length",
        weight_version=result.version,
    )


def _fault_of(result: SampleResult, call: GenerateCall, vocab_size: int) -> str:
    num = len(result.token_ids)
    if not 1 <= num <= call.options["max_new_tokens"]:
        return f"has {num} tokens, allowed are 1 to {call.options['max_new_tokens']}"
    if len(result.logprobs) != num or len(result.log_kept_mass) != num:
        return f"has {num} tokens, {len(result.logprobs)} log-probs and {len(result.log_kept_mass)} masses"
    if min(result.token_ids) < 0 or max(result.token_ids) >= vocab_size:
        return f"has a token outside 0 to {vocab_size - 1}"
    if not all(map(math.isfinite, result.logprobs)) or not all(map(math.isfinite, result.log_kept_mass)):
        return "has a log-probability that is not finite"
    stopped = result.token_ids[-1] in call.options["stop_token_ids"]
    if result.finish_reason not in ("stop", "length") or (result.finish_reason == "stop") != stopped:
        return f"ends with token {result.token_ids[-1]} for the reason {result.finish_reason!r}"
    if result.finish_reason == "length" and num != call.options["max_new_tokens"]:
        return f"ends after {num} tokens without a stop token"
    if result.version != call.version:
        return f"comes from weights of version {result.version}, asked for was {call.version}"
    return ""


def _refusal(code: str, what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(code=code, what=what, where="vLLM engine", why=why, state="nothing was generated", do=remedy)
