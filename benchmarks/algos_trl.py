"""The cases of `algos.py` that verl has no function for: methods of TRL's GRPOTrainer, called on what they read."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from algos_sides import Batch, Case, Results
from trl import GRPOTrainer

from rft_algos.losses import off_policy
from rft_algos.packed import token_selection

PEER = "trl"
PACKAGES = ("trl", "torch", "transformers")


def cases(batch: Batch) -> Iterator[Case]:
    """All cases, one at a time."""
    if batch.suffix:
        return
    yield _entropy_mask(batch)
    yield _off_policy_mask(batch)


def _entropy_mask(batch: Batch) -> Case:
    entropy_BT = batch.padded(batch.entropy_T)
    same: Any = lambda values, **_: values  # noqa: E731
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(pad_across_processes=same, gather=same))

    def peer() -> Results:
        return (GRPOTrainer.get_high_entropy_mask(trainer, entropy_BT, batch.mask_BT, 0.8),)

    def as_many() -> Results:
        (kept_BT,) = peer()
        assert kept_BT is not None
        return (token_selection.largest(batch.entropy_T, batch.mask_T, int(kept_BT.sum())),)

    return Case(
        name="high_entropy_tokens",
        peer_name="get_high_entropy_mask",
        ours=lambda: (token_selection.high_entropy_tokens(batch.entropy_T, batch.mask_T, fraction=0.2),),
        peer=peer,
        gate=(as_many, peer),
        departure="a quantile between tokens may keep one more: compared at the number that it keeps",
        bytes_per_token=4 + 1,
    )


def _off_policy_mask(batch: Batch) -> Case:
    ids_T, mask_T, mask_BT = batch.segment_ids_T, batch.mask_T, batch.mask_BT
    fallen_T = batch.behaviour_logprobs_T - batch.logprobs_T
    now_BT, behaviour_BT = batch.padded(batch.logprobs_T), batch.padded(batch.behaviour_logprobs_T)
    advantages_N1 = batch.padded(batch.advantages_T)[:, :1]
    delta = float(fallen_T.mean())

    def ours() -> Results:
        difference_T = batch.behaviour_logprobs_T - batch.logprobs_T
        return (off_policy.off_policy_sequence_mask(difference_T, batch.advantages_T, mask_T, ids_T, delta),)

    def peer() -> Results:
        kept_N1 = GRPOTrainer.get_off_policy_mask(advantages_N1, now_BT, behaviour_BT, mask_BT, delta)
        return (kept_N1.expand_as(mask_BT),)

    return Case(
        name="off_policy_sequence_mask",
        peer_name="get_off_policy_mask",
        ours=ours,
        peer=peer,
        departure="",
        bytes_per_token=4 * 3,
    )
