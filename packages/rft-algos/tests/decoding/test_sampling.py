from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_algos.decoding import sampling
from rft_algos.decoding.sampling import (
    draw,
    draw_allowed,
    fire_temperatures,
    greedy,
    kept_tokens,
    temperature_scaled_logprobs,
    truncated_logprobs,
)
from rft_algos.input_checks import InputError
from rft_core.keyed_random import uniforms

HALF_EIGHTHS = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()


def rows_of_logits(num_rows: int, vocab_size: int, seed: int, *, levels: int = 0) -> torch.Tensor:
    """Random logits; with `levels`, of that many distinct values, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(0, levels, (num_rows, vocab_size), generator=generator).float() / 2
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def plain_kept(logprobs: list[float], top_p: float, top_k: int, min_p: float) -> list[bool]:
    ranked = sorted((t for t, lp in enumerate(logprobs) if lp > -math.inf), key=lambda t: (-logprobs[t], t))
    if min_p > 0:
        ranked = [t for t in ranked if logprobs[t] >= logprobs[ranked[0]] + math.log(min_p)]
    if top_k > 0:
        ranked = ranked[:top_k]
    if top_p < 1:
        total, mass, nucleus = math.fsum(math.exp(logprobs[t]) for t in ranked), 0.0, []
        for token in ranked:
            nucleus.append(token)
            mass += math.exp(logprobs[token])
            if mass >= top_p * total * (1 - 1e-6):
                break
        ranked = nucleus
    kept = set(ranked)
    return [token in kept for token in range(len(logprobs))]


def plain_draw(logprobs: list[float], kept: list[bool], uniform: float) -> int:
    masses = [math.exp(lp) if keep else 0.0 for lp, keep in zip(logprobs, kept, strict=True)]
    target, cumulative = uniform * math.fsum(masses), 0.0
    for token, mass in enumerate(masses):
        cumulative += mass
        if cumulative > target:
            return token
    return max(token for token, mass in enumerate(masses) if mass > 0)


# temperature


def test_temperature_divides_the_logits_before_the_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert temperature_scaled_logprobs(logits, 1.0).exp().tolist()[0] == pytest.approx([0.25, 0.75])
    assert temperature_scaled_logprobs(logits, 0.5).exp().tolist()[0] == pytest.approx([0.1, 0.9])


@pytest.mark.parametrize("temperature", [0.9, 1.0, 1.1])
def test_a_temperature_near_one_is_not_one(temperature: float):
    logits = rows_of_logits(2, 9, 1).double()
    expected = torch.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(temperature_scaled_logprobs(logits, temperature), expected, rtol=1e-14, atol=0)


def test_log_probs_of_bfloat16_logits_are_computed_in_float32():
    logits = rows_of_logits(3, 50, 0).bfloat16()
    logprobs = temperature_scaled_logprobs(logits, 0.7)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float() / 0.7, -1))


def test_temperature_zero_is_refused():
    with pytest.raises(InputError, match="greedy"):
        temperature_scaled_logprobs(torch.zeros(1, 2), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_temperature_for_each_row_gives_what_the_row_gives_alone(dtype: torch.dtype):
    logits = rows_of_logits(5, 40, 3).to(dtype)
    temperatures = [0.7, 1.0, 10.0, 0.1, 1.0 / 3.0]
    logprobs = temperature_scaled_logprobs(logits, torch.tensor(temperatures, dtype=torch.float64))
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, temperature in enumerate(temperatures):
        torch.testing.assert_close(
            logprobs[row], temperature_scaled_logprobs(logits[row : row + 1], temperature)[0], rtol=1e-6, atol=1e-6
        )
        if dtype == torch.float64:
            exact = temperature_scaled_logprobs(logits[row : row + 1], temperature)[0]
            torch.testing.assert_close(logprobs[row], exact, rtol=1e-14, atol=1e-14)


def test_temperatures_by_hand_row_by_row():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    probabilities = temperature_scaled_logprobs(logits, torch.tensor([1.0, 0.5])).exp().tolist()
    assert probabilities == [pytest.approx([0.25, 0.75]), pytest.approx([0.1, 0.9])]


def test_as_many_temperatures_as_rows_are_needed():
    for temperatures in (torch.ones(1), torch.ones(3), torch.tensor(1.0), torch.ones(2, 1)):
        with pytest.raises(InputError, match="for rows"):
            temperature_scaled_logprobs(torch.zeros(2, 4), temperatures)
    assert temperature_scaled_logprobs(torch.zeros(0, 4), torch.ones(0)).shape == (0, 4)


def test_gradients_flow_through_either_form_of_temperature():
    logits = rows_of_logits(3, 4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: temperature_scaled_logprobs(x, 0.7), (logits,))
    rows = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: temperature_scaled_logprobs(x, rows), (logits,))


# FIRE


def test_only_the_first_token_of_a_response_is_drawn_hot():
    temperatures = fire_temperatures(torch.tensor([0, 1, 7, 0]), 0.7, 10.0)
    assert temperatures.dtype == torch.float64
    assert temperatures.tolist() == [10.0, 0.7, 0.7, 10.0]
    assert fire_temperatures(torch.zeros(0, dtype=torch.int64), 0.7, 10.0).shape == (0,)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.floats(0.1, 2), st.floats(0.1, 50))
def test_fire_temperatures_equal_a_plain_twin(numbers: list[int], temperature: float, first: float):
    expected = [first if number == 0 else temperature for number in numbers]
    assert fire_temperatures(torch.tensor(numbers), temperature, first).tolist() == expected


@pytest.mark.parametrize(("temperature", "first"), [(0.0, 10.0), (1.0, 0.0), (-1.0, 1.0), (1.0, -1.0)])
def test_temperatures_of_fire_must_be_positive(temperature: float, first: float):
    with pytest.raises(InputError, match="temperatures must be positive"):
        fire_temperatures(torch.tensor([0, 1]), temperature, first)


def test_with_equal_temperatures_fire_is_plain_sampling():
    logits = rows_of_logits(4, 30, 8).double()
    temperatures = fire_temperatures(torch.tensor([0, 3, 0, 1]), 0.8, 0.8)
    plain = temperature_scaled_logprobs(logits, 0.8)
    torch.testing.assert_close(temperature_scaled_logprobs(logits, temperatures), plain, rtol=1e-14, atol=1e-14)


def test_a_hot_first_token_is_more_even_than_the_rest():
    logits = rows_of_logits(2, 30, 9).double()[:1].expand(2, 30)
    hot, cold = temperature_scaled_logprobs(logits, fire_temperatures(torch.tensor([0, 1]), 1.0, 10.0))
    assert float(hot.max() - hot.min()) == pytest.approx(float(cold.max() - cold.min()) / 10, rel=1e-12)


# what is kept


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "kept"),
    [
        (1.0, 0, 0.0, [True, True, True, True]),
        (0.5, 0, 0.0, [False, True, False, False]),
        (0.5001, 0, 0.0, [False, True, False, True]),  # the token that crosses is kept
        (0.8, 0, 0.0, [True, True, False, True]),  # of two equal tokens the lower id
        (1e-9, 0, 0.0, [False, True, False, False]),
        (1.0, 1, 0.0, [False, True, False, False]),
        (1.0, 3, 0.0, [True, True, False, True]),
        (1.0, 99, 0.0, [True, True, True, True]),
        (1.0, 0, 0.3, [False, True, False, True]),
        (1.0, 0, 1.0, [False, True, False, False]),
        (0.6, 2, 0.0, [False, True, False, False]),  # 1/2 of the 3/4 that top-k left is 2/3
    ],
)
def test_hand_computed_kept_sets(top_p: float, top_k: int, min_p: float, kept: list[bool]):
    assert kept_tokens(HALF_EIGHTHS, top_p, top_k, min_p).tolist() == [kept]


@pytest.mark.parametrize("num_kept", range(1, 10))
def test_equal_tokens_are_kept_by_the_exact_share_in_id_order(num_kept: int):
    logprobs = torch.full((2, 10), -math.log(10.0))
    expected = [[token < num_kept for token in range(10)]] * 2
    assert kept_tokens(logprobs, num_kept / 10, 0, 0.0).tolist() == expected
    assert kept_tokens(logprobs, 1.0, num_kept, 0.0).tolist() == expected


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 40),
    levels=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.97, 0.71, 0.33, 0.05]),
    top_k=st.integers(0, 45),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 0.6]),
)
def test_kept_sets_equal_a_plain_twin(seed: int, vocab_size: int, levels: int, top_p: float, top_k: int, min_p: float):
    logits = rows_of_logits(3, vocab_size, seed, levels=levels)
    if vocab_size > 2:
        logits[:, 1] = -math.inf
    logprobs = temperature_scaled_logprobs(logits.double(), 1.0)
    expected = [plain_kept(row, top_p, top_k, min_p) for row in logprobs.tolist()]
    assert kept_tokens(logprobs, top_p, top_k, min_p).tolist() == expected


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_wide_and_narrow_nuclei_of_a_large_vocabulary_are_found(scale: float):
    logprobs = temperature_scaled_logprobs(rows_of_logits(4, 9000, 5).double() * scale, 1.0)
    logprobs[0] = temperature_scaled_logprobs(torch.zeros(9000).double(), 1.0)  # needs every stage of the search
    expected = [plain_kept(row, 0.9, 0, 0.0) for row in logprobs.tolist()]
    assert kept_tokens(logprobs, 0.9, 0, 0.0).tolist() == expected


def test_a_nucleus_wider_than_the_first_search_in_a_vocabulary_hardly_wider_is_found():
    logprobs = torch.full((1, 300), -math.log(300.0), dtype=torch.float64)
    assert int(kept_tokens(logprobs, 0.95, 0, 0.0).sum()) == 285


def test_top_p_of_one_keeps_the_most_unlikely_token():
    logprobs = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64).log()
    assert kept_tokens(logprobs, 1.0, 0, 0.0).tolist() == [[True, True]]


def test_a_nucleus_may_fall_short_of_top_p_by_a_millionth_and_no_more():
    halves = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    for excess, kept in ((0.95e-6, [True, False]), (1.05e-6, [True, True])):
        assert kept_tokens(halves, 0.5 * (1 + excess), 0, 0.0).tolist() == [kept]
    exactly = 0.5 / (1 - 1e-6)
    assert exactly * (1 - 1e-6) == 0.5
    assert kept_tokens(halves, exactly, 0, 0.0).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ((0.0, 0, 0.0), "top_p"),
        ((1.01, 0, 0.0), "top_p"),
        ((1.0, -1, 0.0), "top_k"),
        ((1.0, 0, -0.01), "min_p"),
        ((1.0, 0, 1.01), "min_p"),
    ],
)
def test_settings_out_of_range_are_refused(setting: tuple[float, int, float], name: str):
    with pytest.raises(InputError, match=f"{name} must be"):
        kept_tokens(HALF_EIGHTHS, *setting)


def test_a_token_of_probability_zero_is_never_kept():
    logprobs = torch.tensor([[0.0, -math.inf, -math.inf]])
    for setting in [(1.0, 0, 0.0), (0.999, 0, 0.0), (1.0, 2, 0.0), (1.0, 0, 0.0001)]:
        assert kept_tokens(logprobs, *setting).tolist() == [[True, False, False]]


# the draw


def test_hand_computed_draws_in_token_id_order():
    logprobs = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(6, 4)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    token_ids, drawn, log_mass = draw(logprobs.double(), None, u)
    assert token_ids.tolist() == [0, 0, 2, 2, 3, 3]
    assert drawn.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])
    assert log_mass.tolist() == [0.0] * 6


def test_a_cut_draw_reports_the_full_log_prob_and_the_mass_that_was_kept():
    kept = kept_tokens(HALF_EIGHTHS, 1.0, 2, 0.0).expand(3, 4)
    u = torch.tensor([0.0, 0.66, 0.67], dtype=torch.float64)
    token_ids, drawn, log_mass = draw(HALF_EIGHTHS.expand(3, 4), kept, u)
    assert token_ids.tolist() == [1, 1, 3]
    assert drawn.exp().tolist() == pytest.approx([0.5, 0.5, 0.25])
    assert log_mass.exp().tolist() == pytest.approx([0.75, 0.75, 0.75])


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 30),
    top_k=st.integers(0, 8),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_draws_equal_a_plain_twin(seed: int, vocab_size: int, top_k: int, uniform: float):
    logprobs = temperature_scaled_logprobs(rows_of_logits(2, vocab_size, seed).double(), 1.0)
    kept = kept_tokens(logprobs, 1.0, top_k, 0.0)
    token_ids, drawn, log_mass = draw(logprobs, kept, torch.tensor([uniform, 1 - uniform / 2 - 2**-53]))
    for row, token in enumerate(token_ids.tolist()):
        lps, keep = logprobs[row].tolist(), kept[row].tolist()
        u = (uniform, 1 - uniform / 2 - 2**-53)[row]
        neighbours = {plain_draw(lps, keep, max(0.0, min(1 - 2**-53, u + shift))) for shift in (-1e-7, 0.0, 1e-7)}
        assert token in neighbours  # float32 uniforms: exact but within 1e-7 of a boundary
        assert float(drawn[row]) == lps[token]
        mass = math.fsum(math.exp(lp) for lp, k in zip(lps, keep, strict=True) if k)
        assert float(log_mass[row]) == pytest.approx(math.log(mass), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_uniform_draws_a_kept_token_of_positive_probability(dtype: torch.dtype):
    logits = rows_of_logits(64, 333, 2).to(dtype)
    logits[:, 300:] = -math.inf
    logits[:, 299] = -90.0
    logprobs = temperature_scaled_logprobs(logits, 1.0)
    kept = kept_tokens(logprobs, 0.9, 0, 0.0)
    largest = torch.full((64,), 1 - 2**-53, dtype=torch.float64)
    for mask in (None, kept):
        token_ids, drawn, _ = draw(logprobs, mask, largest)
        assert bool((drawn > -math.inf).all())
        if mask is not None:
            assert bool(mask.gather(-1, token_ids[:, None]).all())


def test_a_kept_mass_that_rounds_above_one_is_one():
    logprobs = torch.tensor([[0.5, 0.5000001]]).log()
    assert float(logprobs.exp().sum()) > 1
    _, _, log_mass = draw(logprobs, torch.tensor([[True, True]]), torch.tensor([0.5], dtype=torch.float64))
    assert log_mass.tolist() == [0.0]


def test_on_a_cpu_rows_are_taken_in_chunks_of_a_mebibyte():
    # 2^18 elements of 4 bytes: 52 rows of 5000, or one row that is longer
    assert sampling._row_chunks(torch.empty(70, 5000)) == [slice(0, 52), slice(52, 104)]
    assert sampling._row_chunks(torch.empty(3, 2**17)) == [slice(0, 2), slice(2, 4)]
    assert sampling._row_chunks(torch.empty(2, 2**18)) == [slice(0, 1), slice(1, 2)]
    assert sampling._row_chunks(torch.empty(2, 2**18 + 1)) == [slice(0, 1), slice(1, 2)]
    assert sampling._row_chunks(torch.empty(0, 7)) == [slice(0, 0)]


def test_a_uniform_that_rounds_to_one_draws_the_last_kept_token():
    logprobs = torch.tensor([[0.4, 0.3, 0.3, 0.0]]).log()
    u = torch.tensor([1 - 2**-53], dtype=torch.float64)  # 1.0 in float32
    assert draw(logprobs, None, u)[0].tolist() == [2]
    assert draw(logprobs, torch.tensor([[True, True, False, True]]), u)[0].tolist() == [1]


def test_the_smallest_uniform_draws_no_leading_token_of_probability_zero():
    logprobs = torch.tensor([[-math.inf, -math.inf, 0.0]])
    assert draw(logprobs, None, torch.zeros(1, dtype=torch.float64))[0].tolist() == [2]


def test_rows_do_not_depend_on_which_rows_are_beside_them():
    logprobs = temperature_scaled_logprobs(rows_of_logits(70, 5000, 9), 1.0)  # more than one chunk of rows
    u = uniforms([1], 70)[0]
    kept = kept_tokens(logprobs, 0.8, 0, 0.0)
    whole = draw(logprobs, kept, u)
    for row in (0, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(kept_tokens(logprobs[one], 0.8, 0, 0.0), kept[one])
        for all_rows, alone in zip(whole, draw(logprobs[one], kept[one], u[one]), strict=True):
            assert torch.equal(all_rows[one], alone)


@pytest.mark.parametrize("vocab_size", [5, 4000])
def test_frequencies_follow_the_probabilities(vocab_size: int):
    num = 4000
    logits = torch.full((1, vocab_size), -math.inf)
    logits[0, [0, 2, vocab_size - 1]] = torch.tensor([0.2, 0.5, 0.3]).log()
    logprobs = temperature_scaled_logprobs(logits, 1.0).expand(num, vocab_size)
    shares = torch.bincount(draw(logprobs, None, uniforms([77], num)[0])[0], minlength=vocab_size) / num
    # four standard deviations of a share of 4000 draws are at most 0.032
    assert [float(shares[t]) for t in (0, 2, vocab_size - 1)] == pytest.approx([0.2, 0.5, 0.3], abs=0.032)
    assert float(shares.sum()) == 1.0


ALLOWED = torch.tensor([[0, 3, 0], [1, 2, 3]])
THERE = torch.tensor([[True, True, False], [True, True, True]])


@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 40),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_of_the_whole_is_the_plain_draw_but_for_rounding(seed, blocks, scale, temperature, uniform):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(3, 32 * blocks, generator=generator) * scale
    logits_BV[torch.rand(logits_BV.shape, generator=generator) < 0.3] = -math.inf
    logits_BV[:, 0] = 0.0  # a row has one token at least
    uniforms_B = torch.full((3,), uniform, dtype=torch.float64)
    tokens_B, logprobs_B = sampling.draw_whole(logits_BV, temperature, uniforms_B)
    logprobs_BV = sampling.temperature_scaled_logprobs(logits_BV.double(), temperature)
    assert torch.allclose(logprobs_B.double(), logprobs_BV.gather(1, tokens_B[:, None])[:, 0], atol=1e-5)
    ends_BV = logprobs_BV.exp().cumsum(1)
    drawn_ends_B = ends_BV.gather(1, tokens_B[:, None])[:, 0]
    drawn_B = logprobs_BV.exp().gather(1, tokens_B[:, None])[:, 0]
    assert (drawn_B > 0).all()
    # inverse CDF: the uniform lies between the sums before and with the token, within the rounding of float32
    assert (drawn_ends_B >= uniforms_B - 1e-5).all()
    assert (drawn_ends_B - drawn_B <= uniforms_B + 1e-5).all()


def test_a_draw_of_the_whole_takes_no_token_of_probability_zero_at_either_end():
    logits_BV = torch.full((2, 96), -math.inf)
    logits_BV[:, 33:63] = torch.linspace(0, 1, 30)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sampling.draw_whole(logits_BV, 1.0, ends)[0].tolist() == [33, 62]


def test_a_draw_of_the_whole_does_not_depend_on_the_rows_beside_it():
    logits_BV = torch.randn(70, 4096, generator=torch.Generator().manual_seed(3))
    uniforms_B = torch.rand(70, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    together = sampling.draw_whole(logits_BV, 0.7, uniforms_B)
    for row in (0, 1, 63, 69):
        alone = sampling.draw_whole(logits_BV[row : row + 1], 0.7, uniforms_B[row : row + 1])
        assert [float(part[0]) for part in alone] == [float(part[row]) for part in together]


def test_a_draw_of_the_whole_needs_a_temperature():
    with pytest.raises(InputError, match="greedy"):
        sampling.draw_whole(torch.zeros(1, 32), 0.0, torch.zeros(1))


def test_draws_among_allowed_tokens_by_hand():
    logits = torch.log(torch.tensor([[1.0, 4.0, 2.0, 3.0], [2.0, 3.0, 1.0, 2.0]])) + 5.0
    for uniforms_B, columns, shares, kept in (
        ([0.24, 0.49], [0, 0], [0.1, 3 / 8], [0.4, 6 / 8]),
        ([0.26, 0.51], [1, 1], [0.3, 1 / 8], [0.4, 6 / 8]),
        ([0.99, 0.99], [1, 2], [0.3, 2 / 8], [0.4, 6 / 8]),
    ):
        drawn = draw_allowed(logits, ALLOWED, THERE, torch.tensor(uniforms_B).double(), temperature=1.0)
        assert drawn[0].tolist() == columns
        assert drawn[1].exp().tolist() == pytest.approx(shares)
        assert drawn[2].exp().tolist() == pytest.approx(kept)
    cut = draw_allowed(logits, ALLOWED, THERE, torch.tensor([0.5, 0.59]).double(), temperature=1.0, top_k=2)
    assert cut[0].tolist() == [1, 0]
    assert cut[2].exp().tolist() == pytest.approx([0.4, 5 / 8])
    greedily = draw_allowed(logits, ALLOWED, THERE, torch.zeros(2), temperature=0.0)
    assert greedily[0].tolist() == [1, 0]
    assert greedily[1].exp().tolist() == pytest.approx([0.3, 3 / 8])


@given(seed=st.integers(0, 10**6), vocab_size=st.integers(1, 40), heat=st.sampled_from([0.3, 1.0, 4.0]))
def test_where_all_tokens_are_allowed_it_is_the_plain_draw(seed: int, vocab_size: int, heat: float):
    logits = rows_of_logits(5, vocab_size, seed).double()
    all_BV = torch.arange(vocab_size).expand(5, -1)
    u = uniforms([seed], 5)[0]
    wanted = draw(temperature_scaled_logprobs(logits, heat), None, u)
    found = draw_allowed(logits, all_BV, torch.ones_like(all_BV, dtype=torch.bool), u, temperature=heat)
    assert torch.equal(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1], atol=1e-12)
    assert torch.allclose(found[2], wanted[2], atol=1e-12)


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_where_nothing_that_is_allowed_can_be_drawn_no_number_comes_out(bad: float):
    logits = torch.zeros(2, 4)
    logits[0, [0, 3]] = bad
    columns, _, log_mass = draw_allowed(logits, ALLOWED, THERE, torch.tensor([0.3, 0.3]).double(), temperature=1.0)
    assert 0 <= int(columns[0]) < 3
    assert not math.isfinite(float(log_mass[0]))
    assert float(log_mass[1].exp()) == pytest.approx(0.75)


def test_no_rows_give_no_tokens():
    logprobs = torch.empty(0, 7)
    for out in draw(logprobs, kept_tokens(logprobs, 0.9, 2, 0.1), torch.empty(0, dtype=torch.float64)):
        assert out.shape == (0,)


# within the kept set


def test_truncated_log_probs_by_hand():
    # 1/2 and 1/4 of a kept mass of 3/4; the third token was cut off
    logprobs, mass = torch.tensor([0.5, 0.25, 0.125]).log(), torch.tensor([0.75, 0.75, 0.75]).log()
    within = truncated_logprobs(logprobs, mass, torch.tensor([True, True, False]))
    assert within.exp().tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert within[2] == -math.inf
    assert truncated_logprobs(logprobs, mass).exp().tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 6])


@given(seed=st.integers(0, 10**6), vocab_size=st.integers(1, 20), top_k=st.integers(1, 8))
def test_within_the_kept_set_probabilities_add_up_to_one(seed: int, vocab_size: int, top_k: int):
    logprobs = temperature_scaled_logprobs(rows_of_logits(1, vocab_size, seed).double(), 1.0)
    kept = kept_tokens(logprobs, 1.0, top_k, 0.0)
    _, _, mass = draw(logprobs, kept, torch.tensor([0.3], dtype=torch.float64))
    within = truncated_logprobs(logprobs[0], mass.expand(vocab_size), kept[0])
    expected = [lp - float(mass) if keep else -math.inf for lp, keep in zip(logprobs[0].tolist(), kept[0], strict=True)]
    assert within.tolist() == pytest.approx(expected, rel=1e-13)
    assert float(within.exp().sum()) == pytest.approx(1.0, rel=1e-12)


def test_a_token_that_is_not_kept_has_no_gradient_and_the_others_have_both():
    logprobs = torch.tensor([-1.0, -math.inf], dtype=torch.float64, requires_grad=True)
    mass = torch.tensor([-0.5, -0.5], dtype=torch.float64, requires_grad=True)
    truncated_logprobs(logprobs, mass, torch.tensor([True, False])).sum().backward()
    assert logprobs.grad is not None
    assert mass.grad is not None
    assert (logprobs.grad.tolist(), mass.grad.tolist()) == ([1.0, 0.0], [-1.0, 0.0])


def test_where_nothing_is_cut_off_truncated_is_full():
    logprobs = torch.tensor([-1.0, -0.5, -3.0])
    assert torch.equal(truncated_logprobs(logprobs, torch.zeros(3)), logprobs)


# greedy


def test_greedy_takes_the_lowest_id_among_equals_with_log_probs_at_temperature_one():
    token_ids, logprobs = greedy(torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]]))
    assert token_ids.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx([3 - math.log(2 * math.exp(3) + math.e + 1), -math.log(4)])


def test_top_k_one_draws_what_greedy_takes():
    logits = rows_of_logits(20, 30, 4, levels=3)
    kept = kept_tokens(temperature_scaled_logprobs(logits, 1.0), 1.0, 1, 0.0)
    drawn = draw(temperature_scaled_logprobs(logits, 1.0), kept, uniforms([5], 20)[0])
    token_ids, logprobs = greedy(logits)
    assert torch.equal(drawn[0], token_ids)
    torch.testing.assert_close(drawn[1], logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_normaliser_is_what_log_probs_lack(temperature: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    wanted = sampling.temperature_scaled_logprobs(logits, temperature)
    found = logits / temperature - sampling.log_normaliser(logits, temperature)[:, None]
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="temperature must be positive"):
        sampling.log_normaliser(logits, 0.0)
