"""Checks for values that are not finite, in sampled log-probs before training and in weights before a save.

A model with a NaN in its weights still samples tokens. All get a low reward, all advantages are 0, and
so are the gradients: without these checks such a run looks like one that learns nothing, and its
checkpoints take the place of good ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rft_core.errors import NumericsError
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import Rollout


def refuse_non_finite_samples(sampled: Iterable[Sequence[Rollout]], *, during: str, do: str) -> None:
    """Raise `NumericsError` for the first rollout with a log-probability that is not finite.

    `during` names the purpose of the samples, `do` is the remedy. Every rank has all samples, so that all raise.
    """
    if (bad := _first_non_finite(sampled)) is not None:
        raise _sampled_logprobs(*bad, during=during, do=do)


def refuse_non_finite_shares(
    sampled: Iterable[Sequence[Rollout]], collectives: Collectives, *, during: str, do: str
) -> None:
    """Raise `NumericsError` as `refuse_non_finite_samples`, on every rank, where each has a share of the samples."""
    bad = _first_non_finite(sampled)
    # every rank asks, so that none goes on to an exchange that the others never come to
    if not int(collectives.max(torch.tensor([0 if bad is None else 1]))):
        return
    everyones = (json.loads(part) for part in collectives.gather_bytes(json.dumps(bad).encode()))
    what, version = next(one for one in everyones if one is not None)
    raise _sampled_logprobs(what, version, during=during, do=do)


def _first_non_finite(sampled: Iterable[Sequence[Rollout]]) -> tuple[str, int] | None:
    """(what is wrong, version of the weights) of the first rollout with such a log-probability."""
    for rollouts in sampled:
        for rollout in rollouts:
            if not all(map(math.isfinite, rollout.behaviour_logprobs)):
                name = f"{rollout.prompt_id}#{rollout.sample_index}, {len(rollout.completion_ids)} tokens"
                return f"the engine gave a log-probability that is not finite for {name}", rollout.weight_version
    return None


def _sampled_logprobs(what: str, version: int, *, during: str, do: str) -> NumericsError:
    return NumericsError(
        code="numerics.sampled_logprobs",
        what=what,
        where=f"{during}; weights of step {version}",
        why="a model that gives no probabilities has weights or activations that are not finite",
        state="what was sampled is not used and no weight was changed by it",
        do=do,
    )


def refuse_more_steps(num_in_a_row: int, limit: int, *, where: str, saved_step: int | None, do: str) -> None:
    """Raise `NumericsError` where more optimizer steps than `limit` in a row had a gradient that is not finite."""
    if num_in_a_row > limit:
        raise NumericsError(
            code="numerics.non_finite",
            what=f"{num_in_a_row} optimizer steps in a row had a gradient that is not finite",
            where=where,
            why=f"at most {limit} in a row are skipped (--max_refused_steps)",
            state=f"weights are those of the last finite update; last checkpoint: step {saved_step}",
            do=do,
        )


def refuse_non_finite_weights(
    named_parameters: Iterable[tuple[str, Tensor]],
    collectives: Collectives,
    *,
    step: int,
    last_good: int | None,
    do: str,
) -> None:
    """Raise `NumericsError`, on every rank, naming the first weights that are not finite on any.

    One exchange with the device in all, and one between ranks unless something is wrong.
    """
    finite = [(name, parameter.detach().isfinite().all()) for name, parameter in named_parameters]
    # one stacked tensor: a bool a parameter would wait for the device as often
    fine = not finite or bool(torch.stack([one.to(finite[0][1].device) for _, one in finite]).all())
    # every rank asks, so that all raise together where one has such a weight
    if not int(collectives.max(torch.tensor([0 if fine else 1]))):
        return
    # only now, in the rare case: names cost a wait for every parameter and an exchange of bytes
    own = json.dumps([name for name, one in finite if not one]).encode()
    bad = sorted({name for part in collectives.gather_bytes(own) for name in json.loads(part)})
    saved = (
        "no checkpoint was saved before" if last_good is None else f"the last checkpoint is that of step {last_good}"
    )
    raise NumericsError(
        code="numerics.weights",
        what=f"{len(bad)} of {len(finite)} weights hold values that are not finite: {', '.join(bad[:3])}",
        where=f"step {step}, before it was saved",
        why="such a checkpoint would take the place of one that can be used",
        state=f"nothing was saved; {saved}",
        do=do,
    )
