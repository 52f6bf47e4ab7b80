"""Rows that fit, byte by byte: the margin, the limit of each figure, and where free memory is read from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from rft_core.errors import PreflightError
from rft_engine.native import memory_budget
from rft_engine.native.memory_budget import (
    CacheRequest,
    free_memory,
    is_out_of_memory,
    max_rows_that_fit,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@dataclass
class Sized:
    """A model whose cache takes 10 bytes a token of a row and 1 byte a token of a prompt."""

    asked: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])

    def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
        self.asked.append((max_rows, max_len, num_prompts, prompt_len))
        return 10 * max_rows * max_len + num_prompts * prompt_len


def test_a_request_takes_its_cache_and_four_tables_of_logits() -> None:
    model = Sized()
    assert CacheRequest(5, 100, 3, 40).bytes_of(model, 7) == 5000 + 120 + 5 * 7 * 16
    assert CacheRequest(2, 100, 3, 40).bytes_of(model, 7) == 2000 + 80 + 2 * 7 * 16, "a prompt leaves with its rows"
    assert model.asked == [(5, 100, 3, 40), (2, 100, 2, 40)]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_rows_fit_to_the_byte_behind_the_margin(rows: int) -> None:
    needed = rows * (10 * 100 + 7 * 16) + min(rows, 3) * 40
    demand = CacheRequest(8, 100, 3, 40)
    free = next(free for free in range(needed, 2 * needed) if free - free // 64 == needed)
    assert max_rows_that_fit(Sized(), 7, demand, CPU, lambda device: free) == rows
    assert max_rows_that_fit(Sized(), 7, demand, CPU, lambda device: 2**50) == 8
    if rows > 1:
        assert max_rows_that_fit(Sized(), 7, demand, CPU, lambda device: free - 1) == rows - 1
        return
    with pytest.raises(PreflightError) as caught:
        max_rows_that_fit(Sized(), 7, demand, CPU, lambda device: free - 1)
    assert caught.value.problem.code == "engine.memory"


def test_the_margin_is_at_most_256_mib() -> None:
    one = 2**32
    for free, rows in ((20 * one + 2**28, 20), (20 * one + 2**28 - 1, 19)):

        class Large:
            def cache_bytes(self, max_rows: int, max_len: int, *, num_prompts: int, prompt_len: int) -> int:
                return one * max_rows

        assert max_rows_that_fit(Large(), 0, CacheRequest(99, 1, 1, 1), CPU, lambda device, free=free: free) == rows


@pytest.mark.parametrize("fitting", [2, 9, 60])
def test_an_error_says_how_long_a_sequence_may_be(fitting: int) -> None:
    needed = 10 * fitting + min(fitting, 40) + 7 * 16
    free = next(free for free in range(needed, 2 * needed) if free - free // 64 == needed)
    with pytest.raises(PreflightError) as caught:
        max_rows_that_fit(Sized(), 7, CacheRequest(8, 100, 3, 40), CPU, lambda device: free)
    assert caught.value.problem.do.startswith(f"--max_len {fitting},")
    assert f"{fitting} tokens would fit" in caught.value.problem.what


def test_a_length_of_one_token_is_no_remedy() -> None:
    with pytest.raises(PreflightError) as caught:
        max_rows_that_fit(Sized(), 7, CacheRequest(8, 100, 3, 40), CPU, lambda device: 124)
    assert "--max_len" not in caught.value.problem.do


def test_on_a_gpu_what_torch_has_reserved_and_not_used_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"memory_reserved": 500, "memory_allocated": 200, "mem_get_info": (1000, 9000)}
    asked: list[torch.device] = []
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: (asked.append(device), value)[1])
    assert free_memory(GPU) == 1000 + 500 - 200
    assert asked == [GPU] * 3
    monkeypatch.setattr(memory_budget, "free_host_memory", lambda: 77)
    assert free_memory(CPU) == 77
    assert free_memory(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_which_errors_are_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory
