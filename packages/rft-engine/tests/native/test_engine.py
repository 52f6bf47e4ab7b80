from __future__ import annotations

import math
import statistics
from itertools import chain

import pytest
import torch

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import keyed_random
from rft_core.errors import OptionsError, ServiceError
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel

VOCAB = 7


def random_model(carry: int = 3, states: int = 31, vocab: int = VOCAB, scale: float = 1.5) -> FakeDecodableModel:
    generator = torch.Generator().manual_seed(5)
    return FakeDecodableModel(scale * torch.randn(states, vocab, generator=generator), carry=carry)


def engine_of(model: FakeDecodableModel, max_rows: int = 64, max_len: int = 128) -> NativeEngine[FakeCache]:
    return NativeEngine(model, max_rows=max_rows, max_len=max_len)


PROMPTS = [[1], [2, 3, 4], [5, 1], [6, 6, 2, 1, 3, 4, 5, 0], [0, 3], [4, 4, 4]]
KEYS = [[100 * p + s for s in range(n)] for p, n in enumerate([3, 1, 4, 2, 4, 5])]


def test_sampled_frequencies_match_the_table():
    model = FakeDecodableModel.bigram(torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5], [-0.5, 0.3, 0.0]]))
    num = 4000
    [completions] = engine_of(model, max_rows=num).generate(
        [[1]], [range(num)], SamplingOptions(temperature=0.7, max_new_tokens=2)
    )
    first = torch.tensor([c.token_ids[0] for c in completions])
    second = torch.tensor([c.token_ids[1] for c in completions])
    expected = (torch.tensor([2.0, 0.0, 0.5]) / 0.7).softmax(-1)
    # chi-square with 2 degrees of freedom: above 18.4 once in 10,000 independent runs; the draw is fixed by its keys
    assert chi_square(first, expected) < 18.4
    after_zero = second[first == 0]
    assert chi_square(after_zero, (torch.tensor([0.0, 1.0, -1.0]) / 0.7).softmax(-1)) < 18.4


def chi_square(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=expected.numel()).double()
    wanted = expected.double() * tokens.numel()
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_token_t_is_the_inverse_cdf_of_uniform_t_of_the_samples_key():
    model = random_model()
    [[completion]] = engine_of(model).generate([[2, 3]], [[77]], SamplingOptions(temperature=1.3, max_new_tokens=20))
    uniforms = keyed_random.uniforms([77], 20)[0].tolist()
    history = [2, 3]
    for token, uniform in zip(completion.token_ids, uniforms, strict=True):
        cumulative = (model.logits_after(history).double() / 1.3).softmax(-1).cumsum(-1).tolist()
        below = cumulative[token - 1] if token else 0.0
        assert below - 1e-6 <= uniform < cumulative[token] + 1e-6
        history.append(token)


def test_logprobs_are_those_of_the_table_at_the_sampling_temperature():
    model = random_model()
    results = engine_of(model, max_rows=5).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=0.6, max_new_tokens=12, top_k=3)
    )
    for prompt, completions in zip(PROMPTS, results, strict=True):
        for completion in completions:
            history = list(prompt)
            for token, logprob, kept in zip(
                completion.token_ids, completion.logprobs, completion.log_kept_mass, strict=True
            ):
                expected = (model.logits_after(history) / 0.6).log_softmax(-1)
                assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
                assert kept == pytest.approx(float(expected.topk(3).values.logsumexp(0)), abs=1e-5)
                history.append(token)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 64])
def test_tokens_of_a_sample_do_not_depend_on_max_rows(max_rows: int):
    wanted = engine_of(random_model()).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=30, stop_token_ids=(0,))
    )
    got = engine_of(random_model(), max_rows).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=30, stop_token_ids=(0,))
    )
    assert got == wanted


def test_tokens_of_a_sample_do_not_depend_on_order_or_company():
    options = {"temperature": 1.0, "max_new_tokens": 30, "stop_token_ids": [0], "top_p": 0.9}
    wanted = engine_of(random_model(), 6).generate(PROMPTS, KEYS, SamplingOptions(**options))
    backwards = engine_of(random_model(), 6).generate(PROMPTS[::-1], KEYS[::-1], SamplingOptions(**options))
    assert backwards[::-1] == wanted
    for prompt, keys, completions in zip(PROMPTS, KEYS, wanted, strict=True):
        for key, completion in zip(keys, completions, strict=True):
            assert engine_of(random_model(), 6).generate([prompt], [[key]], SamplingOptions(**options)) == [
                [completion]
            ]


