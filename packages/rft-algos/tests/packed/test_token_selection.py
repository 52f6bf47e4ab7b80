from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from rft_algos.input_checks import InputError
from rft_algos.packed.token_selection import (
    high_entropy_tokens,
    high_entropy_tokens_per_sequence,
    largest,
    second_moment_tokens,
    share,
)

NAN = math.nan
FRACTIONS = (1e-6, 0.1, 0.2, 0.29, 0.5, 0.7, 1.0)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(entropies: list[float], mask: list[bool], fraction: float) -> list[bool]:
    kept = [t for t, flag in enumerate(mask) if flag]
    num = max(1, int(fraction * len(kept))) if kept else 0
    chosen = set(sorted(kept, key=lambda t: (-entropies[t], t))[:num])
    return [t in chosen for t in range(len(mask))]


def ragged(seed: int, levels: int) -> tuple[list[float], list[bool], list[int]]:
    """Entropies with many equal values, mask, ids; a row without loss tokens, padding, NaN where masked."""
    numbers = random.Random(seed)
    lengths = [numbers.choice([1, 1, 2, 5, 10, 40]) for _ in range(numbers.randint(1, 8))]
    names = numbers.sample(range(sum(lengths)), len(lengths))
    ids = [i for i, length in zip(names, lengths, strict=True) for _ in range(length)] + [-1, -1]
    masked_row = numbers.choice(names)
    mask = [numbers.random() < 0.8 and i not in (-1, masked_row) for i in ids]
    return [numbers.randint(0, levels) / 4 if kept else NAN for kept in mask], mask, ids


def test_hand_computed_values():
    entropies = doubles(0.5, 2.0, NAN, 2.0, 1.0, 3.0)
    mask = torch.tensor([True, True, False, True, True, True])
    # 5 tokens: 1 for 0.2, 2 for 0.4 (the earlier of the two 2.0), 3 for 0.6
    assert high_entropy_tokens(entropies, mask, fraction=0.2).nonzero()[:, 0].tolist() == [5]
    assert high_entropy_tokens(entropies, mask, fraction=0.4).nonzero()[:, 0].tolist() == [1, 5]
    assert high_entropy_tokens(entropies, mask, fraction=0.6).nonzero()[:, 0].tolist() == [1, 3, 5]
    ids = torch.tensor([4, 4, 4, 4, 0, 0])
    # 3 tokens of sequence 4: 1 of them; 2 of sequence 0: 1 of them
    found = high_entropy_tokens_per_sequence(entropies, mask, ids, fraction=0.5)
    assert found.nonzero()[:, 0].tolist() == [1, 5]
    found = high_entropy_tokens_per_sequence(entropies, mask, ids, fraction=0.7)  # floor(2.1) and floor(1.4)
    assert found.nonzero()[:, 0].tolist() == [1, 3, 5]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("levels", [3, 1000])
def test_equals_a_plain_twin(seed: int, levels: int):
    entropies, mask, ids = ragged(seed, levels)
    tensors = doubles(*entropies), torch.tensor(mask)
    for fraction in FRACTIONS:
        found = high_entropy_tokens(*tensors, fraction=fraction)
        assert found.dtype == torch.bool
        assert found.tolist() == plain(entropies, mask, fraction)
        found = high_entropy_tokens_per_sequence(*tensors, torch.tensor(ids), fraction=fraction)
        expected = [False] * len(ids)
        for i in set(ids) - {-1}:
            own = [t for t, j in enumerate(ids) if j == i]
            for t, flag in zip(own, plain([entropies[t] for t in own], [mask[t] for t in own], fraction), strict=True):
                expected[t] = flag
        assert found.dtype == torch.bool
        assert found.tolist() == expected


def test_the_share_is_the_floor_of_the_product_and_at_least_one():
    def mask(num: int) -> Tensor:
        return torch.arange(120) < num

    assert [share(mask(n), 0.2) for n in (0, 1, 4, 5, 9, 10, 100)] == [0, 1, 1, 1, 1, 2, 20]
    assert share(mask(100), 0.29) == 28  # 0.29 * 100 is 28.999999999999996
    assert share(mask(100), 1.0) == 100


