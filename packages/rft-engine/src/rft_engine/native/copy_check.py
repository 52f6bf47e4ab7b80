"""Check that an engine with a weight copy serves the trained weights: version, digests and log-prob probe together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rft_core.errors import ServiceError
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.weight_sync.logprob_probe import PolicyLogprobs, ProbeGap, measure_logprob_gap
from rft_engine.weight_sync.weight_errors import WRONG_VERSION, first_names, parity_error

_LIMITS = {"float32": 1e-4}  # nats; the same library adds the same numbers in another order
_LIMIT_OF_SHORT_FLOATS = 0.25


def check_copy(
    engine: NativeEngineOnCopy[Any],
    policy_logprobs: PolicyLogprobs,
    *,
    trainer_version: int,
    replica: int = 0,
    prompts: Sequence[Sequence[int]] | None = None,
    limit: float | None = None,
) -> ProbeGap:
    """Compare an engine with the policy as it is now; after a failure the engine refuses to generate until a load.

    The tensors' digests find what was not copied, even where a step was so small that no log-prob shows it; the
    probe finds what is computed with right tensors and an old cache or an old derived matrix.

    Args:
        engine: awake, with weights loaded.
        policy_logprobs: the trainer's forward.
        trainer_version: of the policy's weights now.
        replica: number of this engine among its like, for the error.
        prompts: as of `measure_logprob_gap`.
        limit: largest gap allowed; None = 1e-4 for float32, 0.25 for shorter floats.

    Returns:
        The probe's gap.

    Raises:
        ServiceError: the version, a digest or the probe shows that these are not the policy's weights.
    """
    wanted, served = engine.policy_fingerprint(), engine.held_fingerprint()
    differing = sorted(name for name in served.keys() | wanted.keys() if served.get(name) != wanted.get(name))
    # measured, not checked: one error is to name version, tensors and gap together
    gap = measure_logprob_gap(engine, policy_logprobs, prompts=prompts)
    max_gap = limit if limit is not None else _LIMITS.get(engine.facts.dtype, _LIMIT_OF_SHORT_FLOATS)
    if differing or gap.weight_version != trainer_version or not gap.is_within(max_gap):
        fault = _stale(gap, trainer_version, replica, differing, len(served), max_gap)
        # before the raise: a caller that catches the error must not sample from these weights
        engine.distrust(fault)
        raise fault
    return gap


def _stale(
    gap: ProbeGap, trainer_version: int, replica: int, differing: Sequence[str], num_tensors: int, limit: float
) -> ServiceError:
    names = f": {first_names(differing)}" if differing else ""
    return parity_error(
        f"engine replica {replica} serves weights v{gap.weight_version}, trainer is at v{trainer_version}; "
        f"{len(differing)} of {num_tensors} tensors differ{names}; "
        f"probe log-prob gap {gap.maximum:.3g} (limit {limit:.3g}), mean {gap.mean:.3g} over {gap.num_tokens} tokens",
        where=f"check of the engine's weights after the update to version {trainer_version}",
        why=WRONG_VERSION
        if differing or gap.weight_version != trainer_version
        else "all tensors agree, so what is computed from them is old, or is computed otherwise: a cache, a kernel",
        state="no sample of this step was used, and the engine refuses to generate until a load succeeds",
        do=f"load_weights({trainer_version + 1}) with the present weights; if it stays, --engine_type vllm",
    )
