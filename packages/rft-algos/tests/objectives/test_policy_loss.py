from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.algorithms.components import PpoClip
from rft_algos.algorithms.published import Aggregation, Grpo, KlEstimator, PolicyAlgorithm, Sft
from rft_algos.input_checks import InputError
from rft_algos.objectives import LossOutput, policy_loss, supervised_loss, token_weights
from rft_algos.objectives.policy_loss import total_and_count

MAX_TOKENS = 13
AGGREGATIONS: tuple[Aggregation, ...] = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "fixed_length",
)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


@dataclass
class Sequence:
    """A ragged sequence as plain numbers, one entry a token."""

    mask: list[bool]
    logprobs: list[float]
    old: list[float]
    reference: list[float]
    entropy: list[float]
    advantage: float


def random_sequences(seed: int, num: int) -> list[Sequence]:
    generator = random.Random(seed)
    sequences: list[Sequence] = []
    for _ in range(num):
        length = generator.randint(1, 7)
        old = [-generator.expovariate(0.7) for _ in range(length)]
        sequences.append(
            Sequence(
                mask=[generator.random() < 0.7 for _ in range(length)],
                logprobs=[lp + generator.gauss(0, 0.4) for lp in old],
                old=old,
                reference=[lp + generator.gauss(0, 0.8) for lp in old],
                entropy=[generator.uniform(0, 3) for _ in range(length)],
                advantage=generator.gauss(0, 1),
            )
        )
    return sequences


def record_for(aggregation: Aggregation, **choices: object) -> Grpo:
    length = MAX_TOKENS if aggregation == "fixed_length" else None
    return replace(Grpo(), aggregation=aggregation, max_tokens=length, **choices)  # type: ignore[arg-type]


def row(sequences: list[Sequence], field: str) -> torch.Tensor:
    return torch.tensor([value for s in sequences for value in getattr(s, field)], dtype=torch.float64)


def loss_of(
    record: PolicyAlgorithm, sequences: list[Sequence], whole: list[Sequence], leaf: torch.Tensor | None = None
) -> LossOutput:
    lengths = torch.tensor([len(s.mask) for s in sequences])
    return policy_loss(
        record,
        logprobs_T=row(sequences, "logprobs") if leaf is None else leaf,
        old_logprobs_T=row(sequences, "old"),
        reference_logprobs_T=row(sequences, "reference"),
        advantages_T=torch.tensor([s.advantage for s in sequences], dtype=torch.float64).repeat_interleave(lengths),
        loss_mask_T=torch.tensor([kept for s in sequences for kept in s.mask]),
        segment_ids_T=torch.arange(len(sequences)).repeat_interleave(lengths),
        entropy_T=row(sequences, "entropy"),
        num_loss_tokens=sum(sum(s.mask) for s in whole),
        num_sequences=len(whole),
    )


def plain_kl(estimator: str, x: float, r: float) -> tuple[float, float]:
    """An estimate and its slope in log pi, x = log(pi / pi_ref) and r = pi / pi_old."""
    k3 = math.exp(-x) - 1 + x
    return {
        "k1": (x, 1.0),
        "k2": (x * x / 2, x),
        "k3": (k3, 1 - math.exp(-x)),
        "abs": (abs(x), math.copysign(1.0, x)),
        "k1+": (x, x),
        "k3+": (k3, x),
        "unbiased_k3": (r * k3, r * x),
        "importance_weighted_k1": (r * x, r * x + r),
    }[estimator]


def plain_token(record: PolicyAlgorithm, s: Sequence, t: int) -> float:
    r, a = math.exp(s.logprobs[t] - s.old[t]), s.advantage
    clip = record.surrogate
    assert isinstance(clip, PpoClip)
    value = -min(a * r, a * max(1 - clip.low, min(1 + clip.high, r)))
    if record.kl_place == "loss":
        value += record.kl_coef * plain_kl(record.kl_estimator, s.logprobs[t] - s.reference[t], r)[0]
    return value - record.entropy_coef * s.entropy[t]


def plain_loss(record: PolicyAlgorithm, sequences: list[Sequence]) -> float:
    rows = [[plain_token(record, s, t) for t in range(len(s.mask)) if s.mask[t]] for s in sequences]
    num_tokens, num_sequences = sum(map(len, rows)), len(rows)
    sums = [math.fsum(values) for values in rows]
    match record.aggregation:
        case "token_mean":
            return math.fsum(sums) / num_tokens if num_tokens else 0.0
        case "sequence_mean_token_mean":
            return math.fsum(s / len(v) for s, v in zip(sums, rows, strict=True) if v) / num_sequences
        case "sequence_mean_token_sum":
            return math.fsum(sums) / num_sequences
        case "fixed_length":
            return math.fsum(sums) / num_sequences / MAX_TOKENS


