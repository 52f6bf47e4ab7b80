from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from rft_algos.algorithms import components
from rft_algos.algorithms.published import ALIASES, PUBLISHED, DrGrpo, Grpo, KlEstimator, PolicyAlgorithm, Sft, by_name
from rft_core.errors import OptionsError

NAN = float("nan")


def published(name: str) -> PolicyAlgorithm:
    return by_name(name)(max_tokens=100) if name in ("dr_grpo", "drgrpo") else by_name(name)()


# what the papers and reports say: advantage, surrogate, KL (estimator, place, weight), aggregation
SETTINGS = {
    "grpo": ("GroupNorm(epsilon=1e-06)", "PpoClip(low=0.2, high=0.2)", "k3 loss 0.04", "sequence_mean_token_mean"),
    "dr_grpo": ("GroupCentred()", "PpoClip(low=0.2, high=0.2)", "none", "fixed_length"),
    "dapo": ("GroupNorm(epsilon=1e-06)", "PpoClip(low=0.2, high=0.28)", "none", "token_mean"),
    "gspo": ("GroupNorm(epsilon=1e-06)", "Gspo(low=0.0003, high=0.0004)", "none", "sequence_mean_token_mean"),
    "gspo_token": (
        "GroupNorm(epsilon=1e-06)",
        "GspoToken(low=0.0003, high=0.0004)",
        "none",
        "sequence_mean_token_mean",
    ),
    "gmpo": ("GroupNorm(epsilon=1e-06)", "Gmpo(low=0.4, high=0.4)", "none", "sequence_mean_token_mean"),
    "cispo": ("GroupNorm(epsilon=1e-06)", "Cispo(low=None, high=4.0)", "none", "token_mean"),
    "sapo": (
        "GroupNorm(epsilon=1e-06)",
        "Sapo(tau_positive=1.0, tau_negative=1.05)",
        "none",
        "sequence_mean_token_mean",
    ),
    "cpgd": (
        "CpgdWeighted(weighting='clip_filter', epsilon=1e-06, max_weight=3.0)",
        "CpgdClip(low=0.2, high=0.2)",
        "none",
        "token_mean",
    ),
    "gae": (
        "Gae(gamma=1.0, lambd=0.95, turn_gamma=None, lambd_value=None, length_alpha=None)",
        "PpoClip(low=0.2, high=0.2)",
        "k1 reward 0.02",
        "token_mean",
    ),
    "reinforce": ("Returns(gamma=1.0)", "Reinforce()", "none", "sequence_mean_token_sum"),
    "reinforce++": ("Returns(gamma=1.0)", "PpoClip(low=0.2, high=0.2)", "k1 reward 0.01", "token_mean"),
    "reinforce_baseline": ("GroupCentred()", "PpoClip(low=0.2, high=0.2)", "k2 loss 0.01", "token_mean"),
    "rloo": ("LeaveOneOut()", "Reinforce()", "k1 reward 0.03", "sequence_mean_token_sum"),
    "remax": ("ReMax()", "Reinforce()", "none", "sequence_mean_token_sum"),
    "opo": ("Opo()", "Reinforce()", "none", "token_mean"),
    "lite_ppo": ("BatchStd(epsilon=1e-06)", "PpoClip(low=0.2, high=0.2)", "none", "token_mean"),
    "maxrl": ("MaxRl()", "ImportanceWeighted()", "none", "token_mean"),
    "gdpo": ("Gdpo(epsilon=1e-06, over_batch=True)", "PpoClip(low=0.2, high=0.2)", "none", "token_mean"),
    "pass_at_k": ("PassAtK(k=4)", "PpoClip(low=0.2, high=0.2)", "k3 loss 0.04", "sequence_mean_token_mean"),
    "best_of_group": (
        "BestOfGroup(epsilon=1e-06)",
        "PpoClip(low=0.2, high=0.2)",
        "k3 loss 0.04",
        "sequence_mean_token_mean",
    ),
    "gpg": ("Gpg()", "Reinforce()", "none", "token_mean"),
    "dppo": (
        "GroupNorm(epsilon=1e-06)",
        "Dppo(divergence='tv', low=0.2, high=0.2, max_ratio=20.0)",
        "none",
        "token_mean",
    ),
    "clip_cov": (
        "GroupNorm(epsilon=1e-06)",
        "ClipCov(low=0.2, high=0.2, covariance_low=1.0, covariance_high=5.0, fraction=0.0002)",
        "none",
        "token_mean",
    ),
    "kl_cov": ("GroupNorm(epsilon=1e-06)", "KlCov(coefficient=1.0, fraction=0.002)", "none", "token_mean"),
    "kimi": ("GroupCentred()", "Dro(tau=0.1)", "none", "token_mean"),
    "decoupled_ppo": ("GroupNorm(epsilon=1e-06)", "PpoClip(low=0.2, high=0.2)", "none", "sequence_mean_token_mean"),
    "process_grpo": (
        "ProcessGroupNorm(epsilon=1e-06)",
        "PpoClip(low=0.2, high=0.2)",
        "k3 loss 0.04",
        "sequence_mean_token_mean",
    ),
}
NORMALISED = {"gae", "reinforce++", "reinforce_baseline"}


