from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from rft_algos.algorithms import Grpo, PolicyAlgorithm, Sft, by_name
from rft_algos.errors import OptionsError


def test_grpo_defaults_are_the_published_setting():
    record = Grpo()
    assert (record.advantage, record.surrogate, record.aggregation) == (
        "group_norm",
        "ppo_clip",
        "sequence_mean_token_mean",
    )
    assert (record.kl_estimator, record.kl_place, record.kl_coef) == ("k3", "loss", 0.04)
    assert (record.clip_low, record.clip_high, record.epsilon, record.entropy_coef) == (0.2, 0.2, 1e-6, 0.0)


@pytest.mark.parametrize("name", ["grpo", "group_norm"])
def test_names_give_the_record(name: str):
    assert by_name(name) == Grpo()
    assert by_name(name).name == "grpo"


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
        ("surrogate", "ppo", 'surrogate="ppo_clip"'),
        ("advantage", "groupnorm", 'advantage="group_norm"'),
        ("clip_low", 1.0, "clip_low=0.2"),
        ("clip_low", 0.0, "clip_low=0.2"),
        ("clip_high", -0.1, "clip_high=0.2"),
        ("kl_coef", -1.0, "kl_coef=0.0"),
        ("kl_coef", float("nan"), "kl_coef=0.0"),
        ("entropy_coef", -0.1, "entropy_coef=0.0"),
        ("epsilon", 0.0, "epsilon=1e-6"),
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


def test_fixed_length_takes_its_length():
    assert replace(Grpo(), aggregation="fixed_length", max_tokens=512).max_tokens == 512
    assert Sft(aggregation="fixed_length", max_tokens=512).max_tokens == 512
    for broken in ({"aggregation": "fixed_length"}, {"max_tokens": 3}, {"aggregation": "mean"}):
        with pytest.raises(OptionsError):
            Sft(**broken)


@pytest.mark.parametrize(
    ("place", "coefficient", "needed"),
    [("loss", 0.1, True), ("reward", 0.1, True), ("none", 0.1, False), ("loss", 0.0, False)],
)
def test_a_reference_is_needed_where_it_changes_the_result(place: str, coefficient: float, needed: bool):
    assert replace(Grpo(), kl_place=place, kl_coef=coefficient).needs_reference is needed


def test_entropy_is_needed_where_it_changes_the_result():
    assert not Grpo().needs_entropy
    assert Grpo(entropy_coef=0.01).needs_entropy


def test_records_are_frozen_and_a_subclass_adds_no_field():
    with pytest.raises(FrozenInstanceError):
        Grpo().clip_low = 0.5  # type: ignore[misc]
    assert {f.name for f in fields(Grpo)} == {f.name for f in fields(PolicyAlgorithm)}
