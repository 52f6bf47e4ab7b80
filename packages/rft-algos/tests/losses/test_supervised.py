from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.losses.aggregation import token_mean, weighted_sum
from rft_algos.losses.supervised import (
    cross_entropy,
    log_normaliser,
    negative_log_likelihood,
    positive_likelihood,
    z_loss,
)


def doubles(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain_log_normaliser(row: list[float]) -> float:
    largest = max(row)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in row))


def plain_cross_entropy(row: list[float], target: int, smoothing: float) -> float:
    logprobs = [x - plain_log_normaliser(row) for x in row]
    return -(1 - smoothing) * logprobs[target] - smoothing * math.fsum(logprobs) / len(row)


def random_rows(num_tokens: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = random.Random(seed)
    logits = [[source.gauss(0, 4) for _ in range(vocab_size)] for _ in range(num_tokens)]
    targets = [source.randrange(vocab_size) for _ in range(num_tokens)]
    mask = [source.random() < 0.7 for _ in range(num_tokens)]
    return doubles(*logits), torch.tensor(targets), torch.tensor(mask)


# log-probs are given


def test_with_token_mean_it_is_torch_cross_entropy_in_value_and_gradient():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 5, (7,), generator=generator)
    mask = torch.tensor([True, False, True, True, False, True, True])

    expected = torch.nn.functional.cross_entropy(logits, torch.where(mask, targets, -100))
    (expected_grad,) = torch.autograd.grad(expected, logits)
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    loss = weighted_sum(token_mean(mask, 5, dtype=torch.float64), negative_log_likelihood(logprobs))
    (grad,) = torch.autograd.grad(loss, logits)

    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)


def test_it_is_minus_the_log_prob():
    assert negative_log_likelihood(torch.tensor([-0.5, -2.0, 0.0])).tolist() == [0.5, 2.0, 0.0]


# logits are given


def test_cross_entropy_by_hand():
    # probabilities 3/4, 1/4; the last row is masked
    logits = doubles([math.log(3.0), 0.0], [math.log(3.0), 0.0], [5.0, 0.0])
    targets, mask = torch.tensor([0, 1, -100]), torch.tensor([True, True, False])
    assert cross_entropy(logits, targets, mask).tolist() == pytest.approx([math.log(4 / 3), math.log(4), 0.0])
    # with e = 0.5: half of it, and half of the mean over the vocabulary (log 4/3 + log 4) / 2
    spread = 0.5 * (math.log(4 / 3) + math.log(4)) / 2
    smoothed = cross_entropy(logits, targets, mask, label_smoothing=0.5)
    expected = [0.5 * math.log(4 / 3) + spread, 0.5 * math.log(4) + spread, 0.0]
    assert smoothed.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(1, 1), (1, 7), (13, 2), (40, 33), (0, 3)])
def test_cross_entropy_equals_a_plain_twin(num_tokens: int, vocab_size: int, smoothing: float):
    logits, targets, mask = random_rows(num_tokens, vocab_size, 7 * num_tokens + vocab_size)
    logits = logits.reshape(num_tokens, vocab_size)
    targets, mask = targets.long(), mask.bool()
    expected = [
        plain_cross_entropy(row, target, smoothing) if kept else 0.0
        for row, target, kept in zip(logits.tolist(), targets.tolist(), mask.tolist(), strict=True)
    ]
    losses = cross_entropy(logits, torch.where(mask, targets, -100), mask, label_smoothing=smoothing)
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    single = cross_entropy(logits.float(), targets, mask, label_smoothing=smoothing)
    assert single.dtype == torch.float32
    assert single.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_torch(smoothing: float):
    logits, targets, mask = random_rows(30, 11, 3)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    losses = cross_entropy(logits, targets, mask, label_smoothing=smoothing)
    torch.testing.assert_close(losses, expected * mask, rtol=1e-13, atol=0)


def test_without_smoothing_it_is_the_negative_log_likelihood():
    logits, targets, mask = random_rows(20, 6, 4)
    logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    assert torch.equal(cross_entropy(logits, targets, mask), negative_log_likelihood(logprobs).where(mask, 0.0))


def test_a_forbidden_token_costs_nothing_without_smoothing():
    logits = doubles([0.0, 0.0, -math.inf]).requires_grad_()
    losses = cross_entropy(logits, torch.tensor([0]), torch.tensor([True]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(2)])
    assert logits.grad is not None
    assert logits.grad.tolist() == [pytest.approx([-0.5, 0.5, 0.0])]