def test_other_keys_give_other_tokens():
    [completions] = engine_of(random_model()).generate(
        [[1, 2]], [range(8)], SamplingOptions(temperature=1.0, max_new_tokens=16)
    )
    assert len({completion.token_ids for completion in completions}) == 8


def test_greedy_takes_the_argmax_and_reports_logprobs_at_temperature_one():
    model = random_model()
    [[completion]] = engine_of(model).generate([[4, 2]], [[9]], SamplingOptions(temperature=0.0, max_new_tokens=15))
    history = [4, 2]
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = model.logits_after(history)
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)
        history.append(token)
    assert set(completion.log_kept_mass) == {0.0}


def kept_by_hand(probabilities: list[float], top_p: float, top_k: int, min_p: float) -> set[int]:
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    order = order[:top_k] if top_k > 0 else order
    total, so_far, kept = sum(probabilities[token] for token in order), 0.0, set[int]()
    for token in order:
        kept.add(token)
        so_far += probabilities[token]
        if so_far >= top_p * total:
            break
    return kept


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"), [(0.7, 0, 0.0), (1.0, 2, 0.0), (1.0, 0, 0.3), (0.8, 4, 0.05), (1.0, -1, 0.0)]
)
def test_dropped_tokens_are_never_drawn_and_the_kept_mass_is_told(top_p: float, top_k: int, min_p: float):
    model = random_model()
    [completions] = engine_of(model).generate(
        [[3]], [range(40)], SamplingOptions(temperature=0.9, top_p=top_p, top_k=top_k, min_p=min_p, max_new_tokens=10)
    )
    for completion in completions:
        history = [3]
        for token, log_kept in zip(completion.token_ids, completion.log_kept_mass, strict=True):
            probabilities = (model.logits_after(history).double() / 0.9).softmax(-1).tolist()
            kept = kept_by_hand(probabilities, top_p, top_k, min_p)
            assert token in kept
            assert log_kept == pytest.approx(math.log(sum(probabilities[t] for t in kept)), abs=1e-5)
            history.append(token)


def test_a_stop_token_ends_its_completion_and_is_part_of_it():
    results = engine_of(random_model(), 5).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(0, 2))
    )
    flat = [completion for completions in results for completion in completions]
    assert {completion.finish_reason for completion in flat} == {"stop", "length"}
    for completion in flat:
        ends_with_stop = completion.token_ids[-1] in (0, 2)
        assert ends_with_stop == (completion.finish_reason == "stop")
        assert not {0, 2} & set(completion.token_ids[:-1])
        assert ends_with_stop or len(completion.token_ids) == 3


def test_stopping_cuts_the_same_sequence_that_would_have_gone_on():
    options = {"temperature": 1.0, "max_new_tokens": 40}
    free = engine_of(random_model(), 4).generate(PROMPTS, KEYS, SamplingOptions(**options))
    cut = engine_of(random_model(), 4).generate(PROMPTS, KEYS, SamplingOptions(stop_token_ids=(1,), **options))
    for long, short in zip(chain.from_iterable(free), chain.from_iterable(cut), strict=True):
        end = long.token_ids.index(1) + 1 if 1 in long.token_ids else 40
        assert short.token_ids == long.token_ids[:end]
        assert short.logprobs == pytest.approx(long.logprobs[:end], abs=1e-6)


def test_no_stop_token_before_min_new_tokens_and_the_masked_mass_is_told():
    model = random_model()
    [completions] = engine_of(model).generate(
        [[3]], [range(60)], SamplingOptions(temperature=1.0, max_new_tokens=12, min_new_tokens=4, stop_token_ids=(0, 5))
    )
    lengths = {len(completion.token_ids) for completion in completions}
    assert min(lengths) == 5
    for completion in completions:
        history = [3]
        for position, token in enumerate(completion.token_ids):
            logprobs = model.logits_after(history).log_softmax(-1)
            log_left = float(torch.log1p(-logprobs[[0, 5]].exp().sum())) if position < 4 else 0.0
            assert completion.log_kept_mass[position] == pytest.approx(log_left, abs=1e-5)
            assert completion.logprobs[position] == pytest.approx(float(logprobs[token]), abs=1e-5)
            history.append(token)


