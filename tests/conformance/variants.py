"""Named departures: what a result that is not the paper's is the result of.

A variant is a twin with something changed. A result that equals a variant of its equation gets its
name in the table; one that equals none gets its distance alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance import departures as changed
from conformance.compare import worst
from conformance.twins import TWINS, Twin, advantages, computed, kl, surrogates, tokens

TOLERANCE = 1e-6
"""Relative distance from which a result is another formula's. Single precision inside a trainer stays below it."""


BY_SEQUENCES = ("sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")
"""Aggregations that divide by the number of sequences."""
VARIANTS: dict[tuple[str, str], dict[str, Twin]] = {
    ("advantage", "group_norm"): {
        **changed.epsilons(advantages.group_norm, "1e-4", "1e-5", "1e-8", "1e-9"),
        **changed.raw(advantages.group_norm),
        "population standard deviation": changed.with_ddof(0),
        "baseline and deviation of the others": changed.leave_one_out_std,
    },
    ("advantage", "group_centred"): changed.raw(advantages.group_centred),
    ("advantage", "batch_std"): changed.epsilons(advantages.batch_std, "1e-4"),
    ("advantage", "leave_one_out"): changed.raw(advantages.leave_one_out),
    ("advantage", "opo"): changed.raw(advantages.opo),
    ("advantage", "gpg"): {"alpha counts sequences of non-zero reward": changed.gpg_by_reward},
    ("advantage", "gdpo_batch"): {
        "normalised over tokens": changed.gdpo_over_tokens,
        **changed.epsilons(advantages.gdpo_batch, "1e-4"),
    },
    ("advantage", "optimal_token_baseline"): {
        "a token that no other sequence reaches keeps its return": lambda inputs, params: tokens.optimal_token_baseline(
            inputs, params, alone_is_zero=False
        ),
    },
    ("advantage", "gae"): changed.ZEROED | changed.IGNORED,
    ("advantage", "discounted_returns"): changed.ZEROED | changed.IGNORED,
    ("advantage", "reinforce_pp"): {
        "population standard deviation": changed.whitened(tokens.discounted_returns, "returns", 0, "0"),
        "population standard deviation; observations are steps of value 0": changed.whitened(
            lambda i, p: changed.through_observations(i, p, True), "returns", 0, "0"
        ),
    },
    ("advantage", "reinforce_pp_baseline"): {
        "population standard deviation": changed.whitened(
            changed.spread_out(advantages.group_centred), "advantages", 0, "0"
        ),
        "a group of one keeps its reward": changed.whitened(
            changed.spread_out(changed.CENTRED_RAW), "advantages", 1, "1e-8"
        ),
    },
    ("surrogate", "ppo_clip"): {
        "a second clip at 3": surrogates.with_loss(changed.dual_at("3")),
        "log-ratios have no limit": surrogates.with_loss(changed.unclamped),
    },
    ("surrogate", "gmpo"): {"sequences without tokens count": changed.counted(TWINS["surrogate"]["gmpo"])},
    ("surrogate", "dppo_tv"): {"weights up to 3": changed.with_params(TWINS["surrogate"]["dppo_tv"], max_ratio=3.0)},
    ("surrogate", "dppo_kl"): {"weights up to 3": changed.with_params(TWINS["surrogate"]["dppo_kl"], max_ratio=3.0)},
    ("kl", "k1"): {"held in +-10, no gradient beyond": kl.with_gradient(changed.capped(kl.k1, "10"))},
    ("kl", "k2"): {"held in +-10, no gradient beyond": kl.with_gradient(changed.capped(kl.k2, "10"))},
    ("kl", "k3"): {
        "held in +-10, no gradient beyond": kl.with_gradient(changed.capped(kl.k3, "10")),
        "no limit": kl.with_gradient(changed.unbounded_k3),
    },
    ("kl", "straight_through"): {"the value is held at 10": kl.with_gradient(changed.capped_value)},
    ("kl", "unbiased_k3"): {
        "the value is that of k3, without r": changed.stopped_weight(None),
        "the value is that of k3 held at 10, without r": changed.stopped_weight("10"),
        "no limit": kl.with_gradient(lambda x, fixed, moved: moved.exp() * changed.unbounded_k3(x, fixed, moved)),
    },
    ("correction", "mask_sequences_geometric"): {"bounds on behaviour over old": changed.inverse_bounds(False)},
    ("correction", "masked_geometric_with_ratios"): {
        "bounds on behaviour over old": changed.inverse_bounds(True),
        "NaN where masked drops the sequence": changed.dropped_by_nan,
    },
    ("preference", "ipo"): {"log-probs per token": TWINS["preference"]["ipo_per_token"]},
    ("preference", "bco"): {
        "without the shift": lambda inputs, params: TWINS["preference"]["bco"](inputs, {**params, "shift": 0.0})
    },
    ("shaping", "soft_overlong_penalty"): {"grows on beyond the limit": changed.unheld_penalty},
    **{
        ("aggregation", name): {
            "micro-batches weigh the same": changed.by_micro_batch(name),
            **({"sequences without tokens count": changed.counted(twin)} if name in BY_SEQUENCES else {}),
        }
        for name, twin in TWINS["aggregation"].items()
    },
}
VARIANTS["aggregation", "fixed_length"]["divided by the width of the padded batch"] = changed.by_width(
    TWINS["aggregation"]["fixed_length"]
)


def name_of(case: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The variant that a result is of, the nearest one where several are near enough, or None."""
    twins = VARIANTS.get((case["kind"], case["name"]), {})
    apart = {label: worst(found, computed(twin, case["inputs"], case["params"])) for label, twin in twins.items()}
    near = {label: d for label, d in apart.items() if d <= TOLERANCE}
    return min(near, key=lambda label: near[label]) if near else None
