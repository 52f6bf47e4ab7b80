"""Requests of replicas: parts of a call, contexts that share a prefill, JSON, and what no engine could draw."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.native.partial_requests import SampleRequests
from rft_engine.weight_sync.shared_images import SharedImage

OPTIONS = SamplingOptions(temperature=0.7, max_new_tokens=9, stop_token_ids=(0,))
SHOWN = [SharedImage(name, {"name": name}) for name in "abc"]
CALL = SampleRequests(
    prefixes=[(1,), (2, 3), (1,), (4, 5, 6), (1,)],
    keys=[10, 11, 12, 13, 14],
    starts=[0, 1, 0, 2, 0],
    budgets=[3, 9, 5, 1, 2],
    options=OPTIONS,
    media=[2, -1, 0, 0, 2],
    shown=SHOWN,
)
PLAIN = SampleRequests(CALL.prefixes, CALL.keys, CALL.starts, CALL.budgets, OPTIONS)


def test_a_part_has_its_own_requests_budget_and_images() -> None:
    part = CALL.part([4, 1, 2])
    assert part == SampleRequests(
        [(1,), (2, 3), (1,)],
        [14, 11, 12],
        [0, 1, 0],
        [2, 9, 5],
        OPTIONS,
        [1, -1, 0],
        [SHOWN[0], SHOWN[2]],
    )
    smaller = CALL.part([4, 0])
    assert smaller.options == SamplingOptions(temperature=0.7, max_new_tokens=3, stop_token_ids=(0,))
    assert (smaller.media, smaller.shown) == ([0, 0], [SHOWN[2]])
    assert (CALL.part([1]).media, CALL.part([1]).shown) == ([], [])
    assert (PLAIN.part([3]).media, PLAIN.part([3]).options.max_new_tokens) == ([], 1)
    nothing = PLAIN.part([])
    assert (nothing.prefixes, nothing.budgets, nothing.options.max_new_tokens) == ([], [], 1)


def test_contexts_are_the_image_and_the_prefix() -> None:
    assert CALL.contexts() == [(2, 1), (-1, 2, 3), (0, 1), (0, 4, 5, 6), (2, 1)]
    assert PLAIN.contexts() == [(-1, 1), (-1, 2, 3), (-1, 1), (-1, 4, 5, 6), (-1, 1)]
    assert [CALL.media_of(request) for request in range(5)] == [2, -1, 0, 0, 2]
    assert [PLAIN.media_of(request) for request in range(5)] == [-1] * 5


def test_fields_are_json_of_which_the_same_call_can_be_made() -> None:
    fields: dict[str, Any] = json.loads(json.dumps(CALL.fields()))
    options = SamplingOptions.from_fields(fields.pop("options"))
    assert options == OPTIONS
    assert fields == {
        "prefixes": [[1], [2, 3], [1], [4, 5, 6], [1]],
        "keys": [10, 11, 12, 13, 14],
        "starts": [0, 1, 0, 2, 0],
        "budgets": [3, 9, 5, 1, 2],
        "media": [2, -1, 0, 0, 2],
        "shown": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
        "constraint": None,
    }


def test_a_constraint_travels_as_plain_numbers_and_stays_with_a_part() -> None:
    trie = TokenTrie.of([[1, 2], [3]])
    call = SampleRequests([(1,), (2,)], [5, 6], [0, 0], [2, 2], OPTIONS, constraint=trie)
    assert call.part([1]).constraint is trie
    sent = json.loads(json.dumps(call.fields()["constraint"]))
    assert TokenTrie.from_lists(sent).as_lists() == trie.as_lists()


def one(prefix: tuple[int, ...], start: int, budget: int, options: SamplingOptions = OPTIONS) -> SampleRequests:
    return SampleRequests([(1,), prefix], [5, 6], [0, start], [1, budget], options)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (one((1, 2), 2, 3), "engine.draw_request"),
        (one((1, 2), -1, 3), "engine.draw_request"),
        (one((1, 2), 0, 0), "engine.draw_request"),
        (one((), 0, 1), "engine.empty_prompt"),
        (one((1,) * 7, 0, 4), "engine.prompt_too_long"),
        (one((7,), 0, 1), "engine.unknown_token"),
        (
            one((1,), 0, 1, SamplingOptions(temperature=1.0, max_new_tokens=9, stop_token_ids=(7,))),
            "engine.sampling_option",
        ),
    ],
)
def test_requests_that_no_engine_could_draw_are_refused(call: SampleRequests, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        call.check(10, 7)
    assert caught.value.problem.code == code


def test_requests_at_the_limits_are_taken_and_lists_of_other_lengths_are_not() -> None:
    one((1, 2), 1, 8).check(10, 7)
    one((6,), 0, 1).check(10, 7)
    CALL.check(11, 7)
    for name in ("keys", "starts", "budgets", "media"):
        fields: dict[str, Any] = {
            field: getattr(CALL, field) for field in ("prefixes", "keys", "starts", "budgets", "options", "media")
        }
        with pytest.raises(AssertionError):
            SampleRequests(**(fields | {name: getattr(CALL, name)[:4]})).check(11, 7)
