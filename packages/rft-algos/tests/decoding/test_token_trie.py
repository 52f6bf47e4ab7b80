from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_algos.decoding.token_trie import ROOT, TokenTrie
from rft_core.errors import OptionsError

SETS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=40)


def test_by_hand():
    trie = TokenTrie.of([[5, 1], [7, 1, 3], [5, 2]])
    assert (trie.num_states, trie.num_sequences, trie.depth, trie.most_children) == (7, 3, 3, 2)
    tokens, children, there = trie.allowed(
        torch.tensor([ROOT, trie.state_of([5]), trie.state_of([7]), trie.state_of([5, 1])])
    )
    assert tokens.tolist() == [[5, 7], [1, 2], [1, 0], [0, 0]]
    assert there.tolist() == [[True, True], [True, True], [True, False], [False, False]]
    assert children[0].tolist() == [trie.state_of([5]), trie.state_of([7])]
    assert children[2].tolist() == [trie.state_of([7, 1]), 0]
    assert trie.is_end(torch.tensor([ROOT, trie.state_of([5, 2]), trie.state_of([7, 1])])).tolist() == [
        False,
        True,
        False,
    ]
    assert trie.mask(torch.tensor([[ROOT]]), 8).tolist() == [[[False] * 5 + [True, False, True]]]
    assert not trie.mask(torch.tensor([trie.state_of([5, 1])]), 8).any()
    assert trie.state_of([]) == ROOT
    assert trie.to("cpu").advance(torch.tensor([[ROOT]]), torch.tensor([[7]])).tolist() == [[trie.state_of([7])]]


@settings(max_examples=60, deadline=None)
@given(SETS, st.randoms(use_true_random=False))
def test_equals_a_dictionary_of_prefixes(found: set[tuple[int, int, int]], order: random.Random):
    sequences = sorted(found)
    order.shuffle(sequences)
    trie = TokenTrie.of(sequences)
    after: dict[tuple[int, ...], set[int]] = {}
    for sequence in sequences:
        for length in range(4):
            after.setdefault(sequence[:length], set()).update(sequence[length : length + 1])
    assert trie.num_states == len(after)
    states = torch.tensor([trie.state_of(prefix) for prefix in after])
    assert len(set(states.tolist())) == len(after)
    tokens, children, there = trie.allowed(states)
    for prefix, row, behind, here in zip(after, tokens.tolist(), children.tolist(), there.tolist(), strict=True):
        assert [t for t, h in zip(row, here, strict=True) if h] == sorted(after[prefix])
        assert [trie.state_of((*prefix, t)) for t in sorted(after[prefix])] == [
            c for c, h in zip(behind, here, strict=True) if h
        ]
    assert trie.is_end(states).tolist() == [not allowed for allowed in after.values()]
    assert trie.mask(states, 31).sum(1).tolist() == [len(allowed) for allowed in after.values()]


def test_a_token_that_continues_nothing_is_an_error_with_what_does():
    trie = TokenTrie.of([[1, 2], [1, 3]])
    with pytest.raises(
        OptionsError, match=r"token 4 does not continue any sequence here; what does: \[2, 3\]"
    ) as caught:
        trie.advance(torch.tensor([ROOT, trie.state_of([1])]), torch.tensor([1, 4]))
    assert caught.value.problem.code == "trie.unknown_prefix"
    states = torch.tensor([[ROOT, ROOT, trie.state_of([1])]])
    with pytest.raises(OptionsError, match=r"token 5 does not continue any sequence here; what does: \[1\]") as caught:
        trie.advance(states, torch.tensor([[1, 5, 2]]))
    assert caught.value.problem.code == "trie.unknown_prefix"
    with pytest.raises(OptionsError, match="token 2") as caught:
        trie.state_of([1, 2, 2])  # behind a whole sequence nothing comes
    assert caught.value.problem.code == "trie.unknown_prefix"
    with pytest.raises(OptionsError, match="token 0") as caught:
        trie.advance(torch.tensor([trie.state_of([1, 2])]), torch.tensor([0]))  # 0 fills empty places
    assert caught.value.problem.code == "trie.unknown_prefix"


def test_an_unknown_token_is_shown_with_its_text_where_a_tokenizer_is_at_hand():
    trie = TokenTrie.of([[1, 2], [1, 3]])
    words = {1: "<a_1>", 2: "<b_2>", 3: "<b_3>", 4: " the"}
    with pytest.raises(OptionsError) as caught:
        trie.advance(torch.tensor([trie.state_of([1])]), torch.tensor([4]), text=lambda ids: words[ids[0]])
    assert caught.value.problem.what == (
        "token 4 ' the' does not continue any sequence here; what does: [2, 3], spelt '<b_2>', '<b_3>'"
    )
    wide = TokenTrie.of([[token] for token in range(20)])
    with pytest.raises(OptionsError) as caught:
        wide.advance(torch.tensor([ROOT]), torch.tensor([20]), text=lambda ids: f"w{ids[0]}")
    assert "'w7'" in caught.value.problem.what
    assert "'w8'" not in caught.value.problem.what


@pytest.mark.parametrize(
    ("sequences", "what"),
    [
        ([], "no sequences"),
        ([[1], []], "sequence 1 is empty"),
        ([[1, -2]], "sequence 0 holds token -2"),
        ([[3], [1, 2], [3]], r"sequences 0 and 2 are equal: \[3\]"),
        ([[1, 2, 3], [1, 2]], r"sequence 1, \[1, 2\], begins another one"),
        ([list(range(8)), list(range(8))], r"equal: \[0, 1, 2, 3, 4, 5, 6, 7\]"),
        ([list(range(9)), list(range(9))], r"equal: \[0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\]"),
    ],
)
def test_sequences_that_make_no_tree_are_refused(sequences: list[list[int]], what: str):
    with pytest.raises(OptionsError, match=what) as caught:
        TokenTrie.of(sequences)
    assert caught.value.problem.code == "trie.sequences"
    assert caught.value.problem.do


def test_many_sequences_with_large_ids():
    numbers = random.Random(1)
    sequences = {tuple(numbers.randrange(150_000) for _ in range(4)) for _ in range(20_000)}
    trie = TokenTrie.of(sorted(sequences))
    assert int(trie.is_end(torch.arange(trie.num_states)).sum()) == len(sequences) == trie.num_sequences
    assert all(trie.is_end(torch.tensor(trie.state_of(sequence))) for sequence in sorted(sequences)[:50])


def test_as_lists_it_is_plain_data_and_comes_back_the_same():
    trie = TokenTrie.of([[5, 1, 4], [5, 2], [7, 1]])
    message = json.loads(json.dumps(trie.as_lists()))
    back = TokenTrie.from_lists(message)
    assert (back.depth, back.shortest, back.most_children, back.num_sequences) == (3, 2, 2, 3)
    for name in ("offsets_S1", "tokens_E", "children_E"):
        assert torch.equal(getattr(back, name), getattr(trie, name))
    assert back.state_of([5, 1, 4]) == trie.state_of([5, 1, 4])
