"""The draw inside vLLM, row by row of a batch that changes: tokens and figures are those of the native engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.completions import Completion
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeDecodableModel
from rft_engine.vllm.keyed_sampler import SAMPLE_ARGUMENT, KeyedSampler

VOCAB = 7
MODEL = FakeDecodableModel(1.5 * torch.randn((11, VOCAB), generator=torch.Generator().manual_seed(5)), carry=3)
PROMPTS, KEYS = [[1], [2, 3], [4, 4, 1], [5]], [11, 12, 13, 14]
CPU = torch.device("cpu")


class Batch:
    """Rows of vLLM's batch, some of which belong to nobody; what has changed since the last step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, list[int]]] = []
        self.changes = SimpleNamespace(removed=[], added=[], moved=[])

    def add(self, sample: int | None, index: int | None = None) -> None:
        """Put a new request behind the others, or in the place of one that is gone."""
        row: tuple[int | None, list[int]] = (sample, [])
        index = len(self.rows) if index is None else index
        self.rows[index : index + 1] = [row]
        extra = None if sample is None else {SAMPLE_ARGUMENT: sample}
        self.changes.added.append((index, SimpleNamespace(extra_args=extra), [], row[1]))

    def swap(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self.changes.moved.append((one, other, SimpleNamespace(name="SWAP")))

    def remove(self, index: int) -> None:
        """Take a row out and put the last one in its place."""
        last = len(self.rows) - 1
        self.changes.removed.append(index)
        if index != last:
            self.rows[index] = self.rows[last]
            self.changes.moved.append((last, index, SimpleNamespace(name="UNIDIRECTIONAL")))
        self.rows.pop()

    def logits(self) -> torch.Tensor:
        """[B, V]; rows that belong to nobody have their own."""
        return torch.stack(
            [
                torch.full((VOCAB,), 0.25) if sample is None else MODEL.logits_after([*PROMPTS[sample], *output])
                for sample, output in self.rows
            ]
        )

    def taken(self) -> Any:
        found, self.changes = self.changes, SimpleNamespace(removed=[], added=[], moved=[])
        return found if found.removed or found.added or found.moved else None


def the_one_left(logits_V: torch.Tensor) -> int:
    """The token that alone can be picked."""
    token = int(logits_V.argmax())
    assert logits_V.tolist() == [0.0 if place == token else -math.inf for place in range(VOCAB)]
    return token


def leave(sampler: KeyedSampler, batch: Batch, done: dict[int, list[int]]) -> None:
    """Take the rows of samples that are done out of the batch, one after another."""
    for index in reversed(range(len(batch.rows))):
        if batch.rows[index][0] in done:
            batch.remove(index)
            sampler.update_state(batch.taken())


def run(sampler: KeyedSampler, ends: Sequence[int], max_new: int, foreign: bool) -> dict[int, list[int]]:
    """Tokens of four samples that come one after another and leave when they have ended."""
    batch, waiting, done = Batch(), [0, 1, 2, 3], dict[int, list[int]]()
    if foreign:
        batch.add(None)
    for step in range(60):
        if waiting and step % 2 == 0:
            batch.add(waiting.pop(0))
        if step == 3 and len(batch.rows) > 1:
            batch.swap(0, len(batch.rows) - 1)
        if not waiting and all(sample is None for sample, _ in batch.rows):
            return done
        if not batch.rows:
            continue
        sampler.update_state(batch.taken())
        logits = batch.logits()
        if step % 3 == 1:
            sampler.apply(logits.clone())  # as for a token that is thrown away and drawn again
        given = logits.clone()
        found = sampler.apply(given)
        assert found is given, "in place"
        for index, (sample, output) in enumerate(batch.rows):
            if sample is None:
                assert torch.equal(found[index], logits[index]), "a row of nobody is left alone"
                continue
            output.append(the_one_left(found[index]))
            if output[-1] in ends or len(output) == max_new:
                done[sample] = output
        leave(sampler, batch, done)
    raise AssertionError("it does not end")


def same(taken: Any, wanted: Completion) -> bool:
    return (
        tuple(taken.token_ids) == wanted.token_ids
        and taken.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        and taken.log_kept_mass == pytest.approx(wanted.log_kept_mass, abs=1e-5)
    )


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0, max_new_tokens=9),
        SamplingOptions(temperature=0.0, max_new_tokens=5),
        SamplingOptions(temperature=0.7, max_new_tokens=9, top_p=0.8, top_k=4, stop_token_ids=(0, 2)),
        SamplingOptions(temperature=1.0, max_new_tokens=9, stop_token_ids=(0, 2, 4), min_new_tokens=3),
        SamplingOptions(temperature=0.6, max_new_tokens=7, first_token_temperature=5.0),
        SamplingOptions(
            temperature=0.6, max_new_tokens=7, first_token_temperature=5.0, stop_token_ids=(0, 2, 4), min_new_tokens=2
        ),
    ],
    ids=range(6),
)
def test_a_key_gives_what_it_gives_in_the_native_engine(options: SamplingOptions, foreign: bool) -> None:
    wanted = NativeEngine(MODEL, max_rows=4, max_len=64).generate(PROMPTS, [[key] for key in KEYS], options)
    sampler = KeyedSampler()
    for _ in range(2):
        sampler.begin(options, KEYS, VOCAB, CPU)
        tokens = run(sampler, options.stop_token_ids, options.max_new_tokens, foreign)
        order = [2, 0, 3, 1]
        lengths = [len(tokens[sample]) for sample in order]
        found = sampler.take(order, lengths)
        for taken, sample in zip(found, order, strict=True):
            assert taken.token_ids == tokens[sample]
            assert same(taken, wanted[sample][0])
        assert sampler.take([1], [1])[0].token_ids == tokens[1][:1]
        sampler = sampler if foreign else KeyedSampler()