# the loss


@every_aggregation
@given(
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(get_args(KlEstimator)),
    place=st.sampled_from(["loss", "none"]),
    entropy_coef=st.sampled_from([0.0, 0.3]),
)
def test_loss_equals_a_plain_twin(aggregation: Aggregation, seed: int, estimator: str, place: str, entropy_coef: float):
    record = record_for(
        aggregation,
        kl_estimator=estimator,
        kl_place=place,
        kl_coef=0.7,
        entropy_coef=entropy_coef,
        surrogate=PpoClip(low=0.2, high=0.28),
    )
    sequences = random_sequences(seed, 5)
    assert float(loss_of(record, sequences, sequences).loss) == pytest.approx(plain_loss(record, sequences), abs=1e-12)


def test_hand_computed_grpo_loss():
    # two sequences of 1 and 2 tokens at the old policy: surrogate -A, k3 of ln 2 is 1/2 - 1 + ln 2
    one = Sequence([True], [-1.0], [-1.0], [-1.0], [0.0], advantage=2.0)
    two = Sequence([True, True], [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0 - math.log(2)], [0.0, 0.0], advantage=-1.0)
    output = loss_of(Grpo(), [one, two], [one, two])
    k3 = math.log(2) - 0.5
    assert float(output.loss) == pytest.approx((-2.0 + (1.0 + 0.04 * k3 / 2)) / 2, rel=1e-12)
    assert float(output.metrics["policy/surrogate"][0]) == pytest.approx((-2.0 + 1.0) / 2)
    assert float(output.metrics["kl/loss"][0]) == pytest.approx(0.04 * k3 / 4)


@every_aggregation
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 4))
def test_loss_gradient_and_metrics_do_not_depend_on_how_the_batch_is_cut(aggregation: Aggregation, seed: int, cut: int):
    record = record_for(aggregation, kl_coef=0.5, entropy_coef=0.1)
    sequences = random_sequences(seed, 6)
    leaf = row(sequences, "logprobs").requires_grad_()
    whole = loss_of(record, sequences, sequences, leaf)
    (gradient,) = torch.autograd.grad(whole.loss, leaf)

    order = random.Random(seed).sample(range(6), 6)
    starts = [sum(len(s.mask) for s in sequences[:index]) for index in range(6)]
    total, totals = 0.0, dict.fromkeys(whole.metrics, (0.0, 0.0))
    for first in range(0, 6, cut):
        chosen = order[first : first + cut]
        part = [sequences[index] for index in chosen]
        part_leaf = row(part, "logprobs").requires_grad_()
        output = loss_of(record, part, sequences, part_leaf)
        (part_gradient,) = torch.autograd.grad(output.loss, part_leaf)
        total += float(output.loss.detach())
        totals = {k: (t + float(output.metrics[k][0]), c + float(output.metrics[k][1])) for k, (t, c) in totals.items()}
        places = [starts[index] + t for index in chosen for t in range(len(sequences[index].mask))]
        torch.testing.assert_close(part_gradient, gradient[places], rtol=1e-12, atol=1e-14)

    assert total == pytest.approx(float(whole.loss.detach()), rel=1e-12, abs=1e-12)
    for name, (metric, count) in whole.metrics.items():
        assert totals[name] == pytest.approx((float(metric), float(count)), rel=1e-12, abs=1e-12), name


@every_aggregation
@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_whatever_stands_at_masked_tokens_changes_nothing(aggregation: Aggregation, estimator: str):
    record = record_for(aggregation, kl_coef=0.5, entropy_coef=0.1, kl_estimator=estimator)
    clean = random_sequences(3, 5)
    dirty = random_sequences(3, 5)
    for s in dirty:
        for t, kept in enumerate(s.mask):
            if not kept:
                s.logprobs[t], s.old[t], s.reference[t], s.entropy[t] = math.nan, -math.inf, math.nan, math.inf
    results: list[tuple[LossOutput, torch.Tensor]] = []
    for sequences in (clean, dirty):
        leaf = row(sequences, "logprobs").requires_grad_()
        output = loss_of(record, sequences, sequences, leaf)
        results.append((output, torch.autograd.grad(output.loss, leaf)[0]))
    (expected, gradient), (found, dirty_gradient) = results
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(dirty_gradient, gradient)
    assert found.metrics == expected.metrics
    mask = torch.tensor([kept for s in clean for kept in s.mask])
    assert bool((gradient[~mask] == 0).all())
    assert bool((gradient[mask] != 0).any())