@pytest.mark.parametrize("max_rows", [2, 3, 5])
def test_a_row_that_enters_beside_older_ones_may_not_stop_before_its_own_min_new_tokens(max_rows: int):
    logits_VV = torch.zeros(7, 7)
    logits_VV[:, :2] = 1.5  # a stop token is drawn three times in four
    engine = engine_of(FakeDecodableModel.bigram(logits_VV), max_rows)
    options = SamplingOptions(temperature=1.0, max_new_tokens=12, min_new_tokens=3, stop_token_ids=(0, 1))
    results = engine.generate(PROMPTS, KEYS, options)
    assert engine.stats().num_decode_steps > 12, "rows of several ages were in one batch"
    flat = [completion for completions in results for completion in completions]
    assert len({len(completion.token_ids) for completion in flat}) > 2
    for completion in flat:
        assert not {0, 1} & set(completion.token_ids[:3])
        held_back = [log_mass < -0.5 for log_mass in completion.log_kept_mass]
        assert held_back == [place < 3 for place in range(len(held_back))], "and from then on it may"


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_min_new_tokens_holds_where_stopping_is_nearly_certain(top_p: float):
    logits_VV = torch.zeros(3, 3)
    logits_VV[:, 0] = 300.0  # e^-300 is 0 in float32
    [[completion]] = engine_of(FakeDecodableModel.bigram(logits_VV)).generate(
        [[1]],
        [[4]],
        SamplingOptions(temperature=1.0, top_p=top_p, max_new_tokens=8, min_new_tokens=5, stop_token_ids=(0,)),
    )
    assert len(completion.token_ids) == 6
    assert 0 not in completion.token_ids[:5]
    kept = math.log(2) if top_p == 1.0 else 0.0
    assert completion.log_kept_mass[0] == pytest.approx(kept - 300.0, rel=1e-5)


def test_greedy_respects_min_new_tokens():
    logits_VV = torch.tensor([[5.0, 1.0, 0.0]]).repeat(3, 1)
    [[completion]] = engine_of(FakeDecodableModel.bigram(logits_VV)).generate(
        [[1]], [[4]], SamplingOptions(temperature=0.0, max_new_tokens=8, min_new_tokens=2, stop_token_ids=(0,))
    )
    assert completion.token_ids == (1, 1, 0)


def test_long_tailed_lengths_in_few_rows_are_complete_and_keep_the_rows_busy():
    logits_VV = torch.zeros(16, 16)
    logits_VV[:, 0] = 0.5  # stops with probability 0.1: lengths from 1 to the budget
    engine = engine_of(FakeDecodableModel.bigram(logits_VV), max_rows=8, max_len=256)
    prompts, keys = [[1 + p % 15] * (1 + p % 4) for p in range(40)], [[10 * p, 10 * p + 1] for p in range(40)]
    results = engine.generate(prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=200, stop_token_ids=(0,)))
    lengths = [len(completion.token_ids) for completions in results for completion in completions]
    assert len(lengths) == 80
    assert max(lengths) > 5 * min(lengths)
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(lengths)
    assert stats.num_prefill_tokens == sum(map(len, prompts))
    assert stats.tail_ratio == max(lengths) / statistics.median(lengths)
    assert stats.mean_occupancy > 0.5
    assert stats.num_decode_steps < sum(lengths) / 3


def test_all_samples_of_a_prompt_share_one_prefill():
    model = random_model()
    engine_of(model, max_rows=4).generate(
        [[1, 2], [3]], [range(4), range(3)], SamplingOptions(temperature=1.0, max_new_tokens=5)
    )
    assert [copies for name, copies in model.calls if name == "prefill"] == [(4,), (3,)]


def test_more_samples_than_rows_are_cut_over_several_prefills():
    model = random_model()
    [completions] = engine_of(model, max_rows=3).generate(
        [[1, 2]], [range(8)], SamplingOptions(temperature=1.0, max_new_tokens=5)
    )
    assert [copies for name, copies in model.calls if name == "prefill"] == [(3,), (3,), (2,)]
    [wide] = engine_of(random_model(), 8).generate(
        [[1, 2]], [range(8)], SamplingOptions(temperature=1.0, max_new_tokens=5)
    )
    assert completions == wide


