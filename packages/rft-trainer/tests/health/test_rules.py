"""Both sides of every detector: rows of which it is true, and rows that are only near it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rft_trainer.health.detectors import DETECTORS
from rft_trainer.health.watch import replay

Rows = list[dict[str, Any]]


def rows(count: int, **metrics: Any) -> Rows:
    """Rows of a run of rl that trains; a metric is a value, or a function of the step."""
    found: Rows = []
    for step in range(1, count + 1):
        row = {
            "step": step,
            "reward/mean": 0.3 + 0.01 * (step % 7),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/groups_with_signal": 0.6,
            "policy/gradient_norm": 1.0 + 0.1 * (step % 3),
            "policy/learning_rate": 1e-5,
            "policy/updates": 1,
            "policy/updates_refused": 0,
            "policy/entropy": 1.0,
            "data/prompts": 8,
            "data/samples": 32,
        }
        given = {name.replace("__", "/"): value(step) if callable(value) else value for name, value in metrics.items()}
        found.append({name: value for name, value in (row | given).items() if value is not ...})
    return found


def names(found: Rows, **more: Any) -> list[str]:
    return [alarm.name for alarm in replay(found, **more)]


SOLVED = {"reward__mean": lambda step: min(1.0, 0.1 * step), "reward__groups_with_signal": 0.05}
TRUE: dict[str, tuple[str, int, Rows]] = {
    "a reward of 0": ("constant_reward", 20, rows(20, reward__mean=0.0, reward__max=0.0, policy__gradient_norm=0.0)),
    "no gradient": ("no_gradient", 20, rows(20, policy__gradient_norm=0.0)),
    "refused updates": ("updates_refused", 20, rows(20, policy__updates_refused=1)),
    "few groups differ": ("flat_groups", 10, rows(12, reward__groups_with_signal=0.05)),
    "hardly any reward": ("reward_zero", 11, rows(12, reward__mean=lambda step: 0.3 if step == 1 else 0.01)),
    "a solved task": ("reward_saturated", 19, rows(22, **SOLVED)),
    "failing rewards": ("reward_errors", 10, rows(10, reward__unscored=0.05)),
    "rewards of other responses": ("noisy_reward", 5, rows(9, reward__inconsistent=0.5)),
    "all cut": ("never_ends", 5, rows(9, completion__truncated_share=1.0)),
    "many cut": ("truncation", 10, rows(12, completion__truncated_share=0.6)),
    "longer and longer": ("length_drift", 13, rows(20, completion__length_mean=lambda n: 20.0 if n < 11 else 90.0)),
    "shorter": ("length_drift", 15, rows(20, completion__length_mean=lambda n: 90.0 if n < 11 else 20.0)),
    "one batch": ("repeated_batch", 4, rows(8, data__distinct_prompts=8, data__checksum=7, data__epoch=0)),
    "few prompts": (
        "repeated_batch",
        4,
        rows(8, data__distinct_prompts=2, data__checksum=lambda step: step, data__epoch=0),
    ),
    "half of the tokens": ("wrong_mask", 3, rows(5, data__trained_share=0.5)),
    "a loss that is no number": ("loss_not_finite", 3, rows(3, policy__loss=lambda n: math.nan if n == 3 else 0.1)),
    "null in a file": ("loss_not_finite", 1, rows(1, dpo__loss=None)),
    "a loss of demonstrations that is no number": ("loss_not_finite", 1, rows(20, sft__loss=math.nan)),
    "far a step": ("policy_drift", 3, rows(5, policy__kl=0.5)),
    "far in all": ("far_from_reference", 5, rows(5, kl__reference=3.0)),
    "held": ("divergence_holds", 5, rows(5, kl__pull=4.0)),
    "no entropy": ("entropy_collapse", 15, rows(20, policy__entropy=lambda n: 1.0 if n < 11 else 0.01)),
    "all clipped": ("clipping", 5, rows(5, policy__clip_fraction=0.5)),
    "the other sign": ("advantage_sign", 3, rows(5, policy__advantage_agreement=-1.0)),
    "one expert": (
        "router_collapse",
        10,
        rows(10, router__entropy=0.3, router__max_violation_layer_0=1.0, router__max_violation_layer_1=6.0),
    ),
    "one expert of one layer": (
        "router_collapse",
        14,
        rows(
            20,
            router__entropy=0.7,
            router__entropy_layer_0=0.9,
            router__entropy_layer_1=lambda n: 0.9 if n < 5 else 0.1,
            router__entropy_layer_2=lambda n: 0.9 if n < 5 else 0.3,
        ),
    ),
    "a jump": ("gradient_spike", 9, rows(12, policy__gradient_norm=lambda n: 1e3 if n == 9 else 1.0)),
    "growing gradients": ("gradient_exploding", 13, rows(15, policy__gradient_norm=lambda n: 1.0 if n < 11 else 30.0)),
    "vanishing gradients": ("gradient_small", 15, rows(20, policy__gradient_norm=lambda n: 1.0 if n < 11 else 1e-6)),
    "no rate": ("no_learning_rate", 5, rows(5, policy__learning_rate=0.0)),
    "no change": ("frozen_weights", 3, rows(5, policy__weight_change=0.0)),
    "a large step": ("step_too_large", 3, rows(5, policy__weight_change=0.5)),
    "another engine": ("engine_gap", 3, rows(5, engine__logprob_gap=0.08)),
    "another engine's experts": ("router_gap", 3, rows(5, engine__router_agreement=lambda n: 0.8 if n == 3 else ...)),
    "old weights": ("staleness", 5, rows(5, **{"async__staleness_mean": 6.0})),
    "a tail": ("generation_tail", 20, rows(20, time__engine_limit="tail")),
    "a leak of memory": ("memory_slope", 50, rows(60, memory__rss_mib=lambda n: 1000.0 + 10 * n)),
    "a leak of another rank": (
        "memory_slope",
        50,
        rows(
            60,
            memory__rss_mib=1000.0,
            memory__growth_mib=lambda n: ... if n < 50 else 300.0,
            memory__growth_rank=lambda n: ... if n < 50 else 2,
        ),
    ),
    "a slow leak": (
        "slow_memory_growth",
        231,
        rows(
            240,
            memory__slow_growth_mib=lambda n: ... if n < 200 else n - 214.0,
            memory__slow_growth_rank=lambda n: ... if n < 200 else 3,
        ),
    ),
    "a leak that only a thousand steps show": (
        "slow_memory_growth",
        25,
        rows(
            30,
            memory__slow_growth_mib=3.0,
            memory__slow_growth_rank=3,
            memory__long_growth_mib=lambda n: n - 8.5,
            memory__long_growth_rank=3,
        ),
    ),
    "tensors that another GPU keeps": (
        "device_memory_slope",
        50,
        rows(
            60,
            memory__peak_device_mib=9.0,
            memory__device_growth_mib=lambda n: ... if n < 50 else 2000.0,
            memory__device_growth_rank=lambda n: ... if n < 50 else 1,
        ),
    ),
    "a leak on the GPU": ("device_memory_slope", 50, rows(60, memory__peak_device_mib=lambda n: 1000.0 + 30 * n)),
    "waiting for data": (
        "data_wait",
        30,
        rows(30, time__step=1.0, time__data=0.5, time__share_data=0.5, time__train=0.5),
    ),
    "a slow rank": (
        "straggler",
        10,
        rows(12, time__step=1.0, time__slowest_rank=3, time__slowest_rank_ratio=2.0),
    ),
    "slower steps": (
        "slower",
        58,
        rows(60, time__step=1.0, time__tokens_per_second=lambda n: 100.0 if n < 56 else 20.0),
    ),
    "a loss that rises": (
        "loss_rose",
        10,
        [{"step": n, "sft/loss": 0.7 if n == 1 else 2.6, "policy/learning_rate": 1.0} for n in range(1, 11)],
    ),
    "rewards that collapse": (
        "reward_fell",
        15,
        rows(16, reward__mean=lambda n: 0.7 if n < 13 else 0.0, data__prompts=8),
    ),
    "no signal": ("no_signal", 20, rows(20, reward__groups_with_signal=0.0, policy__gradient_norm=0.0)),
}


@pytest.mark.parametrize("case", TRUE)
def test_it_is_said_at_the_step_at_which_it_became_true(case: str) -> None:
    name, step, found = TRUE[case]
    (alarm,) = [one for one in replay(found) if one.name == name]
    assert alarm.step == step
    assert replay(found[: step - 1], []) == [] or name not in names(found[: step - 1])
    assert alarm.what
    assert alarm.do


def test_steps_that_become_slower_are_told_with_the_phase_that_has_grown() -> None:
    times = {"time__tokens_per_second": lambda n: 100.0 if n < 56 else 20.0, "time__train": 0.5}
    found = rows(60, time__step=1.0, time__reward=lambda n: 0.1 if n < 56 else 4.1, **times)
    (alarm,) = [one for one in replay(found) if one.name == "slower"]
    assert alarm.what.endswith("100 -> 20 tokens a second; scoring took 0.1 -> 4.1 s of a step")
    assert "--reward_workers" in alarm.do


def test_a_jump_is_told_in_plain_numbers() -> None:
    (alarm,) = [one for one in replay(TRUE["a jump"][2]) if one.name == "gradient_spike"]
    assert alarm.what == "the gradient norm was 1,000, 1,000 times the median 1 of the steps before"
    small = rows(12, policy__gradient_norm=lambda n: 0.5 if n == 9 else 0.004)
    (alarm,) = [one for one in replay(small) if one.name == "gradient_spike"]
    assert alarm.what == "the gradient norm was 0.5, 125 times the median 0.004 of the steps before"


@pytest.mark.parametrize(
    ("rate", "do"),
    [
        (1e-5, "--amp in place of --bf16"),
        (1e-12, "--actor_learning_rate 1e-09: a step of 1e-12 is lost"),
    ],
)
def test_weights_that_do_not_change_have_one_remedy_that_follows_from_the_learning_rate(rate: float, do: str) -> None:
    found = rows(5, policy__weight_change=0.0, policy__learning_rate=rate)
    (alarm,) = [one for one in replay(found) if one.name == "frozen_weights"]
    assert alarm.do.startswith(do)
    assert " or weights" not in alarm.do


def test_every_detector_has_a_case() -> None:
    assert {name for name, _, _ in TRUE.values()} | {"held_out_gap"} == {detector.name for detector in DETECTORS}


QUIET: dict[str, Rows] = {
    "a run that trains": rows(80),
    "ranks that are slowest in turn": rows(
        20, time__step=1.0, time__slowest_rank=lambda step: step % 2, time__slowest_rank_ratio=2.0
    ),
    "a first rank that writes files": rows(20, time__step=0.05, time__slowest_rank=0, time__slowest_rank_ratio=3.0),
    "a run without a metric": [{"step": step} for step in range(1, 70)],
    "a task that is being solved": rows(9, reward__mean=lambda step: 0.1 * step),
    "some groups differ": rows(30, reward__groups_with_signal=0.12),
    "prompts of one batch, an episode a step": rows(
        20, data__distinct_prompts=8, data__checksum=7, data__epoch=lambda step: step
    ),
    "most prompts differ": rows(
        20, data__distinct_prompts=5, data__checksum=lambda step: step, data__epoch=lambda step: step // 5
    ),
    "noise of a reward in few responses": rows(20, reward__inconsistent=0.1),
    "cut at first": rows(20, completion__truncated_share=lambda step: 1.0 if step < 5 else 0.4),
    "short responses that double": rows(30, completion__length_mean=lambda step: 2.0 if step < 11 else 8.0),
    "a rate that begins at 0": rows(20, policy__learning_rate=lambda step: 1e-6 * max(0, step - 4)),
    "a step without an update": rows(20, policy__weight_change=0.0, policy__gradient_norm=0.0)[:19],
    "a certain policy that is right": rows(
        30, policy__entropy=lambda n: 1.0 if n < 11 else 0.01, reward__mean=lambda n: 0.5 if n < 11 else 0.95
    ),
    "norms of silent steps": rows(20, policy__gradient_norm=lambda step: 0.0 if step % 2 else 1.0),
    "growth that is not steady": rows(240, memory__growth_mib=0.0, memory__slow_growth_mib=0.0),
    "a little steady growth": rows(
        240, memory__growth_mib=9.0, memory__growth_rank=1, memory__slow_growth_mib=15.0, memory__slow_growth_rank=1
    ),
    "layers that are uneven in turn": rows(
        20,
        router__entropy=0.5,
        router__entropy_layer_0=lambda n: 0.4 if n % 2 else 0.6,
        router__entropy_layer_1=lambda n: 0.6 if n % 2 else 0.4,
    ),
    "one large allocation": rows(60, memory__rss_mib=lambda step: 1000.0 if step < 30 else 2000.0),
    "time of an evaluation": rows(
        60,
        time__step=lambda step: 1.0 if step < 56 else 9.0,
        time__eval=lambda step: 0.0 if step < 56 else 8.0,
        time__tokens_per_second=lambda step: 90.0 if step < 56 else 10.0,
    ),
    "a model from nothing": [
        {"step": step, "sft/loss": 5.0 - 0.1 * step, "policy/weight_change": 0.4} for step in range(1, 20)
    ],
    "a critic that is trained alone": rows(20, policy__gradient_norm=math.nan, policy__updates=0),
}


@pytest.mark.parametrize("case", QUIET)
def test_nothing_is_said_of_a_run_that_is_well(case: str) -> None:
    assert names(QUIET[case]) == []


def test_rewards_of_training_rows_are_compared_with_the_evaluation_just_before() -> None:
    found = rows(30, reward__mean=0.9)
    held_out = {"step": 10, "eval/reward": 0.2}
    (alarm,) = [one for one in replay(found, [held_out]) if one.name == "held_out_gap"]
    assert alarm.step == 11
    assert "0.9 in training, 0.2 on held-out rows" in alarm.what
    assert "held_out_gap" not in names(found, evaluations=[held_out | {"eval/reward": 0.7}])
    assert "held_out_gap" not in names(found, evaluations=[held_out | {"step": 0}])
    assert "held_out_gap" not in names(found, evaluations=[held_out | {"step": 30}])


@pytest.mark.parametrize("name", ["memory_slope", "device_memory_slope"])
def test_memory_that_grows_with_the_responses_is_laid_to_them(name: str) -> None:
    memory = "memory__rss_mib" if name == "memory_slope" else "memory__peak_device_mib"

    def remedy(length: float) -> str:
        grown = rows(60, **{memory: lambda n: 1000.0 + 30 * n, "completion__length_mean": lambda n: 100.0 + length * n})
        (alarm,) = [one for one in replay(grown) if one.name == name]
        return alarm.do

    assert remedy(2.0).startswith(
        "a smaller --generate_max_len: the responses have grown with it, from 111 to 191 tokens"
    )
    other = remedy(0.1)
    assert "look at what " in other
    # of a run whose code is all this program's own, no reward is suspected
    assert "--reward" not in other


def test_a_leak_is_told_with_its_rank_its_rate_and_the_steps_until_nothing_is_left() -> None:
    known = {"memory__growth_mib": 300.0, "memory__growth_rank": 2, "memory__growth_steps_left": 1326.0}
    grown = {name: lambda n, value=value: ... if n < 50 else value for name, value in known.items()}

    def said(num_steps: object) -> str:
        (alarm,) = [one for one in replay(rows(50, num_steps=num_steps, **grown)) if one.name == "memory_slope"]
        assert alarm.value == 7.5
        return alarm.what

    told = (
        "the memory of the process of rank 2 grows by 7.5 MiB a step: by 300 MiB in the last 50 steps; what is free "
        "now would be used up in about 1,300 steps"
    )
    assert said(...) == said(9000) == told
    assert said(500) == f"{told}, and 450 are left to train"
    long = {"memory__slow_growth_mib": 0.0, "memory__long_growth_mib": 20.0, "memory__long_growth_rank": 1}
    (alarm,) = [one for one in replay(rows(2, **long)) if one.name == "slow_memory_growth"]
    assert (
        alarm.what == "the memory of the process of rank 1 grows by 0.025 MiB a step: by 20 MiB in the last 1000 steps"
    )


def test_a_jump_is_told_with_the_rows_that_have_the_largest_gradients() -> None:
    found = rows(12, policy__gradient_norm=lambda n: 1e3 if n == 9 else 1.0)
    found[8]["policy/largest_rows"] = "3:5 (norm 990), 3:1 (norm 1.2)"
    (alarm,) = [one for one in replay(found) if one.name == "gradient_spike"]
    assert alarm.what.endswith("; the largest gradients are those of 3:5 (norm 990), 3:1 (norm 1.2)")


@pytest.mark.parametrize(
    ("case", "which"),
    [
        ("one expert", "; the worst is layer 1: the entropy of their loads is 30%"),
        ("one expert of one layer", " of layer 1: the entropy of their loads is 10%"),
    ],
)
def test_the_worst_layer_of_a_router_is_named(case: str, which: str) -> None:
    (alarm,) = replay(TRUE[case][2])
    assert alarm.what == f"most tokens go to few experts{which} of an even spread's"


def test_a_reward_of_many_responses_is_said_after_few_steps() -> None:
    found = rows(3, reward__mean=0.0, reward__max=0.0, data__samples=512, policy__gradient_norm=0.0)
    assert [(alarm.name, alarm.step) for alarm in replay(found)] == [("constant_reward", 3)]
