"""Sampling within a tree of sequences: whole sequences only, drawn as the exact renormalised distribution says."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core import keyed_random
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import Completion
from rft_engine.decoding.trie_constraint import TrieSampler, check_whole, end_tokens
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

VOCAB, END = 9, 8
PROMPTS = [[1], [2, 3, 4], [5, 1], [6, 6, 2, 1, 3, 4, 5, 0], [0, 3], [4, 4, 4]]
KEYS = [[100 * p + s for s in range(n)] for p, n in enumerate([3, 1, 4, 2, 4, 5])]


def model_of(seed: int = 5, scale: float = 1.5) -> FakeDecodableModel:
    return FakeDecodableModel(scale * torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(seed)), carry=3)


def engine_of(max_rows: int = 64, model: FakeDecodableModel | None = None) -> NativeEngine[FakeCache]:
    return NativeEngine(model or model_of(), max_rows=max_rows, max_len=64)


def catalogue(seed: int, size: int = 30, *, ended: bool = True) -> list[tuple[int, ...]]:
    """Sequences of 1 to 5 tokens, with a stop token behind each or of which none begins another."""
    numbers = random.Random(seed)
    found = {tuple(numbers.randrange(END) for _ in range(numbers.randint(1, 4))) for _ in range(size)}
    if ended:
        return sorted((*sequence, END) for sequence in found)
    return sorted(s for s in found if not any(o != s and o[: len(s)] == s for o in found))


def exact(
    model: FakeDecodableModel, prompt: list[int], sequences: list[tuple[int, ...]], chosen: tuple[int, ...], heat: float
) -> tuple[list[float], list[float]]:
    """Log-prob over all tokens, and log of the mass of what may follow, of each token; in float64 from the table."""
    logprobs: list[float] = []
    masses: list[float] = []
    for place, token in enumerate(chosen):
        row = (model.logits_after([*prompt, *chosen[:place]]).double() / heat).log_softmax(-1)
        allowed = sorted({s[place] for s in sequences if s[:place] == chosen[:place]})
        logprobs.append(float(row[token]))
        masses.append(float(row[allowed].logsumexp(0)))
    return logprobs, masses


@pytest.mark.parametrize("seed", range(12))
def test_every_completion_is_a_whole_sequence_with_exact_numbers(seed: int):
    numbers = random.Random(seed)
    model, sequences = model_of(seed), catalogue(seed, ended=seed % 2 == 0)
    heat = numbers.choice([0.3, 0.7, 1.0, 2.5])
    engine = engine_of(numbers.choice([1, 2, 5, 64]), model)
    stops = (END,) if seed % 2 == 0 else ()
    options = SamplingOptions(temperature=heat, max_new_tokens=6, stop_token_ids=stops)
    found = engine.generate(PROMPTS, KEYS, options, constraint=TokenTrie.of(sequences))
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for completion in completions:
            assert completion.token_ids in sequences
            assert completion.finish_reason == "stop"
            logprobs, masses = exact(model, prompt, sequences, completion.token_ids, heat)
            assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
            assert completion.log_kept_mass == pytest.approx(masses, abs=1e-5)
    assert len({c.token_ids for c in chain(*found)}) > 1


@pytest.mark.parametrize(
    "cut", [{"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.4}, {"top_p": 0.8, "top_k": 3, "min_p": 0.1}]
)
def test_top_p_top_k_and_min_p_cut_within_what_may_follow(cut: dict[str, float]):
    model, sequences = model_of(), catalogue(3)
    trie = TokenTrie.of(sequences)
    [found] = engine_of(model=model).generate(
        [[3]], [range(200)], SamplingOptions(temperature=0.9, max_new_tokens=5, **cut), constraint=trie
    )
    narrowed = 0
    for completion in found:
        assert completion.token_ids in sequences
        for place, log_mass in enumerate(completion.log_kept_mass):
            row = (model.logits_after([3, *completion.token_ids[:place]]).double() / 0.9).softmax(-1)
            allowed = sorted({s[place] for s in sequences if s[:place] == completion.token_ids[:place]})
            shares = {token: float(row[token]) / float(row[allowed].sum()) for token in allowed}
            kept = kept_by_hand(shares, cut.get("top_p", 1.0), int(cut.get("top_k", 0)), cut.get("min_p", 0.0))
            assert completion.token_ids[place] in kept
            assert log_mass == pytest.approx(math.log(sum(float(row[token]) for token in kept)), abs=1e-5)
            narrowed += len(kept) < len(allowed)
    assert narrowed > 50


def kept_by_hand(shares: dict[int, float], top_p: float, top_k: int, min_p: float) -> set[int]:
    order = sorted(shares, key=lambda token: -shares[token])
    order = [token for token in order if shares[token] >= min_p * shares[order[0]]][: top_k or None]
    total, so_far, kept = sum(shares[token] for token in order), 0.0, set[int]()
    for token in order:
        kept.add(token)
        so_far += shares[token]
        if so_far >= top_p * total:
            break
    return kept


def test_sequences_come_as_often_as_the_renormalised_distribution_says():
    model, num = model_of(), 6000
    sequences = [(1, 2, END), (1, 3, END), (4, END), (5, 2, 2, END), (5, 2, 7, END), (5, END)]
    [found] = engine_of(num, model).generate(
        [[2, 3]], [range(num)], SamplingOptions(temperature=0.8, max_new_tokens=4), constraint=TokenTrie.of(sequences)
    )
    counts, chi_square, total = Counter(c.token_ids for c in found), 0.0, 0.0
    for sequence in sequences:
        logprobs, masses = exact(model, [2, 3], sequences, sequence, 0.8)
        share = math.exp(sum(logprobs) - sum(masses))
        total += share
        chi_square += (counts[sequence] - num * share) ** 2 / (num * share)
    assert total == pytest.approx(1.0)
    assert chi_square < 25.7  # 5 degrees of freedom: once in 10,000 independent runs; the draw is fixed by its keys


def test_token_t_is_the_inverse_cdf_of_uniform_t_among_what_may_follow():
    model, sequences = model_of(), catalogue(7)
    [found] = engine_of(model=model).generate(
        [[2, 3]], [range(50)], SamplingOptions(temperature=1.3, max_new_tokens=5), constraint=TokenTrie.of(sequences)
    )
    for key, completion in enumerate(found):
        uniforms = keyed_random.uniforms([key], 5)[0].tolist()
        for place, (token, uniform) in enumerate(zip(completion.token_ids, uniforms, strict=False)):
            allowed = sorted({s[place] for s in sequences if s[:place] == completion.token_ids[:place]})
            row = model.logits_after([2, 3, *completion.token_ids[:place]]).double() / 1.3
            cumulative = [0.0, *row[allowed].softmax(-1).cumsum(-1).tolist()]
            column = allowed.index(token)
            assert cumulative[column] - 1e-6 <= uniform < cumulative[column + 1] + 1e-6


def test_a_draw_does_not_depend_on_other_rows():
    options = SamplingOptions(temperature=1.0, top_p=0.9, max_new_tokens=5)
    trie = TokenTrie.of(catalogue(2, ended=False))
    wanted = engine_of(64).generate(PROMPTS, KEYS, options, constraint=trie)
    for max_rows in (1, 2, 3, 7):
        assert engine_of(max_rows).generate(PROMPTS, KEYS, options, constraint=trie) == wanted
    assert engine_of(6).generate(PROMPTS[::-1], KEYS[::-1], options, constraint=trie)[::-1] == wanted
    for prompt, keys, completions in zip(PROMPTS, KEYS, wanted, strict=True):
        for key, completion in zip(keys, completions, strict=True):
            assert engine_of(6).generate([prompt], [[key]], options, constraint=trie) == [[completion]]


def test_greedy_is_the_beam_search_of_width_one():
    trie = TokenTrie.of(catalogue(4))
    found = engine_of(5).generate(
        PROMPTS, [[0]] * 6, SamplingOptions(temperature=0.0, max_new_tokens=5), constraint=trie
    )
    beams = engine_of().beam_search(PROMPTS, trie, num_beams=1)
    for [one], [other] in zip(found, beams, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.log_kept_mass == pytest.approx(other.log_kept_mass, abs=1e-6)


def test_the_first_token_has_its_own_temperature():
    model, sequences = model_of(), catalogue(6)
    [found] = engine_of(model=model).generate(
        [[3]],
        [range(60)],
        SamplingOptions(temperature=0.5, first_token_temperature=5.0, max_new_tokens=5),
        constraint=TokenTrie.of(sequences),
    )
    for completion in found:
        hot = exact(model, [3], sequences, completion.token_ids, 5.0)
        cool = exact(model, [3], sequences, completion.token_ids, 0.5)
        assert completion.logprobs == pytest.approx([hot[0][0], *cool[0][1:]], abs=1e-5)
        assert completion.log_kept_mass == pytest.approx([hot[1][0], *cool[1][1:]], abs=1e-5)


def test_what_has_nearly_no_mass_is_drawn_by_its_own_shares():
    logits_VV = torch.zeros(VOCAB, VOCAB)
    logits_VV[:, 7] = 300.0  # e^-300 is 0 in float32
    logits_VV[:, 1] = math.log(3.0)
    engine = engine_of(4000, FakeDecodableModel.bigram(logits_VV))
    [found] = engine.generate(
        [[1]], [range(4000)], SamplingOptions(temperature=1.0, max_new_tokens=1), constraint=TokenTrie.of([[1], [2]])
    )
    share = sum(c.token_ids == (1,) for c in found) / 4000
    assert share == pytest.approx(0.75, abs=0.03)
    assert found[0].log_kept_mass[0] == pytest.approx(math.log(4.0) - 300.0, rel=1e-6)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_no_mass_at_all_is_an_error_and_never_another_token(value: float, temperature: float):
    logits_VV = torch.zeros(VOCAB, VOCAB)
    logits_VV[1, 2:4] = value  # after a 1 comes a 2 or a 3, which the model gives nothing
    engine = engine_of(model=FakeDecodableModel.bigram(logits_VV))
    trie = TokenTrie.of([[1, 2], [1, 3], [4, 5]])
    with pytest.raises(ServiceError, match=r"every token that may follow \[1\]") as caught:
        engine.generate([[0]], [range(20)], SamplingOptions(temperature=temperature, max_new_tokens=2), constraint=trie)
    assert caught.value.problem.code == "engine.constraint.no_mass"


@pytest.mark.parametrize(
    ("sequences", "options", "code", "remedy"),
    [
        ([[1, 2, 3], [4]], {"max_new_tokens": 2}, "engine.constraint.budget", "max_new_tokens=3"),
        ([[1, 2, 3]], {"max_new_tokens": 4, "budgets": [[4, 2]]}, "engine.constraint.budget", "budgets of 3"),
        ([[1, 2], [3]], {"min_new_tokens": 1}, "engine.constraint.min_new_tokens", "min_new_tokens=0"),
        ([[1, 2], [3]], {"stop_token_ids": [3, 1]}, "engine.constraint.stop_token_ids", "stop_token_ids without it"),
        ([[1, 70]], {}, "engine.unknown_token", "tokenizer"),
    ],
)
def test_what_would_cut_a_sequence_is_refused(sequences: Any, options: dict[str, Any], code: str, remedy: str):
    given: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 4} | options
    budgets, trie = given.pop("budgets", None), TokenTrie.of(sequences)
    with pytest.raises(OptionsError) as caught:
        engine_of().generate([[1]], [[5, 6]], SamplingOptions(**given), budgets=budgets, constraint=trie)
    assert caught.value.problem.code == code
    assert remedy in caught.value.problem.do


def test_a_minimum_below_the_shortest_sequence_and_stops_at_ends_change_nothing():
    options, trie = SamplingOptions(temperature=1.0, max_new_tokens=9), TokenTrie.of([[1, 2], [3, 4, 4]])
    plain = engine_of().generate(PROMPTS, KEYS, options, constraint=trie)
    budgets = [[3 + key % 6 for key in keys] for keys in KEYS]
    ended = replace(options, min_new_tokens=1, stop_token_ids=(2,))
    assert plain == engine_of().generate(PROMPTS, KEYS, ended, budgets=budgets, constraint=trie)


def test_a_walk_that_leaves_the_tree_is_caught_before_anything_is_handed_out(monkeypatch: pytest.MonkeyPatch):
    honest = TrieSampler.draw

    def wrong(self: TrieSampler, *given: Any) -> Any:
        tokens_B, *rest = honest(self, *given)
        return (tokens_B + 1) % VOCAB, *rest

    monkeypatch.setattr(TrieSampler, "draw", wrong)
    with pytest.raises(ServiceError) as caught:
        engine_of().generate(
            PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=5), constraint=TokenTrie.of(catalogue(1))
        )
    assert caught.value.problem.code == "engine.constraint.not_whole"


@pytest.mark.parametrize(("tokens", "is_good"), [((1, 2), True), ((1,), False), ((1, 2, 2), False), ((2,), False)])
def test_a_completion_that_is_cut_or_too_long_is_not_whole(tokens: tuple[int, ...], is_good: bool):
    trie = TokenTrie.of([[1, 2], [3]])
    numbers = (-1.0,) * len(tokens)
    completions = [Completion((3,), (-1.0,), (0.0,), "stop", 0), Completion(tokens, numbers, numbers, "stop", 0)]
    if is_good:
        check_whole(trie, completions)
    else:
        with pytest.raises(ServiceError, match="completion 1") as caught:
            check_whole(trie, completions)
        assert caught.value.problem.code == "engine.constraint.not_whole"


@pytest.mark.parametrize(
    ("sequences", "ends"), [([[1, 2], [2, 1]], []), ([[1, 8], [8]], [8]), ([[1, 2, 7], [3, 8]], [7, 8])]
)
def test_tokens_that_end_sequences_for_another_loop(sequences: list[list[int]], ends: list[int]):
    assert end_tokens(TokenTrie.of(sequences)) == ends


def test_ends_that_another_loop_cannot_see_are_refused():
    with pytest.raises(OptionsError, match="token 1") as caught:
        end_tokens(TokenTrie.of([[1, 2], [2, 2, 1]]))
    assert caught.value.problem.code == "engine.constraint.ends"


def test_rows_leave_at_the_end_of_their_sequence():
    model = model_of()
    engine = engine_of(40, model)
    trie = TokenTrie.of([[1], [2], [3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]])
    [found] = engine.generate([[1]], [range(40)], SamplingOptions(temperature=1.0, max_new_tokens=12), constraint=trie)
    num_rows = sum(rows for name, (rows, *_) in model.calls if name == "step")
    long = sum(len(completion.token_ids) > 1 for completion in found)
    assert 0 < long < 40
    assert num_rows <= 11 * max(long, 5) + 40


def test_without_a_constraint_no_tree_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TokenTrie, "allowed", None)
    monkeypatch.setattr(TokenTrie, "is_end", None)
    assert engine_of().generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=3))