def test_masked_targets_may_be_anything_even_with_a_vocabulary_of_one():
    losses = cross_entropy(torch.zeros(2, 1), torch.tensor([-100, 10**6]), torch.tensor([False, False]))
    assert losses.tolist() == [0.0, 0.0]


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, mask = random_rows(9, 50, 5)
    rounded = logits.bfloat16()
    for function in (lambda x: cross_entropy(x, targets, mask), lambda x: log_normaliser(x, mask)):
        assert function(rounded).dtype == torch.float32
        torch.testing.assert_close(function(rounded), function(rounded.double()).float(), rtol=1e-5, atol=1e-6)


def test_gradients_are_right():
    logits, targets, mask = random_rows(5, 4, 6)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, mask), (logits,))
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, mask, label_smoothing=0.2), (logits,))
    assert torch.autograd.gradcheck(lambda x: z_loss(log_normaliser(x, mask), 0.3), (logits,))


def test_pitfall_6_nan_at_masked_positions_reaches_neither_loss_nor_gradient():
    logits, targets, _ = random_rows(4, 5, 8)
    mask = torch.tensor([True, False, True, False])
    dirty = logits.clone()
    dirty[1], dirty[3] = math.nan, math.inf
    results = []
    for rows in (logits, dirty):
        leaf = rows.clone().requires_grad_()
        losses = cross_entropy(leaf, torch.where(mask, targets, -100), mask, label_smoothing=0.1)
        losses = losses + z_loss(log_normaliser(leaf, mask))
        losses.sum().backward()
        assert leaf.grad is not None
        results.append((losses, leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[1][0][[1, 3]].tolist() == [0.0, 0.0]
    assert results[1][1][[1, 3]].abs().sum() == 0


def test_tokens_do_not_see_each_other():
    logits, targets, mask = random_rows(12, 5, 9)
    whole = cross_entropy(logits, targets, mask)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = cross_entropy(logits[order], targets[order], mask[order])
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-14, atol=0)
    parts = [cross_entropy(logits[s], targets[s], mask[s]) for s in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-14, atol=0)


def test_a_target_that_is_no_token_is_refused_where_it_counts():
    with pytest.raises((IndexError, RuntimeError), match="index"):
        cross_entropy(torch.zeros(1, 3), torch.tensor([-100]), torch.tensor([True]))


def test_wrong_shapes_masks_and_settings_are_refused():
    logits, targets, mask = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.tensor([True, False])
    with pytest.raises(InputError, match="must be bool"):
        cross_entropy(logits, targets, mask.long())
    with pytest.raises(InputError, match="must be bool"):
        log_normaliser(logits, mask.long())
    with pytest.raises(InputError, match="targets for a mask"):
        cross_entropy(logits, targets[:1], mask)
    with pytest.raises(InputError, match="for a mask"):
        cross_entropy(torch.zeros(1, 3), targets, mask)
    for smoothing in (-0.1, 1.0):
        with pytest.raises(InputError, match="label_smoothing must be"):
            cross_entropy(logits, targets, mask, label_smoothing=smoothing)


# the normaliser


def test_log_normaliser_by_hand_and_against_a_plain_twin():
    logits = doubles([0.0, 0.0, 0.0, 0.0], [math.log(2.0), 0.0, -math.inf, -math.inf])
    assert log_normaliser(logits, torch.tensor([True, True])).tolist() == pytest.approx([math.log(4), math.log(3)])
    rows, _, mask = random_rows(25, 9, 10)
    expected = [plain_log_normaliser(row) if kept else 0.0 for row, kept in zip(rows.tolist(), mask, strict=True)]
    assert log_normaliser(rows, mask).tolist() == pytest.approx(expected, rel=1e-12)


def test_z_loss_by_hand():
    log_z = doubles(0.0, 2.0, -3.0).requires_grad_()
    losses = z_loss(log_z, 0.5)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 2.0, 4.5]  # 0.5 * 4, 0.5 * 9
    assert log_z.grad is not None
    assert log_z.grad.tolist() == [0.0, 2.0, -3.0]  # 2 * 0.5 * log Z
    assert z_loss(doubles(10.0)).tolist() == pytest.approx([0.01], rel=1e-14)  # the published 1e-4


def test_a_shift_of_all_logits_changes_the_z_loss_and_not_the_cross_entropy():
    logits, targets, _ = random_rows(6, 5, 11)
    mask = torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(
        cross_entropy(logits + 3.0, targets, mask), cross_entropy(logits, targets, mask), rtol=1e-12, atol=1e-13
    )
    torch.testing.assert_close(log_normaliser(logits + 3.0, mask), log_normaliser(logits, mask) + 3.0)


def test_only_right_sequences_are_learned_by_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -3.0, math.nan]).requires_grad_()
    found = positive_likelihood(logprobs, torch.tensor([True, False]), torch.tensor([0, 0, 1, -1]))
    assert found.tolist() == [1.0, 2.0, 0.0, 0.0]
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0, 0.0, 0.0]