@every_aggregation
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_is_right(aggregation: Aggregation, estimator: str):
    record = record_for(aggregation, kl_coef=0.5, kl_estimator=estimator)
    sequences = random_sequences(11, 4)
    leaf = row(sequences, "logprobs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(record, sequences, sequences, x).loss, (leaf,))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_each_kl_estimator_has_its_own_gradient(estimator: str):
    sequences = random_sequences(12, 5)
    leaf = row(sequences, "logprobs").requires_grad_()

    def gradient(coefficient: float) -> list[float]:
        record = record_for("token_mean", kl_place="loss", kl_coef=coefficient, kl_estimator=estimator)
        (found,) = torch.autograd.grad(loss_of(record, sequences, sequences, leaf).loss, leaf)
        return found.tolist()

    mask, current = row(sequences, "mask").tolist(), leaf.tolist()
    expected = [
        0.5 * kept * plain_kl(estimator, now - reference, math.exp(now - old))[1] / sum(mask)
        for kept, now, reference, old in zip(
            mask, current, row(sequences, "reference").tolist(), row(sequences, "old").tolist(), strict=True
        )
    ]
    found = [a - b for a, b in zip(gradient(0.5), gradient(0.0), strict=True)]
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-13)


def test_gradient_flows_into_the_entropy_only_where_the_record_has_a_bonus():
    mask, zeros = torch.tensor([True, True, False]), torch.zeros(3)
    for coefficient, expected in ((0.0, None), (0.3, [-0.15, -0.15, 0.0])):
        entropy = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        output = policy_loss(
            record_for("token_mean", kl_place="none", entropy_coef=coefficient),
            logprobs_T=zeros.clone().requires_grad_(),
            old_logprobs_T=zeros,
            reference_logprobs_T=None,
            advantages_T=zeros,
            loss_mask_T=mask,
            segment_ids_T=torch.zeros(3, dtype=torch.int64),
            entropy_T=entropy,
            num_loss_tokens=2,
            num_sequences=1,
        )
        output.loss.backward()
        assert (None if entropy.grad is None else entropy.grad.tolist()) == (expected and pytest.approx(expected))


def test_at_the_old_policy_the_gradient_is_that_of_plain_policy_gradient():
    sequences = random_sequences(5, 4)
    record = record_for("token_mean", kl_place="none")
    leaf = row(sequences, "old").requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(record, sequences, sequences, leaf).loss, leaf)
    mask = torch.tensor([kept for s in sequences for kept in s.mask])
    expected = torch.tensor([-s.advantage for s in sequences for _ in s.mask], dtype=torch.float64) * mask / mask.sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_bfloat16_log_probs_are_computed_in_float32():
    sequences = random_sequences(2, 3)
    output = loss_of(Grpo(), sequences, sequences, row(sequences, "logprobs").bfloat16())
    assert output.loss.dtype == torch.float32


def test_an_empty_micro_batch_has_loss_zero_that_can_go_backward():
    empty = torch.empty(0, requires_grad=True)
    output = policy_loss(
        Grpo(),
        logprobs_T=empty,
        old_logprobs_T=torch.empty(0),
        reference_logprobs_T=torch.empty(0),
        advantages_T=torch.empty(0),
        loss_mask_T=torch.empty(0, dtype=torch.bool),
        segment_ids_T=torch.empty(0, dtype=torch.int64),
        entropy_T=None,
        num_loss_tokens=0,
        num_sequences=0,
    )
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert all(bool(torch.stack(pair).isfinite().all()) for pair in output.metrics.values())


def test_arguments_of_different_lengths_are_refused_with_all_lengths():
    sequences = random_sequences(2, 3)
    with pytest.raises(InputError, match=r"logprobs_T.*old_logprobs_T"):
        loss_of(Grpo(), sequences, sequences, torch.zeros(1, dtype=torch.float64))


# metrics