def test_sequences_of_a_tree_are_those_of_the_native_engine() -> None:
    trie = TokenTrie.of([[1, 2, 3], [1, 5, 6], [4, 4, 4], [6, 2, 3]])
    for options in (
        SamplingOptions(temperature=1.3, max_new_tokens=3),
        SamplingOptions(temperature=0.5, max_new_tokens=3, first_token_temperature=9.0),
    ):
        engine = NativeEngine(MODEL, max_rows=4, max_len=64)
        wanted = engine.generate(PROMPTS, [[key] for key in KEYS], options, constraint=trie)
        sampler = KeyedSampler()
        sampler.begin(options, KEYS, VOCAB, CPU, trie)
        tokens = run(sampler, (), 3, foreign=True)
        for sample in range(4):
            [taken] = sampler.take([sample], [3])
            assert tokens[sample] == taken.token_ids
            assert same(taken, wanted[sample][0])


def test_before_a_call_and_without_rows_nothing_is_drawn() -> None:
    sampler, logits = KeyedSampler(), torch.ones(2, VOCAB)
    batch = Batch()
    batch.add(0)
    sampler.update_state(batch.taken())
    sampler.update_state(None)
    assert torch.equal(sampler.apply(logits), torch.ones(2, VOCAB))
    with pytest.raises(AssertionError):
        sampler.take([0], [1])
    sampler.begin(SamplingOptions(temperature=1.0, max_new_tokens=2), [1], VOCAB, CPU)
    assert sampler.apply(torch.ones(1, VOCAB)).isinf().sum() == VOCAB - 1
    batch.add(None, index=0)
    sampler.update_state(batch.taken())
    assert torch.equal(sampler.apply(logits), torch.ones(2, VOCAB)), "the request that came in its place is not ours"
    assert not sampler.is_argmax_invariant()


@pytest.mark.parametrize(("direction", "rows"), [("SWAP", [True, True]), ("UNIDIRECTIONAL", [True, False])])
def test_a_row_that_moves_leaves_its_place_unless_two_change_places(direction: str, rows: list[bool]) -> None:
    sampler, batch = KeyedSampler(), Batch()
    sampler.begin(SamplingOptions(temperature=1.0, max_new_tokens=2), [1, 2, 3], VOCAB, CPU)
    batch.add(0)
    batch.add(1)
    batch.changes.moved.append((1, 0, SimpleNamespace(name=direction)))
    sampler.update_state(batch.taken())
    found = sampler.apply(torch.ones(3, VOCAB))
    assert [bool(row.isinf().any()) for row in found] == [*rows, False]
    batch.changes.moved.append((0, 2, SimpleNamespace(name="SWAP")))
    sampler.update_state(batch.taken())
    found = sampler.apply(torch.ones(3, VOCAB))
    assert [bool(row.isinf().any()) for row in found] == [False, rows[1], True]


def test_a_request_that_left_is_drawn_no_more() -> None:
    sampler, batch = KeyedSampler(), Batch()
    sampler.begin(SamplingOptions(temperature=1.0, max_new_tokens=2), [1, 2], VOCAB, CPU)
    batch.add(0)
    batch.add(1)
    sampler.update_state(batch.taken())
    batch.changes.removed.append(1)
    sampler.update_state(batch.taken())
    assert [bool(row.isinf().any()) for row in sampler.apply(torch.ones(2, VOCAB))] == [True, False]


@pytest.mark.parametrize("ages", [(0, 1), (1, 0), (0, 1, 2, 0), (1, 1, 0, 3)])
def test_rows_at_their_first_token_are_drawn_beside_others_of_any_age(ages: tuple[int, ...]) -> None:
    options = SamplingOptions(temperature=0.6, max_new_tokens=5, first_token_temperature=5.0)
    wanted = NativeEngine(MODEL, max_rows=4, max_len=64).generate(PROMPTS, [[key] for key in KEYS], options)
    sampler, batch = KeyedSampler(), Batch()
    sampler.begin(options, KEYS, VOCAB, CPU)
    for sample, age in enumerate(ages):
        batch.add(sample)
        batch.rows[-1][1].extend(wanted[sample][0].token_ids[:age])
    sampler.update_state(batch.taken())
    drawn = [the_one_left(row) for row in sampler.apply(batch.logits())]
    assert drawn == [wanted[sample][0].token_ids[age] for sample, age in enumerate(ages)]