def test_prompts_of_very_different_length_do_not_share_a_padded_prefill():
    model = random_model()
    prompts = [[1] * 40, [2] * 38, [3] * 4, [4] * 3]
    engine_of(model).generate(prompts, [[0], [1], [2], [3]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    assert [copies for name, copies in model.calls if name == "prefill"] == [(1, 1), (1, 1)]


def test_finished_rows_stop_costing_steps():
    logits_VV = torch.zeros(8, 8)
    logits_VV[:, 0] = 1.0
    model = FakeDecodableModel.bigram(logits_VV)
    [completions] = engine_of(model, max_rows=100).generate(
        [[1]], [range(100)], SamplingOptions(temperature=1.0, max_new_tokens=100, stop_token_ids=(0,))
    )
    rows_computed = sum(rows[0] for name, rows in model.calls if name == "step")
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert rows_computed < 1.5 * tokens


def test_one_new_token_needs_no_step():
    model = random_model()
    engine = engine_of(model, max_rows=4)
    results = engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=1))
    assert all(len(completion.token_ids) == 1 for completions in results for completion in completions)
    assert engine.stats().num_decode_steps == 0


def test_a_completion_may_fill_max_len_exactly():
    engine = engine_of(random_model(), max_rows=2, max_len=10)
    [[completion]] = engine.generate([[1, 2, 3, 4]], [[0]], SamplingOptions(temperature=1.0, max_new_tokens=6))
    assert len(completion.token_ids) == 6


def test_prompts_without_keys_give_no_completions():
    engine = engine_of(random_model())
    assert engine.generate([[1], [2]], [[], [7]], SamplingOptions(temperature=1.0, max_new_tokens=2))[0] == []
    assert engine.generate([], [], SamplingOptions(temperature=1.0, max_new_tokens=2)) == []
    assert engine.generate([[1]], [[]], SamplingOptions(temperature=1.0, max_new_tokens=2)) == [[]]


def test_completions_carry_the_version_of_the_weights_and_loading_refreshes_the_model():
    model = random_model()
    engine = engine_of(model)
    assert engine.generate([[1]], [[0]], SamplingOptions(temperature=1.0, max_new_tokens=2))[0][0].weight_version == 0
    engine.load_weights(4)
    assert model.num_refreshes == 1
    assert engine.generate([[1]], [[0]], SamplingOptions(temperature=1.0, max_new_tokens=2))[0][0].weight_version == 4


def test_a_second_call_of_the_same_shape_uses_the_same_cache():
    model = random_model()
    engine = engine_of(model)
    for _ in range(3):
        engine.generate([[1], [2]], [[0], [1]], SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert [shape for name, shape in model.calls if name == "new_cache"] == [(2, 64)]
    engine.sleep()
    engine.wake()
    engine.generate([[1], [2]], [[0], [1]], SamplingOptions(temperature=1.0, max_new_tokens=5))
    assert len([shape for name, shape in model.calls if name == "new_cache"]) == 2


class BreaksOnce(FakeDecodableModel):
    """Fails in the middle of its first generation."""

    broken = True

    def step(self, cache: FakeCache, token_ids_B: torch.Tensor) -> torch.Tensor:
        if self.broken and cache.lengths_B.max() > 4:
            self.broken = False
            raise MemoryError("no room")
        return super().step(cache, token_ids_B)


def test_after_a_failed_call_the_next_one_starts_clean():
    table = random_model().log_SV
    engine = engine_of(BreaksOnce(table, carry=3))
    with pytest.raises(MemoryError):
        engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=9))
    again = engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=9))
    assert again == engine_of(FakeDecodableModel(table, carry=3)).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=9)
    )


def test_a_prompt_that_leaves_no_room_is_named_with_its_lengths():
    engine = engine_of(random_model(), max_len=20)
    with pytest.raises(OptionsError, match=r"prompt 1 has 13 tokens, max_len - max_new_tokens = 20 - 8 = 12") as caught:
        engine.generate([[1] * 12, [1] * 13], [[0], [1]], SamplingOptions(temperature=1.0, max_new_tokens=8))
    assert caught.value.problem.code == "engine.prompt_too_long"