def test_metrics_are_what_they_say():
    s = Sequence(
        mask=[True, True, True, True, False],
        logprobs=[-1.0, -1.0, -1.0, -40.0, -1.0],
        old=[-1.0, -1.5, -0.5, -1.0, -9.0],
        reference=[-1.0, -2.0, -1.0, -40.0, -1.0],
        entropy=[0.5, 1.0, 1.5, 2.0, 9.0],
        advantage=1.0,
    )
    output = loss_of(record_for("token_mean"), [s], [s])
    ratios = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(-20)]
    kls = [0.0, math.exp(0.5) - 1.5, math.exp(-0.5) - 0.5, math.exp(-39) - 1 + 39]
    expected = {
        "policy/kl": sum(kls),
        "policy/ratio_mean": sum(ratios),
        "policy/clip_fraction": 1.0,  # exp(0.5) > 1.2 with a positive advantage
        "policy/ratio_clamped": 1.0,
        "policy/entropy": 5.0,
        "kl/reference": math.exp(-1),  # exp(-1) - 1 + 1 at the second token
        "kl/reference_clamped": 0.0,
    }
    for name, total in expected.items():
        assert float(output.metrics[name][0]) == pytest.approx(total, rel=1e-12), name
        assert float(output.metrics[name][1]) == 4.0, name
    assert float(output.metrics["policy/loss"][0]) == float(output.loss)
    assert float(output.metrics["policy/loss"][1]) == 1.0


def test_terms_add_up_to_the_loss():
    sequences = random_sequences(8, 5)
    metrics = loss_of(record_for("token_mean", kl_coef=0.5, entropy_coef=0.2), sequences, sequences).metrics
    parts = [float(metrics[name][0]) for name in ("policy/surrogate", "kl/loss", "policy/entropy_loss")]
    assert sum(parts) == pytest.approx(float(metrics["policy/loss"][0]), rel=1e-12)
    assert min(map(abs, parts)) > 1e-3


def test_metrics_carry_no_gradient_and_are_float64_scalars():
    sequences = random_sequences(8, 3)
    leaf = row(sequences, "logprobs").requires_grad_()
    for pair in loss_of(Grpo(), sequences, sequences, leaf).metrics.values():
        for value in pair:
            assert (value.shape, value.dtype, value.requires_grad) == ((), torch.float64, False)


def test_a_penalty_in_the_reward_adds_no_term_to_the_loss():
    sequences = random_sequences(4, 4)
    in_reward = loss_of(Grpo(kl_place="reward", kl_coef=0.5), sequences, sequences)
    without = loss_of(Grpo(kl_place="none"), sequences, sequences)
    assert torch.equal(in_reward.loss, without.loss)
    assert "kl/reference" in in_reward.metrics


# supervised


@every_aggregation
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 5))
def test_supervised_loss_equals_a_plain_twin_however_it_is_cut(aggregation: Aggregation, seed: int, cut: int):
    sequences = random_sequences(seed, 5)
    num_tokens = sum(sum(s.mask) for s in sequences)
    rows = [[-lp for lp, kept in zip(s.logprobs, s.mask, strict=True) if kept] for s in sequences]
    sums = [math.fsum(values) for values in rows]
    expected = {
        "token_mean": math.fsum(sums) / max(1, num_tokens),
        "sequence_mean_token_mean": math.fsum(s / len(v) for s, v in zip(sums, rows, strict=True) if v) / 5,
        "sequence_mean_token_sum": math.fsum(sums) / 5,
        "fixed_length": math.fsum(sums) / 5 / MAX_TOKENS,
    }[aggregation]
    total = nll = count = 0.0
    for start in range(0, 5, cut):
        part = sequences[start : start + cut]
        output = supervised_loss(
            Sft(aggregation=aggregation, max_tokens=MAX_TOKENS if aggregation == "fixed_length" else None),
            logprobs_T=row(part, "logprobs"),
            loss_mask_T=torch.tensor([kept for s in part for kept in s.mask]),
            segment_ids_T=torch.arange(len(part)).repeat_interleave(torch.tensor([len(s.mask) for s in part])),
            num_loss_tokens=num_tokens,
            num_sequences=5,
        )
        total += float(output.loss)
        nll += float(output.metrics["sft/nll"][0])
        count += float(output.metrics["sft/nll"][1])
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert (nll, count) == (pytest.approx(math.fsum(sums), abs=1e-12), num_tokens)