def test_pitfall_8_a_micro_batch_may_not_select_for_itself():
    entropies, mask = torch.tensor([3.0, 3.1, 3.2, 0.1, 0.2, 0.3]), torch.ones(6, dtype=torch.bool)
    whole = high_entropy_tokens(entropies, mask, fraction=0.5)
    halves = [high_entropy_tokens(entropies[i : i + 3], mask[:3], fraction=0.5) for i in (0, 3)]
    assert whole.tolist() == [True, True, True, False, False, False]
    assert torch.cat(halves).tolist() == [False, False, True, False, False, True]
    # the variant within sequences gives the same, whole or cut
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    assert torch.equal(high_entropy_tokens_per_sequence(entropies, mask, ids, fraction=0.5), torch.cat(halves))


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_sequences_and_their_numbers_do_not_matter(seed: int):
    numbers = torch.Generator().manual_seed(seed)
    entropies = torch.rand(40, generator=numbers)  # no two are equal
    mask, ids = torch.rand(40, generator=numbers) < 0.8, torch.arange(40) // 10
    order = torch.cat([torch.arange(10) + 10 * i for i in (2, 0, 3, 1)])
    renamed = torch.tensor([9, 3, 17, 0])[ids]
    assert torch.equal(
        high_entropy_tokens(entropies[order], mask[order], fraction=0.3),
        high_entropy_tokens(entropies, mask, fraction=0.3)[order],
    )
    assert torch.equal(
        high_entropy_tokens_per_sequence(entropies[order], mask[order], renamed[order], fraction=0.3),
        high_entropy_tokens_per_sequence(entropies, mask, ids, fraction=0.3)[order],
    )


def test_nothing_selects_nothing():
    empty = doubles()
    none = torch.tensor([False, False])
    assert high_entropy_tokens(empty, empty.bool(), fraction=0.5).shape == (0,)
    assert high_entropy_tokens_per_sequence(empty, empty.bool(), empty.long(), fraction=0.5).shape == (0,)
    assert high_entropy_tokens(doubles(NAN, 1.0), none, fraction=1.0).tolist() == [False, False]
    found = high_entropy_tokens_per_sequence(doubles(NAN, 1.0), none, torch.tensor([0, 1]), fraction=1.0)
    assert found.tolist() == [False, False]


def test_an_entropy_with_a_gradient_is_only_read():
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    mask, ids = torch.tensor([True, True]), torch.tensor([0, 0])
    assert high_entropy_tokens(leaf, mask, fraction=0.5).tolist() == [False, True]
    assert high_entropy_tokens_per_sequence(leaf, mask, ids, fraction=0.5).tolist() == [False, True]


def test_largest_takes_every_loss_token_if_asked_for_as_many():
    scores, mask = doubles(NAN, -math.inf, 1.0), torch.tensor([False, True, True])
    assert largest(scores, mask, 2).tolist() == [False, True, True]
    assert largest(scores, mask, 0).tolist() == [False, False, False]


def test_inputs_that_do_not_fit_are_refused():
    x, mask, ids = doubles(1.0, 2.0), torch.tensor([True, True]), torch.tensor([0, 0])
    for fraction in (0.0, -0.1, 1.01):
        with pytest.raises(InputError, match=r"fraction must lie in \(0, 1\], it is"):
            high_entropy_tokens(x, mask, fraction=fraction)
        with pytest.raises(InputError, match=r"fraction must lie in \(0, 1\], it is"):
            high_entropy_tokens_per_sequence(x, mask, ids, fraction=fraction)
    with pytest.raises(InputError, match="loss_mask_T must be bool"):
        high_entropy_tokens(x, x, fraction=0.5)
    with pytest.raises(InputError, match=r"torch.Size\(\[1\]\) scores for torch.Size\(\[2\]\) mask"):
        high_entropy_tokens(x[:1], mask, fraction=0.5)
    with pytest.raises(InputError, match=r"torch.Size\(\[1\]\) scores for torch.Size\(\[2\]\) mask"):
        high_entropy_tokens_per_sequence(x[:1], mask, ids, fraction=0.5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("limit", [1e-6, 0.04, 0.5, 10.0])
def test_the_second_moment_is_held_by_leaving_out_the_largest(seed: int, limit: float) -> None:
    numbers = random.Random(seed)
    mask = [numbers.random() < 0.8 for _ in range(20)]
    log_ratios = [numbers.gauss(0, 0.4) if kept else math.nan for kept in mask]
    # one after another, as the algorithm is written
    kept = [t for t in range(20) if mask[t]]
    while kept and sum(log_ratios[t] ** 2 for t in kept) / len(kept) > limit:
        kept.remove(max(kept, key=lambda t: log_ratios[t] ** 2))
    found = second_moment_tokens(torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(mask), limit=limit)
    assert found.nonzero()[:, 0].tolist() == kept


def test_masked_tokens_make_no_room_for_others_in_the_second_moment() -> None:
    # a mean over the masked zeros too would be 0.01
    log_ratio, mask = torch.tensor([0.2, 0.0, 0.0, 0.0]), torch.tensor([True, False, False, False])
    assert not second_moment_tokens(log_ratio, mask, limit=0.03).any()
    assert second_moment_tokens(log_ratio, mask, limit=0.05).tolist() == [True, False, False, False]
