"""Signs in the rollouts of a step that something around them is wrong: numbers for the detectors of a run's health.

Each is computed from what a step has anyway, and takes well under a millisecond a thousand responses.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence

from rft_trainer.records.rollouts import RolloutGroup, TrainingSample
from rft_trainer.scoring.samples import flat_rollouts, sample_name

SAME = 1e-3
"""Share of the range of a step's rewards up to which two of them count as the same: models compute with noise."""


def batch_signs(groups: Sequence[RolloutGroup]) -> dict[str, object]:
    """Return what the prompts of a step and the rewards of equal responses show.

    data/distinct_prompts      prompts with tokens of their own
    data/checksum              CRC-32 of the prompts in any order: the same batch again has the same
    reward/inconsistent        responses with another reward than an equal one to the same prompt, as a share of those
                               that have an equal one; absent without any
    """
    prompts = sorted(",".join(map(str, group.prompt.token_ids)) for group in groups)
    metrics: dict[str, object] = {
        "data/distinct_prompts": len(set(prompts)),
        "data/checksum": zlib.crc32("\n".join(prompts).encode()),
    }
    rewards = [rollout.reward for _, rollout in flat_rollouts(groups) if rollout.reward is not None]
    allowed = SAME * (max(rewards, default=0.0) - min(rewards, default=0.0))
    equal: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
    for number, group in enumerate(groups):
        for rollout in group.rollouts:
            # the same words in a conversation may have been answered in another way
            if rollout.reward is not None and not rollout.turns:
                equal[number, rollout.completion_ids].append(rollout.reward)
    several = [values for values in equal.values() if len(values) > 1]
    if several:
        other = sum(len(values) for values in several if max(values) - min(values) > allowed)
        metrics["reward/inconsistent"] = other / sum(map(len, several))
    return metrics


def credit_signs(groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample]) -> dict[str, object]:
    """Return how the samples of a step fit the rollouts that they are made of.

    policy/advantage_agreement     correlation of the samples' mean advantages with their rewards, both less their
                                   group's mean; absent where either does not differ
    data/trained_share             tokens in the loss over tokens that the policy sampled, of responses that ended by
                                   themselves; conversations apart, whose turns may be left out on purpose
    """
    by_name = {sample.sample_id: sample for sample in samples}
    xy = xx = yy = 0.0
    trained = sampled = 0
    for group in groups:
        pairs: list[tuple[float, float]] = []
        for rollout in group.rollouts:
            sample = by_name.get(sample_name(group, rollout))
            if sample is None or rollout.reward is None:
                continue
            pairs.append((rollout.reward, sample.mean_advantage))
            if rollout.finish_reason != "length" and not rollout.turns:
                trained += sample.num_loss_tokens
                sampled += rollout.num_sampled
        mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
        xy += sum((x - mean_x) * (y - mean_y) for x, y in pairs)
        # products, which become infinite where a power would raise
        xx += sum((x - mean_x) * (x - mean_x) for x, _ in pairs)
        yy += sum((y - mean_y) * (y - mean_y) for _, y in pairs)
    metrics: dict[str, object] = {}
    if 0 < xx * yy < math.inf:
        metrics["policy/advantage_agreement"] = xy / (xx * yy) ** 0.5
    if sampled:
        metrics["data/trained_share"] = trained / sampled
    return metrics