@pytest.mark.parametrize(
    ("prompts", "keys", "code", "figures"),
    [
        ([[1], []], [[0], [1]], "engine.empty_prompt", "prompt 1 "),
        ([[1, VOCAB]], [[0]], "engine.unknown_token", "token 7; the model's tokens are 0 to 6"),
        ([[-1, 2]], [[0]], "engine.unknown_token", "token -1"),
        ([[1], [2]], [[0]], "engine.sample_keys", "2 prompts, 1 lists"),
    ],
)
def test_unusable_prompts_are_refused(prompts: list[list[int]], keys: list[list[int]], code: str, figures: str):
    with pytest.raises(OptionsError) as caught:
        engine_of(random_model()).generate(prompts, keys, SamplingOptions(temperature=1.0, max_new_tokens=4))
    assert caught.value.problem.code == code
    assert figures in caught.value.problem.what


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_k": -2}, "top_k = -2"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"min_new_tokens": 5}, "min_new_tokens = 5"),
        ({"stop_token_ids": [1, 70]}, "stop token 70"),
        ({"stop_token_ids": list(range(VOCAB)), "min_new_tokens": 1}, "every token is a stop token"),
    ],
)
def test_options_out_of_range_are_refused_with_what_is_allowed(options: dict[str, object], message: str):
    given = {"temperature": 1.0, "max_new_tokens": 4} | options
    with pytest.raises(OptionsError, match=message) as caught:
        engine_of(random_model()).generate([[1]], [[0]], SamplingOptions(**given))  # type: ignore[arg-type]
    assert caught.value.problem.code == "engine.sampling_option"
    assert caught.value.problem.do


@pytest.mark.parametrize(("max_rows", "max_len"), [(0, 10), (4, 1), (4, 5000)])
def test_an_engine_of_impossible_size_is_refused(max_rows: int, max_len: int):
    with pytest.raises(OptionsError):
        NativeEngine(random_model(), max_rows=max_rows, max_len=max_len)


@pytest.mark.parametrize("stops", [(), (2, 5)])
@pytest.mark.parametrize("max_rows", [2, 5, 64])
def test_a_budget_cuts_a_sample_where_it_would_have_gone_on(max_rows: int, stops: tuple[int, ...]):
    options = SamplingOptions(temperature=1.0, max_new_tokens=40, stop_token_ids=stops)
    whole = engine_of(random_model()).generate(PROMPTS, KEYS, options)
    budgets = [[1 + (7 * key) % 40 for key in keys] for keys in KEYS]
    found = engine_of(random_model(), max_rows=max_rows).generate(PROMPTS, KEYS, options, budgets=budgets)
    for longer, shorter, allowed in zip(chain(*whole), chain(*found), chain(*budgets), strict=True):
        assert shorter.token_ids == longer.token_ids[:allowed]
        assert shorter.logprobs == pytest.approx(longer.logprobs[:allowed], abs=1e-6)
        ended = longer.finish_reason == "stop" and len(longer.token_ids) <= allowed
        assert shorter.finish_reason == ("stop" if ended else "length")


def test_budgets_that_do_not_fit_are_refused():
    engine = engine_of(random_model())
    for budgets, what in (
        ([[0]], "a budget of 0 tokens"),
        ([[9]], "a budget of 9"),
        ([[1, 2]], "budgets for 2 samples"),
    ):
        with pytest.raises(OptionsError, match=what) as caught:
            engine.generate([[1]], [[5]], SamplingOptions(temperature=1.0, max_new_tokens=8), budgets=budgets)
        assert caught.value.problem.code == "engine.budgets"


def test_rows_of_many_budgets_leave_together():
    model = random_model()
    engine = engine_of(model, max_rows=40)
    keys, budgets = [list(range(40))], [[8 + key for key in range(40)]]
    engine.generate([[1]], keys, SamplingOptions(temperature=1.0, max_new_tokens=64), budgets=budgets)
    sizes = [rows for name, (rows, *_) in model.calls if name == "step"]
    assert len(set(sizes)) <= 20  # not a change of the batch for every row that ends
    assert engine.stats().num_decode_steps <= 64


def test_routes_are_those_of_a_model_with_experts_and_asked_of_an_engine_that_is_ready():
    class Routed(FakeDecodableModel):
        def routes(self, sequences):
            return torch.tensor([[[len(sequence)] for sequence in sequences]])

    model = random_model()
    assert engine_of(model).routes([[1, 2]]) is None
    engine = engine_of(Routed(torch.zeros(VOCAB, VOCAB)))
    found = engine.routes([[1, 2], [3]])
    assert found is not None
    assert found.tolist() == [[[2], [1]]]
    engine.sleep()
    with pytest.raises(ServiceError):
        engine.routes([[1]])