def test_supervised_gradient_ignores_masked_nan():
    leaf = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    supervised_loss(
        Sft(),
        logprobs_T=leaf,
        loss_mask_T=torch.tensor([True, False, True]),
        segment_ids_T=torch.tensor([0, 0, 0]),
        num_loss_tokens=2,
        num_sequences=1,
    ).loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [-0.5, 0.0, -0.5]


@every_aggregation
def test_weights_follow_the_record(aggregation: Aggregation):
    weights = token_weights(
        record_for(aggregation),
        loss_mask_T=torch.tensor([False, True, True, True]),
        segment_ids_T=torch.tensor([0, 0, 1, 1]),
        num_loss_tokens=3,
        num_sequences=2,
    )
    expected = {
        "token_mean": [0.0, 1 / 3, 1 / 3, 1 / 3],
        "sequence_mean_token_mean": [0.0, 1 / 2, 1 / 4, 1 / 4],
        "sequence_mean_token_sum": [0.0, 1 / 2, 1 / 2, 1 / 2],
        "fixed_length": [0.0, 1 / 26, 1 / 26, 1 / 26],
    }
    assert weights.tolist() == pytest.approx(expected[aggregation])


def test_the_drift_term_is_added_with_its_coefficient():
    sequences = random_sequences(8, 5)
    plain, drifting = (
        loss_of(record_for("token_mean", kl_place="none", drift_coef=c), sequences, sequences) for c in (0.0, 0.3)
    )
    # k3 of the old policy against the current one, below its limit: r - 1 - log r
    moved = [s.logprobs[t] - s.old[t] for s in sequences for t in range(len(s.mask)) if s.mask[t]]
    assert max(moved) < math.log(3)
    drift = 0.3 * math.fsum(math.expm1(x) - x for x in moved) / len(moved)
    assert drift > 1e-3
    assert float(drifting.metrics["policy/drift_loss"][0]) == pytest.approx(drift, rel=1e-12)
    assert float(drifting.loss - plain.loss) == pytest.approx(drift, rel=1e-9)
    assert "policy/drift_loss" not in plain.metrics


def test_gradient_flows_through_log_probs_and_entropy_alone():
    def leaf(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    logprobs, entropy = leaf(-1.0, -2.0), leaf(0.5, 0.6)
    others = {
        "old_logprobs_T": leaf(-1.1, -2.1),
        "reference_logprobs_T": leaf(-1.2, -2.3),
        "behaviour_logprobs_T": leaf(-1.0, -2.2),
        "advantages_T": leaf(-1.0, 0.5),
        "token_weights_T": leaf(0.9, 0.8),
    }
    output = policy_loss(
        Grpo(kl_place="loss", kl_coef=0.5, entropy_coef=0.3, drift_coef=0.2, off_policy_delta=1.0),
        logprobs_T=logprobs,
        entropy_T=entropy,
        loss_mask_T=torch.tensor([True, True]),
        segment_ids_T=torch.tensor([0, 1]),
        num_loss_tokens=2,
        num_sequences=2,
        **others,
    )
    output.loss.backward()
    assert logprobs.grad is not None
    assert entropy.grad is not None
    assert {name: tensor.grad for name, tensor in others.items()} == dict.fromkeys(others)


def test_metrics_of_a_ratio_beyond_its_limit_are_those_at_the_limit():
    s = Sequence(mask=[True], logprobs=[-1.0], old=[-31.0], reference=[-1.0], entropy=[0.5], advantage=1.0)
    metrics = loss_of(record_for("token_mean"), [s], [s]).metrics
    assert float(metrics["policy/kl"][0]) == pytest.approx(math.exp(20) - 1 - 20, rel=1e-12)
    assert float(metrics["policy/ratio_mean"][0]) == pytest.approx(math.exp(20), rel=1e-12)
    assert float(metrics["policy/ratio_clamped"][0]) == 1.0


def test_a_step_of_one_token_has_one_share():
    s = Sequence(mask=[True], logprobs=[-1.0], old=[-1.0], reference=[-1.0], entropy=[0.5], advantage=1.0)
    assert float(loss_of(record_for("token_mean"), [s], [s]).metrics["policy/loss"][1]) == 1.0


def test_a_total_counts_loss_tokens_only():
    mask = torch.tensor([True, False, True])
    for values, total in ((torch.ones(3, dtype=torch.bool), 2.0), (torch.tensor([1.5, math.nan, 2.0]), 3.5)):
        assert tuple(map(float, total_and_count(values, mask))) == (total, 2.0)
