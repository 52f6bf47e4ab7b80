"""The references against log_softmax and autograd in float64, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rft_kernels.reference import vocab_slabs
from rft_kernels.row_statistics import IGNORED, SlabSums

VOCAB = 37


def random_case(num_rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Products, bias and targets; the first target is the first column, the second the last."""
    generator = torch.Generator().manual_seed(seed)
    products = 3 * torch.randn(num_rows, VOCAB, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    targets[0], targets[1] = 0, VOCAB - 1
    return products, torch.randn(VOCAB, dtype=torch.float64, generator=generator), targets


def sums_of_slabs(products: Tensor, targets: Tensor, width: int, bias: Tensor | None, **options: float) -> SlabSums:
    parts = [
        vocab_slabs.slab_sums(
            products[:, first : first + width],
            targets,
            first,
            bias_C=None if bias is None else bias[first : first + width],
            **options,
        )
        for first in range(0, products.shape[1], width)
    ]
    return SlabSums(*(torch.stack(tensors) for tensors in zip(*parts, strict=True)))


def test_hand_computed_sums_of_a_slab():
    products = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    sums = vocab_slabs.slab_sums(products, torch.tensor([11]), 10, temperature=0.5)
    assert sums.highest.tolist() == pytest.approx([2 * math.log(3)])
    assert sums.total.tolist() == pytest.approx([1 + 1 / 9])
    assert sums.moment.tolist() == pytest.approx([-2 * math.log(3) / 9])
    assert sums.target.tolist() == [0.0]
    assert sums.argmax.tolist() == [10]


def test_hand_computed_rows_of_two_slabs():
    # probabilities 1/2, 1/4 | 1/4
    first = vocab_slabs.slab_sums(torch.tensor([[math.log(2.0), 0.0]]), torch.tensor([2]), 0, temperature=1.0)
    second = vocab_slabs.slab_sums(torch.tensor([[0.0]]), torch.tensor([2]), 2, temperature=1.0)
    rows = vocab_slabs.merge_sums([first, second])
    assert rows.normalizer.tolist() == pytest.approx([math.log(4)])
    assert rows.logprob.tolist() == pytest.approx([math.log(0.25)])
    assert rows.entropy.tolist() == pytest.approx([1.5 * math.log(2)])
    assert rows.argmax.tolist() == [0]


@pytest.mark.parametrize("width", [1, 5, 36, 37, 100])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_slabs_of_any_width_give_log_softmax(width: int, softcap: float | None):
    products, bias, targets = random_case()
    logits = products + bias
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    log_probs = logits.log_softmax(-1)
    rows = vocab_slabs.merge_sums(
        sums_of_slabs(products, targets, width, bias, temperature=0.7, **({"softcap": softcap} if softcap else {}))
    )
    torch.testing.assert_close(rows.normalizer, logits.logsumexp(-1))
    torch.testing.assert_close(rows.logprob, log_probs.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(rows.entropy, -(log_probs.exp() * log_probs).sum(-1))
    assert torch.equal(rows.argmax, logits.argmax(-1))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_of_slabs_is_that_of_autograd(softcap: float | None, with_entropy: bool):
    products, bias, targets = random_case()
    generator = torch.Generator().manual_seed(1)
    grad, entropy_grad = torch.randn(2, products.shape[0], dtype=torch.float64, generator=generator)
    leaf = products.clone().requires_grad_()
    logits = leaf + bias
    log_probs = ((logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    loss = (grad * log_probs.gather(1, targets[:, None])[:, 0]).sum()
    (loss + (entropy_grad * entropy).sum() if with_entropy else loss).backward()

    options = {"temperature": 0.7, "softcap": softcap}
    rows = vocab_slabs.merge_sums(vocab_slabs.slab_sums(products, targets, 0, bias_C=bias, **options))
    for first, last in ((0, 10), (10, 36), (36, 37)):
        slab = products[:, first:last]
        returned = vocab_slabs.slab_gradients(
            slab,
            targets,
            first,
            rows.normalizer,
            rows.entropy,
            grad,
            entropy_grad if with_entropy else None,
            bias_C=bias[first:last],
            **options,
        )
        assert returned is slab
    torch.testing.assert_close(products, leaf.grad, rtol=1e-11, atol=1e-13)


def test_an_ignored_row_has_log_prob_0_its_entropy_and_no_gradient():
    products, _, targets = random_case()
    entropy = vocab_slabs.merge_sums(sums_of_slabs(products, targets, 10, None, temperature=1.0)).entropy
    targets[2] = IGNORED
    rows = vocab_slabs.merge_sums(sums_of_slabs(products, targets, 10, None, temperature=1.0))
    assert float(rows.logprob[2]) == 0.0
    assert float(rows.entropy[2]) == float(entropy[2]) > 0
    ones = torch.ones_like(entropy)
    gradient = vocab_slabs.slab_gradients(
        products.clone(), targets, 0, rows.normalizer, rows.entropy, ones, ones, temperature=1.0
    )
    assert not gradient[2].any()
    assert bool(gradient[[0, 1, 3, 4, 5]].any(1).all())


def test_a_target_outside_every_part_has_log_prob_minus_infinity():
    products, _, targets = random_case()
    targets[3] = VOCAB
    rows = vocab_slabs.merge_sums(sums_of_slabs(products, targets, 10, None, temperature=1.0))
    assert float(rows.logprob[3]) == -math.inf


def test_shards_joined_on_their_ranks_and_then_merged_give_the_whole():
    products, bias, targets = random_case()
    parts = sums_of_slabs(products, targets, 5, bias, temperature=0.7)
    of_ranks = [
        vocab_slabs.join_sums(SlabSums(*(tensor[cut] for tensor in parts))) for cut in (slice(3), slice(3, None))
    ]
    whole = vocab_slabs.merge_sums(parts)
    for found, expected in zip(vocab_slabs.merge_sums(of_ranks), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_equal_logits_give_the_lowest_id_within_a_part_and_over_parts():
    products = torch.tensor([[1.0, 5.0, 0.0, 5.0, 5.0, 2.0]])
    for width in (1, 2, 3, 6):
        rows = vocab_slabs.merge_sums(sums_of_slabs(products, torch.tensor([0]), width, None, temperature=1.0))
        assert rows.argmax.tolist() == [1]


def test_a_part_of_forbidden_tokens_alone_adds_nothing():
    products, _, targets = random_case()
    products[:, 10:20] = -torch.inf
    targets = targets.masked_fill((targets >= 10) & (targets < 20), 3)
    whole = vocab_slabs.merge_sums(vocab_slabs.slab_sums(products, targets, 0, temperature=1.0))
    cut = vocab_slabs.merge_sums(sums_of_slabs(products, targets, 10, None, temperature=1.0))
    for found, expected in zip(cut, whole, strict=True):
        assert bool(expected.isfinite().all())
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("splits", [1, 4, 37, None])
def test_sums_from_hidden_states_are_those_of_their_products(splits: int | None):
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (6, VOCAB))
    _, bias, targets = random_case()
    options = {"temperature": 0.7, "softcap": 4.0}
    found = vocab_slabs.fused_sums(hidden, weight, targets + 100, bias_V=bias, start=100, splits=splits, **options)
    whole = vocab_slabs.slab_sums(hidden @ weight.t(), targets + 100, 100, bias_C=bias, **options)
    assert found.highest.shape == (splits or 1, 6)
    assert int(found.argmax.min()) >= 100
    for f, e in zip(vocab_slabs.merge_sums(found), vocab_slabs.merge_sums(whole), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-12, atol=1e-12)
