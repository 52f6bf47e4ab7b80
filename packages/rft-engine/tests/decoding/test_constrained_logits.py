"""The logits processor alone; `tests/integration/test_constrained_generate.py` puts it into transformers."""

from __future__ import annotations

import pytest
import torch

from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.decoding.constrained_logits import ConstrainedLogitsProcessor, walk

EOS = 9
TRIE = TokenTrie.of([[5, 1, EOS], [5, 2, EOS], [0, EOS]])
PROMPTS = torch.tensor([[7, 7], [7, 3]])


def processor() -> ConstrainedLogitsProcessor:
    return ConstrainedLogitsProcessor(TRIE, PROMPTS, eos_token_id=EOS)


def allowed(row: torch.Tensor) -> list[int]:
    return (row > -torch.inf).nonzero()[:, 0].tolist()


def test_legal_tokens_keep_their_scores_and_all_others_get_minus_infinity() -> None:
    scores = torch.arange(20.0).view(2, 10)
    found = processor()(PROMPTS, scores)
    for row, before in zip(found, scores, strict=True):
        assert allowed(row) == [0, 5]
        assert row[5] == before[5]


@pytest.mark.parametrize(
    ("generated", "expected"),
    [([5], [1, 2]), ([0], [9]), ([5, 2], [9]), ([5, 2, 9], [9]), ([5, 2, 9, 0], [9]), ([4], [9]), ([5, 5], [9])],
    ids=["inside", "token 0", "before the end", "whole", "whole and padded", "unknown", "unknown below"],
)
def test_a_prefix_is_read_from_the_tokens_of_the_row(generated: list[int], expected: list[int]) -> None:
    rows = torch.cat([PROMPTS, torch.tensor([generated, generated])], 1)
    found = processor()(rows, torch.zeros(2, 10))
    assert [allowed(row) for row in found] == [expected, expected]


def test_rows_go_on_each_from_its_own_prefix_and_nothing_is_kept_between_calls() -> None:
    made = processor()
    rows = torch.cat([PROMPTS.repeat_interleave(2, 0), torch.tensor([[5], [0], [4], [5]])], 1)
    for _ in range(2):
        assert [allowed(row) for row in made(rows, torch.zeros(4, 10))] == [[1, 2], [9], [9], [1, 2]]


def test_sequences_are_whole_distinct_and_in_the_order_of_the_rows() -> None:
    generated = torch.tensor([[5, 2, EOS, 0], [0, EOS, 0, 0], [5, 2, EOS, EOS], [5, 4, EOS, 0], [0, EOS, 0, 0]])
    output = torch.cat([PROMPTS[:1].expand(5, -1), generated], 1)
    made = ConstrainedLogitsProcessor(TRIE, PROMPTS[:1], eos_token_id=EOS)
    assert made.sequences(output) == [[(5, 2, EOS), (0, EOS)]]


def test_walk_gives_the_root_for_what_is_no_prefix() -> None:
    states, is_prefix = walk(TRIE, torch.tensor([[5, 1], [5, 3]]))
    assert is_prefix.tolist() == [True, False]
    assert states.tolist() == [TRIE.state_of([5, 1]), 0]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OptionsError, match="rows of 1 tokens, prompts of 2"):
        processor()(PROMPTS[:, :1], torch.zeros(2, 10))
    with pytest.raises(OptionsError, match=r"shape \[2\]"):
        ConstrainedLogitsProcessor(TRIE, PROMPTS[0], eos_token_id=EOS)
    with pytest.raises(OptionsError, match="the tree contains token 9"):
        processor()(PROMPTS, torch.zeros(2, 9))
