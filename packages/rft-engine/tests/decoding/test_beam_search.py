from __future__ import annotations

import math
import random

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, ServiceError
from rft_engine.completions import Completion
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

VOCAB, END = 7, 6


def engine_of(max_rows: int = 64, max_len: int = 64) -> tuple[NativeEngine[FakeCache], FakeDecodableModel]:
    model = FakeDecodableModel(1.5 * torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(5)), carry=3)
    return NativeEngine(model, max_rows=max_rows, max_len=max_len), model


def catalogue(seed: int, size: int = 40) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    return sorted({(*(numbers.randrange(END) for _ in range(numbers.randint(1, 3))), END) for _ in range(size)})


def logprobs_of(model: FakeDecodableModel, prompt: list[int], sequence: tuple[int, ...], heat: float) -> list[float]:
    """Log-probs of the sequence's tokens after the prompt, from the table itself."""
    return [
        float((model.logits_after([*prompt, *sequence[:i]]) / heat).log_softmax(-1)[token])
        for i, token in enumerate(sequence)
    ]


PROMPTS = [[1], [2, 3, 4], [5, 1, 1, 0, 2], [0], [3, 3]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_rows", [64, 200])
def test_all_sequences_in_the_order_of_their_probability(max_rows: int, temperature: float):
    engine, model = engine_of(max_rows)
    sequences = catalogue(1)
    engine.load_weights(3)
    found = engine.beam_search(PROMPTS, TokenTrie.of(sequences), num_beams=60, temperature=temperature)
    for prompt, beams in zip(PROMPTS, found, strict=True):
        expected = {s: logprobs_of(model, prompt, s, temperature) for s in sequences}
        assert [b.token_ids for b in beams] == sorted(sequences, key=lambda s: -sum(expected[s]))
        for beam in beams:
            assert beam.logprobs == pytest.approx(expected[beam.token_ids], abs=1e-5)
            assert (beam.finish_reason, beam.weight_version) == ("stop", 3)


def test_the_mass_is_that_of_what_may_follow():
    engine, model = engine_of()
    sequences = catalogue(2)
    [beams] = engine.beam_search([[2, 3]], TokenTrie.of(sequences), num_beams=4)
    for beam in beams:
        for i, log_mass in enumerate(beam.log_kept_mass):
            allowed = sorted({s[i] for s in sequences if s[:i] == beam.token_ids[:i] and len(s) > i})
            probs = model.logits_after([2, 3, *beam.token_ids[:i]]).softmax(-1)
            assert log_mass == pytest.approx(math.log(float(probs[allowed].sum())), abs=1e-5)


def test_shares_of_what_may_follow_add_up_to_one():
    engine, _ = engine_of()
    trie = TokenTrie.of(catalogue(3))
    [beams] = engine.beam_search([[4]], trie, num_beams=64, mass="allowed")
    shares = [sum(beam.logprobs) - sum(beam.log_kept_mass) for beam in beams]
    assert sum(map(math.exp, shares)) == pytest.approx(1.0, rel=1e-5)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("num_beams", [1, 3, 16, 1000])
def test_beams_are_valid_and_distinct_and_do_not_depend_on_their_neighbours(num_beams: int):
    sequences = catalogue(4)
    trie = TokenTrie.of(sequences)
    together = engine_of()[0].beam_search(PROMPTS, trie, num_beams=num_beams)
    alone = [engine_of(len(sequences))[0].beam_search([prompt], trie, num_beams=num_beams)[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        tokens = [beam.token_ids for beam in one]
        assert tokens == [beam.token_ids for beam in other]
        assert set(tokens) <= set(sequences)
        assert 1 <= len(set(tokens)) == len(tokens) <= num_beams
    if num_beams == 1000:
        assert all(len(beams) == len(sequences) for beams in together)


def test_no_prompts_and_the_engine_afterwards():
    engine, _ = engine_of()
    trie = TokenTrie.of(catalogue(5))
    assert engine.beam_search([], trie, num_beams=2) == []
    before: list[list[Completion]] = engine.beam_search(PROMPTS, trie, num_beams=2)
    sampled = engine.generate([[1]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=4))
    assert engine.beam_search(PROMPTS, trie, num_beams=2) == before
    assert engine.generate([[1]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=4)) == sampled
    engine.beam_search(PROMPTS, trie, num_beams=2)
    stats = engine.stats()
    assert stats.num_prefill_tokens == sum(map(len, PROMPTS))
    assert stats.num_generated_tokens == sum(len(b.token_ids) for beams in before for b in beams)
    assert stats.num_decode_steps > 0


@pytest.mark.parametrize(("sequences", "num_steps"), [([(1, END)], 1), ([(1, 2, 3, END), (4, END)], 3), ([(END,)], 0)])
def test_the_steps_are_one_fewer_than_the_longest_sequence(sequences: list[tuple[int, ...]], num_steps: int):
    engine, model = engine_of()
    engine.beam_search(PROMPTS, TokenTrie.of(sequences), num_beams=2)
    assert engine.stats().num_decode_steps == num_steps
    assert len([name for name, _ in model.calls if name == "step"]) == num_steps


def test_a_sequence_that_the_model_rules_out_is_no_beam():
    table = torch.randn(31, VOCAB, generator=torch.Generator().manual_seed(5))
    table[:, 2] = -torch.inf
    engine = NativeEngine(FakeDecodableModel(table, carry=3), max_rows=64, max_len=64)
    possible = {(1, END), (3, 4, END)}
    beams_by_prompt = engine.beam_search(PROMPTS, TokenTrie.of([*possible, (2, END), (3, 2, END)]), num_beams=4)
    assert [{beam.token_ids for beam in beams} for beams in beams_by_prompt] == [possible] * len(PROMPTS)
    assert all(math.isfinite(sum(beam.logprobs)) for beams in beams_by_prompt for beam in beams)


def test_a_temperature_near_zero_is_searched():
    engine, model = engine_of()
    sequences = catalogue(1)
    [beams] = engine.beam_search([[2, 3]], TokenTrie.of(sequences), num_beams=60, temperature=0.05)
    expected = {s: sum(logprobs_of(model, [2, 3], s, 0.05)) for s in sequences}
    assert [beam.token_ids for beam in beams] == sorted(sequences, key=lambda s: -expected[s])


def test_what_cannot_be_searched_is_refused():
    engine, _ = engine_of(max_rows=8, max_len=8)
    trie = TokenTrie.of(catalogue(6))
    refused = (
        ({"num_beams": 0}, "engine.num_beams"),
        ({"num_beams": 9}, "engine.num_beams"),
        ({"num_beams": 2, "temperature": 0.0}, "engine.beam_temperature"),
        ({"num_beams": 2, "temperature": math.inf}, "engine.beam_temperature"),
    )
    for options, code in refused:
        with pytest.raises(OptionsError) as caught:
            engine.beam_search([[1]], trie, **options)  # type: ignore[arg-type]
        assert caught.value.problem.code == code
    with pytest.raises(OptionsError, match=r"token 9.*tokens are 0 to 6") as caught:
        engine.beam_search([[1]], TokenTrie.of([[9]]), num_beams=1)
    assert caught.value.problem.code == "engine.unknown_token"
    with pytest.raises(OptionsError, match="prompt 0 has 5") as caught:
        engine.beam_search([[1] * 5], trie, num_beams=1)
    assert caught.value.problem.code == "engine.prompt_too_long"
    engine.sleep()
    with pytest.raises(ServiceError):
        engine.beam_search([[1]], trie, num_beams=1)