def test_every_published_name_has_its_setting_written_down_here():
    assert {record.name for record in PUBLISHED} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_defaults_are_the_published_setting(name: str):
    record = published(name)
    kl = f"{record.kl_estimator} {record.kl_place} {record.kl_coef:g}" if record.needs_reference else "none"
    found = (repr(record.advantage), repr(record.surrogate), kl, record.aggregation)
    assert found == SETTINGS[name]
    assert record.name == name
    assert record.normalise_advantages == (name in NORMALISED)
    assert record.dynamic_sampling == (name == "dapo")
    assert record.overlong_buffer_share == (0.2 if name == "dapo" else 0.0)
    assert record.drift_coef == (0.01 if name == "cpgd" else 0.0)
    assert repr(record.correction) == ("TokenTis(cap=5.0, floor=0.0)" if name == "decoupled_ppo" else "NoCorrection()")
    assert (record.entropy_coef, record.high_entropy_fraction, record.advantage_clip) == (0.0, 1.0, 0.0)
    assert record.off_policy_delta is None


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases_give_the_same_record(alias: str, name: str):
    assert by_name(alias) is by_name(name)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(OptionsError) as caught:
        by_name("gropo")
    assert caught.value.problem.do == 'algorithm="grpo"'
    assert "'gropo'" in caught.value.problem.what
    assert "group_norm" in caught.value.problem.why


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("kl_place", "los", 'kl_place="loss"'),
        ("kl_estimator", "k4", "kl_estimator="),
        ("aggregation", "token-mean", 'aggregation="token_mean"'),
        ("kl_coef", -1.0, "kl_coef=0.0"),
        ("kl_coef", NAN, "kl_coef=0.0"),
        ("drift_coef", -1.0, "drift_coef=0.0"),
        ("entropy_coef", -0.1, "entropy_coef=0.0"),
        ("advantage_clip", -0.1, "advantage_clip=0.0"),
        ("high_entropy_fraction", 0.0, "high_entropy_fraction=0.2"),
        ("high_entropy_fraction", 1.1, "high_entropy_fraction=0.2"),
        ("overlong_buffer_share", 1.0, "overlong_buffer_share=0.2"),
        ("overlong_buffer_share", -0.1, "overlong_buffer_share=0.2"),
        ("max_tokens", 100, 'aggregation="fixed_length"'),
        ("aggregation", "fixed_length", "max_tokens=<the largest response length>"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_one_remedy(field: str, value: object, remedy: str):
    with pytest.raises(OptionsError) as caught:
        replace(Grpo(), **{field: value})
    problem = caught.value.problem
    assert problem.do.startswith(remedy)
    assert problem.code.startswith("algorithm.")
    assert "must be" in problem.why
    assert remedy.partition("=")[0] in problem.what + problem.why or field in problem.what


@pytest.mark.parametrize(
    ("estimator", "remedy"),
    [("k1+", "k1"), ("k3+", "k3"), ("unbiased_k3", "k3"), ("importance_weighted_k1", "k1")],
)
def test_an_estimator_that_differs_by_its_gradient_alone_is_refused_in_the_reward(estimator: KlEstimator, remedy: str):
    with pytest.raises(OptionsError, match='with kl_place="reward"') as caught:
        Grpo(kl_place="reward", kl_estimator=estimator)
    assert caught.value.problem.do == f'kl_estimator="{remedy}"'
    assert Grpo(kl_estimator=estimator).kl_place == "loss"


@pytest.mark.parametrize(
    ("choice", "numbers", "remedy"),
    [
        (components.GroupNorm, {"epsilon": 0.0}, "epsilon=1.0"),
        (components.BatchStd, {"epsilon": NAN}, "epsilon=1.0"),
        (components.BestOfGroup, {"epsilon": -1.0}, "epsilon=1.0"),
        (components.Gdpo, {"epsilon": float("inf")}, "epsilon=1.0"),
        (components.ProcessGroupNorm, {"epsilon": 0.0}, "epsilon=1.0"),
        (components.PassAtK, {"k": 0}, "k=4"),
        (components.CpgdWeighted, {"weighting": "sdt"}, 'weighting="std"'),
        (components.CpgdWeighted, {"max_weight": 0.0}, "max_weight=1.0"),
        (components.CpgdWeighted, {"epsilon": 0.0}, "epsilon=1.0"),
        (components.Returns, {"gamma": 1.1}, "gamma=1.0"),
        (components.Returns, {"gamma": -0.1}, "gamma=1.0"),
        (components.Gae, {"gamma": 1.1}, "gamma=1.0"),
        (components.Gae, {"lambd": -0.1}, "lambd=1.0"),
        (components.Gae, {"lambd_value": 1.1}, "lambd_value=1.0"),
        (components.Gae, {"length_alpha": 0.0}, "length_alpha=1.0"),
        (components.SecondMoment, {"limit": 0.0}, "limit=1.0"),
        (components.PpoClip, {"low": 1.0}, "low=0.2"),
        (components.PpoClip, {"low": 0.0}, "low=0.2"),
        (components.PpoClip, {"high": 0.0}, "high=1.0"),
        (components.DualClip, {"dual": 1.0}, "dual=3.0"),
        (components.DualClip, {"low": 2.0}, "low=0.2"),
        (components.Gmpo, {"high": -1.0}, "high=1.0"),
        (components.Cispo, {"low": 1.5}, "low=0.2"),
        (components.Cispo, {"high": 0.0}, "high=1.0"),
        (components.Sapo, {"tau_positive": 0.0}, "tau_positive=1.0"),
        (components.Sapo, {"tau_negative": 0.0}, "tau_negative=1.0"),
        (components.Dppo, {"divergence": "js"}, "divergence="),
        (components.Dppo, {"low": 0.0}, "low=1.0"),
        (components.ClipCov, {"covariance_high": 1.0}, "covariance_high=5.0"),
        (components.ClipCov, {"fraction": 0.0}, "fraction=0.2"),
        (components.ClipCov, {"low": 0.0}, "low=0.2"),
        (components.KlCov, {"coefficient": 0.0}, "coefficient=1.0"),
        (components.KlCov, {"fraction": 1.0}, "fraction=0.2"),
        (components.Dro, {"tau": 0.0}, "tau=1.0"),
        (components.TokenTis, {"cap": 0.9}, "cap=2.0"),
        (components.SequenceTis, {"cap": NAN}, "cap=2.0"),
        (components.TokenMis, {"low": 1.1}, "low=0.5"),
        (components.SequenceMis, {"high": 0.9}, "high=5.0"),
        (components.GeometricMis, {"low": -0.1}, "low=0.5"),
    ],
)
def test_a_number_of_a_choice_outside_its_range_is_refused(choice: type, numbers: dict[str, object], remedy: str):
    with pytest.raises(OptionsError) as caught:
        choice(**numbers)
    assert caught.value.problem.do.startswith(remedy)


@pytest.mark.parametrize(
    "choice",
    [
        components.Returns(gamma=0.0),
        components.Returns(gamma=1.0),
        components.Gae(lambd=0.0),
        components.Gae(lambd=1.0),
        components.PassAtK(k=1),
        components.TokenTis(cap=1.0),
        components.TokenMis(low=0.0, high=1.0),
        components.TokenMis(low=1.0),
    ],
)
def test_a_number_at_the_edge_of_its_range_is_taken(choice: object):
    assert choice == replace(choice)  # type: ignore[type-var]


def test_published_numbers_of_choices_that_no_record_shows():
    assert components.DualClip() == components.DualClip(low=0.2, high=0.2, dual=3.0)
    assert components.TokenTis() == components.TokenTis(cap=2.0)
    assert components.SequenceTis() == components.SequenceTis(cap=2.0)
    assert components.TokenMis() == components.TokenMis(low=0.5, high=5.0)
    assert components.SequenceMis() == components.SequenceMis(low=0.0, high=3.0)
    assert components.GeometricMis() == components.GeometricMis(low=0.999, high=1.001)


def test_fixed_length_takes_its_length():
    assert replace(Grpo(), aggregation="fixed_length", max_tokens=512).max_tokens == 512
    assert Sft(aggregation="fixed_length", max_tokens=512).max_tokens == 512
    assert Sft(aggregation="fixed_length", max_tokens=1).max_tokens == 1
    for broken in ({"aggregation": "fixed_length"}, {"max_tokens": 3}, {"aggregation": "mean"}):
        with pytest.raises(OptionsError):
            Sft(**broken)
    for length in (None, 0):
        with pytest.raises(OptionsError, match="max_tokens") as caught:
            DrGrpo(max_tokens=length)
        assert caught.value.problem.code == "algorithm.out_of_range"


def test_rewards_of_steps_and_a_penalty_in_the_reward_do_not_go_together():
    with pytest.raises(OptionsError, match="kl_place") as caught:
        Grpo(advantage=components.ProcessGroupNorm(), kl_place="reward")
    assert caught.value.problem.code == "algorithm.unknown_choice"
    assert Grpo(advantage=components.ProcessGroupNorm(), kl_place="none").advantage.needs_steps


@pytest.mark.parametrize(
    ("place", "coefficient", "needed"),
    [("loss", 0.1, True), ("reward", 0.1, True), ("none", 0.1, False), ("loss", 0.0, False)],
)
def test_a_reference_is_needed_where_it_changes_the_result(place: str, coefficient: float, needed: bool):
    assert replace(Grpo(), kl_place=place, kl_coef=coefficient).needs_reference is needed


def test_what_an_algorithm_needs_follows_from_its_choices():
    plain = Grpo(kl_place="none")
    assert not plain.needs_entropy
    assert not plain.needs_old_entropy
    assert not plain.needs_old_logprobs
    assert not plain.has_other_terms
    assert Grpo(entropy_coef=0.01).needs_entropy
    assert Grpo(high_entropy_fraction=0.2).needs_old_entropy
    assert Grpo(correction=components.TokenMis()).needs_old_logprobs
    assert Grpo(kl_place="reward", kl_coef=0.1).has_other_terms is False
    others = (
        Grpo(),
        replace(plain, entropy_coef=0.1),
        replace(plain, drift_coef=0.1),
        replace(plain, surrogate=components.Dro()),
        replace(plain, surrogate=components.KlCov()),
    )
    assert all(record.has_other_terms for record in others)


def test_what_choices_need_of_a_run():
    def needs(name: str) -> set[str]:
        advantage = published(name).advantage
        flags = ("compares_groups", "needs_values", "needs_greedy", "needs_components", "needs_steps")
        return {flag for flag in flags if getattr(advantage, flag)}

    assert needs("gae") == {"needs_values"}
    assert needs("remax") == {"needs_greedy"}
    assert needs("reinforce") == needs("reinforce++") == set()
    assert needs("gdpo") == {"compares_groups", "needs_components"}
    assert needs("process_grpo") == {"compares_groups", "needs_steps"}
    for name in ("grpo", "rloo", "opo", "maxrl", "gpg", "cpgd", "pass_at_k", "best_of_group", "lite_ppo"):
        assert needs(name) == {"compares_groups"}
    by_sequence = {record.name for record in PUBLISHED if published(record.name).surrogate.by_sequence}
    assert by_sequence == {"gspo", "gspo_token", "gmpo"}
    selective = {record.name for record in PUBLISHED if published(record.name).surrogate.is_selective}
    assert selective == {"clip_cov", "kl_cov"}


def test_records_are_frozen_and_a_subclass_adds_no_field():
    with pytest.raises(FrozenInstanceError):
        Grpo().kl_coef = 0.5  # type: ignore[misc]
    for record in PUBLISHED:
        assert {f.name for f in fields(record)} == {f.name for f in fields(PolicyAlgorithm)}


def test_coefficients_are_zero_where_their_term_is_absent():
    assert (PolicyAlgorithm().kl_coef, by_name("decoupled_ppo")().kl_coef) == (0.0, 0.0)


def test_a_second_clip_just_above_one_is_taken():
    assert components.DualClip(dual=1.1).dual == 1.1


def test_a_word_like_no_other_is_refused_with_one_that_is_allowed():
    with pytest.raises(OptionsError) as caught:
        components.check_choice("place", "###", ("loss", "reward", "none"))
    assert caught.value.problem.do in ('place="loss"', 'place="reward"', 'place="none"')
