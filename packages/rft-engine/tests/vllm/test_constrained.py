"""Budgets and a tree of sequences behind vLLM, on the double of its protocol: the tokens of the native engine."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import VOCAB, FakeVllm, fake_logits, fake_tensors, write_fake_model
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.native.engine import NativeEngine
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.process import VllmProcessEngine
from rft_engine.vllm.settings import VllmSettings

PROMPTS = [[1], [2, 3, 4], [5, 1, 2, 2, 9, 8, 7, 6, 5, 4, 3], [0, 3]]
KEYS = [[100 * p + s for s in range(n)] for p, n in enumerate([3, 1, 4, 2])]
WORKER = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1] / "doubles")!r})
torch.set_num_threads(1)
from rft_engine.vllm import worker as vllm_worker
from fake_vllm import FakeVllm
vllm_worker.serve(int(sys.argv[1]), int(sys.argv[2]), FakeVllm)
"""


class HistoryCache:
    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.rows: list[list[int]] = []

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def keep(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


class TableModel:
    """The double's model as the native engine asks for it."""

    vocab_size, max_positions = VOCAB, 0

    def __init__(self) -> None:
        self.tensors = fake_tensors(0)

    def new_cache(self, max_rows: int, max_len: int) -> HistoryCache:
        return HistoryCache(max_rows)

    def prefill(self, cache: HistoryCache, token_ids_PL: Tensor, lengths_P: Tensor, copies_P: Any) -> Tensor:
        rows = [row[:length].tolist() for row, length in zip(token_ids_PL, lengths_P.tolist(), strict=True)]
        cache.rows += [list(row) for row, copies in zip(rows, copies_P, strict=True) for _ in range(copies)]
        return torch.stack([fake_logits(self.tensors, row) for row in rows])

    def step(self, cache: HistoryCache, token_ids_B: Tensor) -> Tensor:
        for row, token in zip(cache.rows, token_ids_B.tolist(), strict=True):
            row.append(token)
        return torch.stack([fake_logits(self.tensors, row) for row in cache.rows])

    def refresh(self) -> None: ...


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture(scope="module")
def engines(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmEngine]]:
    """In this process with one row, with three, and in a process of its own."""

    def settings(max_rows: int) -> VllmSettings:
        return VllmSettings(model_dir=model_dir, max_rows=max_rows, max_len=64)

    def tensors() -> list[tuple[str, Tensor]]:
        return list(fake_tensors(0).items())

    made = [VllmEngine(settings(rows), tensors, runtime=FakeVllm()) for rows in (1, 3)]
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    made.append(VllmProcessEngine(settings(4), tensors, command=[sys.executable, "-c", WORKER], log_path=log_path))
    yield made
    for engine in made:
        engine.close()


def assert_as_native(
    engines: list[VllmEngine], *, budgets: Any = None, constraint: TokenTrie | None = None, **fields: Any
) -> list[Any]:
    native = NativeEngine(TableModel(), max_rows=8, max_len=64)  # type: ignore[arg-type]
    options = SamplingOptions(**fields)
    wanted = list(chain(*native.generate(PROMPTS, KEYS, options, budgets=budgets, constraint=constraint)))
    for engine in engines:
        drawn = engine.generate(PROMPTS, KEYS, options, budgets=budgets, constraint=constraint)
        for mine, other in zip(chain(*drawn), wanted, strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.finish_reason == other.finish_reason
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert mine.log_kept_mass == pytest.approx(other.log_kept_mass, abs=1e-5)
    return wanted


@pytest.mark.parametrize("stops", [(), (3, 5)])
def test_budgets_are_those_of_the_native_engine(engines: list[VllmEngine], stops: tuple[int, ...]) -> None:
    budgets = [[1 + (5 * key) % 12 for key in keys] for keys in KEYS]
    found = assert_as_native(engines, temperature=1.0, max_new_tokens=12, stop_token_ids=stops, budgets=budgets)
    assert {completion.finish_reason for completion in found} == ({"length", "stop"} if stops else {"length"})
    assert stops or [len(completion.token_ids) for completion in found] == list(chain(*budgets))


def test_budgets_out_of_range_are_refused(engines: list[VllmEngine]) -> None:
    for engine in engines:
        with pytest.raises(OptionsError, match="of 0") as caught:
            engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=3), budgets=[[0]])
        assert caught.value.problem.code == "engine.budgets"


def trees() -> dict[str, list[list[int]]]:
    """With a stop token behind each; all of one length, with tokens that end one and stand within another."""
    numbers = random.Random(4)
    some = {tuple(numbers.randrange(10) for _ in range(numbers.randint(1, 4))) for _ in range(25)}
    even = {tuple(numbers.randrange(10) for _ in range(3)) for _ in range(25)}
    return {"ended": [[*sequence, 10] for sequence in sorted(some)], "even": [list(s) for s in sorted(even)]}


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8, "min_new_tokens": 1},
    {"temperature": 1.5, "top_k": 2, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.0, "first_token_temperature": 10.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["ended", "even"])
def test_a_constraint_is_that_of_the_native_engine(engines: list[VllmEngine], kind: str, options: Any) -> None:
    sequences = trees()[kind]
    found = assert_as_native(engines, max_new_tokens=9, constraint=TokenTrie.of(sequences), **options)
    assert all(list(completion.token_ids) in sequences for completion in found)
    assert {completion.finish_reason for completion in found} == {"stop"}


def test_ends_that_vllm_cannot_see_are_refused_with_the_remedy(engines: list[VllmEngine]) -> None:
    trie = TokenTrie.of([[1, 2], [2, 2, 1]])
    for engine in engines:
        with pytest.raises(OptionsError, match="token 1") as caught:
            engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=3), constraint=trie)
        assert caught.value.problem.code == "engine.constraint.ends"
        assert caught.value.problem.do == "end all sequences with the stop token, or --engine_type native"


def test_a_call_without_constraint_after_one_with_it_is_free_again(engines: list[VllmEngine]) -> None:
    assert_as_native(engines, temperature=1.0, max_new_tokens=5, constraint=TokenTrie.of([[1, 2]]))
    assert_as_native(engines, temperature=1.0, max_new_tokens=5)


def test_the_process_tells_its_steps(engines: list[VllmEngine]) -> None:
    engines[2].generate([[1, 2, 3]], [[1, 2]], SamplingOptions(temperature=1.0, max_new_tokens=5))
    stats = engines[2].stats()
    assert (stats.num_decode_steps, stats.num_generated_tokens, stats.mean_occupancy) == (5, 10, 1.0)
