"""The equations of this project give what the papers' arithmetic gives, case by case."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from conformance.adapters import base, composed, ours
from conformance.compare import distances, flat
from conformance.make_cases import read
from rft_algos import advantages, surrogates
from rft_algos.evaluation import bootstrap, ranking
from rft_algos.losses import aggregation, kl, off_policy, preference, routers, step_labels, value
from rft_algos.quantisation import balanced, kmeans, residual, sinkhorn, vq_loss
from rft_algos.rewards import shaping

CASES = {case["id"]: case for case in read()}
COMPOSED = [name for name, case in CASES.items() if (case["kind"], case["name"]) in composed.COMPUTE]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
NOT_EQUATIONS = {
    # what is no equation of a paper: containers, where a clip acted, sums that metrics are made of
    *("Moments", "clip", "moments", "reinforce", "length_adaptive_lambda"),
    *(
        "LOG_RATIO_LIMIT",
        "ratio",
        "is_clamped",
        "select_clip_cov",
        "select_kl_cov",
        "token_covariances",
    ),
    *("straight_through", "weighted_sum", "estimates", "on_device_of"),
    *("mismatch_metrics", "mismatch_maxima", "effective_sample_size"),
    *("implicit_reward", "mean_logprobs", "log_odds"),
    # a threshold of a metric
    *("DEAD_SHARE", "dead_experts"),
    *("Clusters", "QuantisedLatents", "ResidualFit"),
    *("value_clipped", "value_moments", "ValueMoments", "RunningMoments"),
}


PUBLISHED: dict[Any, dict[str, Any]] = {
    advantages.decoupled_gae: {"lambd_policy": 0.95, "lambd_value": 1.0, "gamma": 1.0},
    advantages.length_adaptive_lambda: {"alpha": 0.05},
    advantages.cpgd: {"max_weight": 3.0},
    surrogates.dual_clip: {"dual": 3.0},
    surrogates.sapo: {"tau_positive": 1.0, "tau_negative": 1.05},
    surrogates.gspo: {"clip_low": 3e-4, "clip_high": 4e-4},
    surrogates.gspo_token: {"clip_low": 3e-4, "clip_high": 4e-4},
    surrogates.gmpo: {"clip_low": 0.4, "clip_high": 0.4},
    surrogates.dppo_tv: {"max_ratio": 20.0},
    surrogates.dppo_kl: {"max_ratio": 20.0},
    surrogates.select_clip_cov: {"low": 1.0, "high": 5.0, "fraction": 2e-4},
    surrogates.select_kl_cov: {"fraction": 2e-3},
    off_policy.truncate_tokens: {"cap": 2.0},
    off_policy.truncate_sequences: {"cap": 2.0},
    off_policy.mask_tokens: {"low": 0.5, "high": 5.0},
    preference.kto: {"desirable_weight": 1.0, "undesirable_weight": 1.0},
    shaping.cosine_length_reward: {
        "correct_short": 2.0,
        "correct_long": 1.0,
        "wrong_short": -10.0,
        "wrong_long": 0.0,
        "exceeded": -10.0,
    },
}
"""Settings that papers print, where a function of this project has them as defaults."""


def check(case: dict[str, Any], found: dict[str, Any], tolerance: float) -> None:
    assert found["status"] == "computed", found
    got = found["got"]
    apart = distances(got, case["expected"])
    assert apart
    assert apart.keys() == got.keys()
    assert all(d <= tolerance for d in apart.values()), apart
    if case["kind"] == "advantage" and not any(flat(list(case["expected"].values()))):
        assert not any(flat(list(got.values()))), "0 means exactly 0"


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_met(name: str) -> None:
    case = CASES[name]
    found = base.outcome(ours.COMPUTE, ours.REFUSED, case, torch.float64)
    check(case, found, TOLERANCES[torch.float64])
    assert found["got"].keys() == case["expected"].keys()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["float32"]])
def test_a_case_is_met_in_float32(name: str) -> None:
    case = CASES[name]
    check(case, base.outcome(ours.COMPUTE, ours.REFUSED, case, torch.float32), TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", COMPOSED)
def test_a_case_is_met_by_a_record_of_choices(name: str) -> None:
    case = CASES[name]
    check(case, base.outcome(composed.COMPUTE, composed.REFUSED, case, torch.float64), TOLERANCES[torch.float64])


def test_a_record_of_choices_is_put_to_most_cases() -> None:
    assert len(COMPOSED) > len(CASES) // 2


@pytest.mark.parametrize("function", PUBLISHED, ids=lambda function: function.__name__)
def test_defaults_are_the_published_settings(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in PUBLISHED[function]} == PUBLISHED[function]


def test_every_equation_has_cases() -> None:
    modules = {advantages: advantages.__all__, surrogates: surrogates.__all__}
    others = (off_policy, kl, preference, step_labels, aggregation, routers, shaping, value)
    others = (*others, kmeans, balanced, residual, sinkhorn, vq_loss, ranking, bootstrap)
    modules |= {m: [n for n, v in vars(m).items() if getattr(v, "__module__", "") == m.__name__] for m in others}
    names = {name for exported in modules.values() for name in exported if not name.startswith("_")}
    names = {name for name in names if not name.endswith(("_clipped", "_kept", "dual_clipped"))}
    assert names - NOT_EQUATIONS - {case["name"] for case in CASES.values()} == set()


def test_every_kind_of_case_has_the_awkward_ones() -> None:
    assert {case["kind"] for case in CASES.values()} == {
        *(
            "advantage",
            "aggregation",
            "correction",
            "kl",
            "preference",
            "quantisation",
            "ranking",
            "router",
            "shaping",
            "surrogate",
            "value",
        ),
    }
    for kind in ("advantage", "aggregation", "correction", "shaping", "surrogate", "value"):
        assert any("nan" in name for name, case in CASES.items() if case["kind"] == kind), f"no NaN in {kind}"
    for label in ("identical_0.1", "singleton", "ragged"):
        assert sum(name.endswith(label) for name in CASES) >= 4, label
