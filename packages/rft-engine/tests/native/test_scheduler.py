from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_engine.native.scheduler import PrefillScheduler


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9)), max_size=20),
    st.integers(1, 12),
)
def test_every_sample_is_admitted_once_within_the_free_rows(prompts: list[tuple[int, int]], max_rows: int):
    queue = PrefillScheduler([length for length, _ in prompts], [copies for _, copies in prompts], max_rows)
    samples: list[int] = []
    while queue.next_num_rows:
        taken = queue.take(max_rows)
        assert taken, "an empty batch always has room for the next prompt"
        assert sum(piece.num_copies for piece in taken) <= max_rows
        longest = max(piece.length for piece in taken)
        assert min(piece.length for piece in taken) >= 0.75 * longest
        assert len(taken) == 1 or longest * len(taken) <= 16384
        for piece in taken:
            assert piece.length == prompts[piece.prompt_index][0]
            samples += range(piece.first_sample, piece.first_sample + piece.num_copies)
    assert sorted(samples) == list(range(sum(copies for _, copies in prompts)))


def test_samples_are_numbered_prompt_after_prompt():
    queue = PrefillScheduler([3, 9, 3], [2, 1, 3], max_rows=10)
    by_prompt = {piece.prompt_index: piece for _ in range(3) for piece in queue.take(10)}
    assert [by_prompt[p].first_sample for p in range(3)] == [0, 2, 3]


def test_nothing_is_taken_when_the_next_prompt_does_not_fit():
    queue = PrefillScheduler([3], [4], max_rows=8)
    assert queue.take(3) == []
    assert queue.next_num_rows == 4


@pytest.mark.parametrize(
    ("lengths", "prefills"),
    [
        ([100, 75, 74], [[0, 1], [2]]),
        ([74, 100, 75, 60], [[1, 2], [0, 3]]),
        ([4096] * 5, [[0, 1, 2, 3], [4]]),
        ([3277] * 5, [[0, 1, 2, 3], [4]]),
        ([20_000, 20_000], [[0], [1]]),
        ([1] * 9, [list(range(9))]),
    ],
)
def test_prompts_of_three_quarters_of_the_longest_share_a_prefill_of_16384_tokens(
    lengths: list[int], prefills: list[list[int]]
):
    queue = PrefillScheduler(lengths, [1] * len(lengths), max_rows=9)
    found: list[list[int]] = []
    while queue.next_num_rows and len(found) < 20:
        found.append([piece.prompt_index for piece in queue.take(9)])
    assert found == prefills
    assert queue.num_prefill_tokens == sum(lengths)
