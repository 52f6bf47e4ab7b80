"""Walks through a tree, draw by draw, and the edges of what is refused before and after them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import Completion
from rft_engine.decoding.trie_constraint import (
    TrieSampler,
    check_constraint,
    check_vocabulary,
    check_whole,
    end_tokens,
)

VOCAB = 9
DRAW = SamplingOptions(temperature=1.0, max_new_tokens=4)


def sampler_of(sequences: list[list[int]], **options: Any) -> tuple[TrieSampler, TokenTrie]:
    trie = TokenTrie.of(sequences)
    return TrieSampler(SamplingOptions(**{"temperature": 1.0, "max_new_tokens": 4, **options}), trie), trie


def draw(sampler: TrieSampler, states: list[int], uniforms: list[float], logits: torch.Tensor | None = None) -> Any:
    given = torch.zeros(len(states), VOCAB) if logits is None else logits
    return sampler.draw(given, torch.tensor(uniforms, dtype=torch.float64), torch.tensor(states))


def test_rows_begin_at_the_root() -> None:
    states = TrieSampler.start(3, torch.device("cpu"))
    assert states.tolist() == [ROOT] * 3
    assert states.dtype == torch.int64


def test_a_draw_takes_a_row_to_the_state_behind_its_token() -> None:
    sampler, trie = sampler_of([[1, 2], [1, 3], [5]])
    tokens, logprobs, log_mass, behind = draw(sampler, [ROOT, ROOT], [0.1, 0.9])
    assert tokens.tolist() == [1, 5]
    assert behind.tolist() == [trie.state_of([1]), trie.state_of([5])]
    assert logprobs.tolist() == pytest.approx([math.log(1 / VOCAB)] * 2)
    assert log_mass.tolist() == pytest.approx([math.log(2 / VOCAB)] * 2)
    assert sampler.ends_S.tolist() == [bool(trie.is_end(torch.tensor(s))) for s in range(trie.num_states)]


def test_a_row_at_its_end_stays_there_whatever_the_others_do() -> None:
    sampler, trie = sampler_of([[1, 2], [1, 3], [5]])
    ended, going = trie.state_of([5]), trie.state_of([1])
    tokens, logprobs, _, behind = draw(sampler, [ended, going], [0.5, 0.9])
    assert behind.tolist() == [ended, trie.state_of([1, 3])]
    assert tokens.tolist()[1] == 3
    assert bool(torch.isfinite(logprobs).all())


@pytest.mark.parametrize(
    ("options", "most"),
    [({"top_k": 1}, 1), ({"top_k": 2}, 2), ({"top_k": -1}, 3), ({"top_p": 0.6}, 1), ({"min_p": 0.5}, 1), ({}, 3)],
)
def test_cuts_are_among_the_tokens_that_may_follow(options: dict[str, Any], most: int) -> None:
    """Token 8 is the likeliest of all and in no sequence."""
    sampler, _ = sampler_of([[1], [2], [3]], **options)
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2, 3, 8]] = torch.tensor([2.0, 1.0, 0.0, 9.0])
    drawn = {int(draw(sampler, [ROOT], [(place + 0.5) / 50], logits)[0]) for place in range(50)}
    assert drawn == set(range(1, most + 1))


def test_a_temperature_belongs_to_the_options() -> None:
    sampler, _ = sampler_of([[1], [2]], temperature=0.5)
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1.0
    _, logprobs, _, _ = draw(sampler, [ROOT], [0.0], logits)
    assert float(logprobs[0]) == pytest.approx(2.0 - math.log(math.exp(2.0) + VOCAB - 1))


def code_of(ask: Any) -> str:
    with pytest.raises((OptionsError, ServiceError)) as caught:
        ask()
    return caught.value.problem.code


def test_budgets_of_the_longest_sequence_suffice() -> None:
    trie = TokenTrie.of([[1, 2, 3], [4]])
    for budgets in ([], [3, 4], [4, 4]):
        check_constraint(trie, SamplingOptions(temperature=1.0, max_new_tokens=4), budgets, VOCAB)
    check_constraint(trie, SamplingOptions(temperature=1.0, max_new_tokens=3), [], VOCAB)
    short = SamplingOptions(temperature=1.0, max_new_tokens=2)
    for options, budgets, remedy in ((short, [], "max_new_tokens=3"), (DRAW, [4, 2], "budgets of 3 or above")):
        with pytest.raises(OptionsError) as caught:
            check_constraint(trie, options, budgets, VOCAB)
        assert caught.value.problem.code == "engine.constraint.budget"
        assert caught.value.problem.do == remedy


def test_a_minimum_ends_below_the_shortest_sequence() -> None:
    trie = TokenTrie.of([[1, 2, 3], [4, 5]])
    for least in (0, 1):
        check_constraint(trie, SamplingOptions(temperature=1.0, max_new_tokens=4, min_new_tokens=least), [], VOCAB)
    for least in (2, 3):
        options = SamplingOptions(temperature=1.0, max_new_tokens=4, min_new_tokens=least)
        with pytest.raises(OptionsError) as caught:
            check_constraint(trie, options, [], VOCAB)
        assert caught.value.problem.code == "engine.constraint.min_new_tokens"
        assert caught.value.problem.do.startswith("min_new_tokens=1,")


def test_a_stop_token_stands_at_the_end_of_sequences_alone() -> None:
    trie = TokenTrie.of([[1, 2], [3, 2], [4]])

    def check(*stops: int) -> None:
        options = SamplingOptions(temperature=1.0, max_new_tokens=4, stop_token_ids=stops)
        check_constraint(trie, options, [], VOCAB)

    check(2, 4, 8)
    for stop in (1, 3):
        assert code_of(lambda stop=stop: check(2, stop)) == "engine.constraint.stop_token_ids"


def test_the_largest_token_is_the_last_of_the_vocabulary() -> None:
    trie = TokenTrie.of([[1, 8], [2]])
    check_vocabulary(trie, 9)
    check_constraint(trie, DRAW, [], 9)
    assert code_of(lambda: check_vocabulary(trie, 8)) == "engine.unknown_token"
    assert code_of(lambda: check_constraint(trie, DRAW, [], 8)) == "engine.unknown_token"


def test_ends_are_named_once_and_in_order() -> None:
    assert end_tokens(TokenTrie.of([[1, 7], [2, 2, 5], [3, 5], [7]])) == [5, 7]
    assert end_tokens(TokenTrie.of([[1, 7], [2, 7]])) == []
    for sequences in ([[7], [6, 7, 5]], [[1, 2, 5], [5, 1]]):
        assert code_of(lambda given=sequences: end_tokens(TokenTrie.of(given))) == "engine.constraint.ends"


def completion(tokens: list[int], masses: list[float] | None = None) -> Completion:
    numbers = tuple(masses or [0.0] * len(tokens))
    return Completion(tuple(tokens), (-1.0,) * len(tokens), numbers, "stop", 0)


def test_completions_of_any_length_are_walked_together() -> None:
    trie = TokenTrie.of([[1, 2, 3], [1, 4], [0]])
    check_whole(trie, [])
    whole = [completion([0]), completion([1, 2, 3]), completion([1, 4]), completion([0])]
    check_whole(trie, whole)
    # each is walked to its own end: the shortest is not taken for the longest's length, nor the other way
    for place in range(len(whole)):
        longer = completion([*whole[place].token_ids, 0])
        with pytest.raises(ServiceError):
            check_whole(trie, [*whole[:place], longer, *whole[place + 1 :]])


@pytest.mark.parametrize(
    "wrong", [[], [1, 2, 0, 0], [1], [1, 2], [1, 2, 4], [1, 4, 3], [0, 0], [1, 3], [2, 3], [4], [1, 2, 3, 0]]
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_completion_that_is_no_sequence_is_named(wrong: list[int], place: int) -> None:
    trie = TokenTrie.of([[1, 2, 3], [1, 4], [0]])
    completions = [completion([0]), completion([1, 2, 3]), completion([1, 4])]
    completions[place] = completion(wrong)
    with pytest.raises(ServiceError) as caught:
        check_whole(trie, completions)
    assert caught.value.problem.code == "engine.constraint.not_whole"
    assert caught.value.problem.what.startswith(f"completion {place}, {wrong}")


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_draw_from_nothing_is_an_error_even_where_it_hit_a_sequence(value: float) -> None:
    trie = TokenTrie.of([[1, 2, 3], [0]])
    completions = [completion([0]), completion([1, 2, 3], [-0.5, value, value])]
    with pytest.raises(ServiceError) as caught:
        check_whole(trie, completions)
    problem = caught.value.problem
    assert problem.code == "engine.constraint.no_mass"
    assert problem.what.startswith("completion 1:")
    assert "follow [1]" in problem.what
