"""Requests and results of an engine process as plain data, and the checks on both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from rft_core.errors import ServiceError
from rft_engine.completions import Completion

_ROUNDING = 1e-3  # nats above 0 that a log-probability of nearly 1 may have


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
    budgets: Sequence[int] = ()
    """Tokens that each sample may have; none given = `max_new_tokens` for all."""
    constraint: dict[str, Any] | None = None
    """Lists of the `TokenTrie` that holds every completion, whole; `stop_token_ids` then are what ends requests."""

    media: Sequence[dict[str, Any] | None] = ()
    """Images of each prompt as the engine's library takes them; empty: no prompt has any."""

    def budget(self, sample: int) -> int:
        """Tokens that a sample may have."""
        return self.budgets[sample] if self.budgets else self.options["max_new_tokens"]


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One finished sample of a call."""

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
    num_preemptions: int | None = None
    """Requests that lost their place and were read again; None where the engine does not report it."""


class Answers:
    """Completions of one call, collected as results come in; each result is checked against the call."""

    def __init__(self, call: GenerateCall, vocab_size: int) -> None:
        self._call, self._vocab_size = call, vocab_size
        self._asked = {sample for sample, _ in call.requests}
        self.done: dict[int, Completion] = {}

    def add(self, result: SampleResult) -> None:
        """Take one result of the call.

        Raises:
            ServiceError: it cannot be a sample of this call.
        """
        sample = result.sample
        if not is_integer(sample) or sample not in self._asked:
            raise garbage(f"sample {sample!r} was not requested: samples are 0 to {max(self._asked, default=-1)}")
        if sample in self.done:
            raise garbage(f"sample {sample} was returned twice")
        self.done[sample] = completion_of(result, self._call, self._vocab_size)

    def in_order(self) -> list[Completion]:
        """Return all samples in the order of their numbers.

        Raises:
            ServiceError: one is missing.
        """
        missing = sorted(self._asked - self.done.keys())
        if missing:
            raise garbage(f"sample {missing[0]} of {len(self._asked)} is missing from the engine's answer")
        return [self.done[sample] for sample in sorted(self._asked)]


def completion_of(result: SampleResult, call: GenerateCall, vocab_size: int) -> Completion:
    """The record of one result.

    Raises:
        ServiceError: what the engine answered cannot be a sample of this call.
    """
    fault = _fault_of(result, call, vocab_size)
    if fault:
        raise garbage(f"sample {result.sample} of the engine's answer {fault}")
    return Completion(
        token_ids=tuple(result.token_ids),
        logprobs=tuple(result.logprobs),
        log_kept_mass=tuple(result.log_kept_mass),
        finish_reason="stop" if result.finish_reason == "stop" else "length",
        weight_version=result.version,
    )


def garbage(what: str) -> ServiceError:
    """Return the error that the engine's answer cannot be a sample of the call."""
    return ServiceError(
        code="engine.garbage",
        what=what,
        where="engine's answer to generate",
        why="a completion has tokens of the model, a finite log-probability for each, and an end",
        state="no sample of this call was used",
        do="start the engine again; --engine_type native if it happens again",
    )


def message_of(item: Any) -> SampleResult | StepCounts:
    """A result or the counts, as they came as JSON.

    Raises:
        ServiceError: fields are missing, or others are there.
    """
    shown = str(item)[:200]
    values = cast(dict[str, Any], item) if isinstance(item, dict) else dict[str, Any]()
    for kind in (SampleResult, StepCounts):
        if values.keys() == {field.name for field in fields(kind)}:
            return kind(**values)
    raise garbage(f"the engine answered {shown!r}, which is neither a sample nor step counts")


def fault_of_tokens(lists: tuple[Any, Any, Any], allowed: range, vocab_size: int) -> str:
    """Return what is wrong with the tokens, log-probs and masses of a result as they came as JSON; empty if nothing.

    `allowed`: the numbers of tokens that it may have.
    """
    if not all(isinstance(part, list) for part in lists):
        return "has no lists of tokens, log-probs and masses"
    token_ids, logprobs, log_kept_mass = lists
    num = len(token_ids)
    if num not in allowed:
        return f"has {num} tokens; {allowed[0]} to {allowed[-1]} are allowed"
    if len(logprobs) != num or len(log_kept_mass) != num:
        return f"has {num} tokens, {len(logprobs)} log-probs and {len(log_kept_mass)} masses"
    if not all(is_integer(token) and 0 <= token < vocab_size for token in token_ids):
        return f"has a token outside 0 to {vocab_size - 1}"
    if not all(map(_is_finite, [*logprobs, *log_kept_mass])):
        return "has a log-probability that is not finite"
    return "has a probability above 1" if max([*logprobs, *log_kept_mass], default=0.0) > _ROUNDING else ""


def is_integer(value: Any) -> bool:
    """Return True for an integer; JSON's true would pass as 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def _fault_of(result: SampleResult, call: GenerateCall, vocab_size: int) -> str:
    budget = call.budget(result.sample)
    lists = (result.token_ids, result.logprobs, result.log_kept_mass)
    if fault := fault_of_tokens(lists, range(1, budget + 1), vocab_size):
        return fault
    if result.version != call.version:
        return f"comes from weights of version {result.version}; version {call.version} was requested"
    return _fault_of_end(result, call, len(result.token_ids), budget)


def _fault_of_end(result: SampleResult, call: GenerateCall, num: int, budget: int) -> str:
    last, reason = result.token_ids[-1], result.finish_reason
    # with a constraint the budget is its greatest length, so a sequence of that length is whole
    stopped = last in call.options["stop_token_ids"] or (call.constraint is not None and num == budget)
    if reason not in ("stop", "length") or (reason == "stop") != stopped:
        return f"ends with token {last} for the reason {reason!r}"
    if reason == "length" and num != budget:
        return f"ends after {num} tokens without a stop token"
    return ""


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
