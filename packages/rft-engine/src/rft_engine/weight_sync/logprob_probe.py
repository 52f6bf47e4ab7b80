"""Log-prob probe: compare an engine with a weight copy with the policy's own forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import keyed_random
from rft_core.errors import ServiceError
from rft_engine.completions import Completion
from rft_engine.engine_base import EngineFacts
from rft_engine.weight_sync.weight_errors import parity_error

PolicyLogprobs: TypeAlias = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""(prompts, completions) -> for each completion the policy's log-prob of each of its tokens, at temperature 1."""

_NUM_PROBES = 2
_PROBE_TOKENS = 160  # longer than a block of the prefix cache: 16 tokens on a GPU, 128 on a CPU
_NEW_TOKENS = 4
_LIMITS = {"float32": 1e-3}
_LIMIT_OF_SHORT_FLOATS = 0.25


class ProbeTarget(Protocol):
    """Engine methods that a probe needs."""

    @property
    def weight_version(self) -> int: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def max_len(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """|log-prob of the engine - log-prob of the policy| over the probe's tokens, in nats."""

    mean: float
    maximum: float
    """NaN where the gap of a token is not a number."""
    num_tokens: int
    weight_version: int

    def is_within(self, limit: float) -> bool:
        """Return True when every token's gap is a number of at most `limit`."""
        # not `maximum > limit`: a gap that is NaN is above no limit, and must fail
        return self.maximum <= limit


def check_logprob_parity(
    engine: ProbeTarget,
    policy_logprobs: PolicyLogprobs,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    limit: float | None = None,
) -> ProbeGap:
    """Measure the gap of log-probs and refuse one above the limit.

    Args:
        engine, policy_logprobs, prompts: as of `measure_logprob_gap`.
        limit: largest gap allowed; None = 1e-3 for float32, 0.25 for shorter floats.

    Raises:
        ServiceError: the gap is above the limit, or not a number.
    """
    gap = measure_logprob_gap(engine, policy_logprobs, prompts=prompts)
    max_gap = limit if limit is not None else _LIMITS.get(engine.facts.dtype, _LIMIT_OF_SHORT_FLOATS)
    if not gap.is_within(max_gap):
        raise _parity_error(gap, max_gap)
    return gap


def measure_logprob_gap(
    engine: ProbeTarget, policy_logprobs: PolicyLogprobs, *, prompts: Sequence[Sequence[int]] | None = None
) -> ProbeGap:
    """Sample a few tokens after fixed prompts and compare their log-probs with the policy's.

    Args:
        engine: awake, with weights loaded.
        policy_logprobs: the trainer's forward.
        prompts: None = two of up to 160 tokens, the same at every call, so that a prefix cache that
            outlived its weights is used for them.
    """
    probes = prompts if prompts is not None else _probes(engine.facts.vocab_size, engine.max_len)
    keys = [[keyed_random.derive_key(0, "probe", p)] for p in range(len(probes))]
    answers = engine.generate(probes, keys, SamplingOptions(temperature=1.0, max_new_tokens=_NEW_TOKENS))
    sampled = [completion for [completion] in answers]
    expected = policy_logprobs(probes, [completion.token_ids for completion in sampled])
    gaps = [
        abs(ours - theirs)
        for completion, row in zip(sampled, expected, strict=True)
        for ours, theirs in zip(completion.logprobs, row, strict=True)
    ]
    # `max` passes over a NaN that is not the first value
    largest = math.nan if any(map(math.isnan, gaps)) else max(gaps)
    return ProbeGap(sum(gaps) / len(gaps), largest, len(gaps), engine.weight_version)


def _probes(vocab_size: int, max_len: int) -> list[list[int]]:
    length = max(min(_PROBE_TOKENS, max_len - _NEW_TOKENS), 1)
    key = keyed_random.derive_key(0, "probe prompts")
    drawn = keyed_random.integers(key, _NUM_PROBES * length, 0, vocab_size)
    return [[int(token) for token in row] for row in drawn.reshape(_NUM_PROBES, length)]


def _parity_error(gap: ProbeGap, limit: float) -> ServiceError:
    return parity_error(
        f"the engine's log-probs differ from the policy's by up to {gap.maximum:.3g} (limit {limit:.3g}), "
        f"on average {gap.mean:.3g} over {gap.num_tokens} tokens of the probe",
        where=f"probe after load_weights({gap.weight_version})",
        why="the engine reports the policy's weights, but its log-probs are not the policy's",
        state="no sample of this step was used",
        do="load_weights again; a lasting gap is due to kernels or precision: --engine_type native, or a higher limit",
    )
