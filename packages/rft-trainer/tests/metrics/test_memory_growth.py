"""Growth of memory: what counts as a leak of one rank, and what no sound run is accused of."""

from __future__ import annotations

import json
import logging
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_trainer.metrics.memory_growth import (
    FAST_STEPS,
    LONG_STEPS,
    SLOW_STEPS,
    TRACED_LONG_STEPS,
    TRACED_STEPS,
    MemoryGrowth,
    memory_metrics,
    rate,
    steady_growth,
)

MIB = 2**20


def of(
    held: Callable[[int], float],
    *,
    steps: int,
    free: float = 1000.0,
    host: str = "a",
    device: Callable[[int], float] | None = None,
) -> dict[str, Any]:
    """What a rank says at its last step, with `held(step)` MiB in each."""
    passed: list[int] = []

    def on_device() -> tuple[int, int] | None:
        return None if device is None else (int(MIB * device(len(passed))), 500 * MIB)

    growth = MemoryGrowth(
        resident=lambda: int(MIB * held(len(passed))), free=lambda: int(MIB * free), device=on_device, host=host
    )
    share: dict[str, Any] = {}
    while len(passed) < steps:
        passed.append(1)
        share = growth.take()
    return share


def test_the_growth_is_the_rise_of_the_fifths_and_its_rate_that_of_a_line() -> None:
    assert steady_growth([float(n) for n in range(50)]) == 40.0
    assert rate(40.0, 50) == 1.0
    assert steady_growth([]) == steady_growth([1.0, 2.0]) == 0.0


@pytest.mark.parametrize(
    "held",
    [
        lambda n: 1000.0,
        lambda n: 1000.0 - n,
        lambda n: 1000.0 if n < 30 else 2000.0,
        lambda n: 1000.0 + 500 * (1 - math.exp(-n / 10)),
        lambda n: 1000.0 + 100 * (n % 2),
    ],
    ids=["flat", "falling", "one allocation", "filling up", "to and fro"],
)
def test_what_is_no_leak_does_not_grow(held: Callable[[int], float]) -> None:
    assert of(held, steps=FAST_STEPS)["growth"] == 0.0


def test_a_heap_that_fills_up_like_a_logarithm_grows_at_first_and_is_no_slow_leak() -> None:
    share = of(lambda n: 1000.0 + 100 * math.log(n), steps=SLOW_STEPS)
    assert share["slow_growth"] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_leak_is_seen_through_noise(seed: int) -> None:
    draw = random.Random(seed)
    noise = [draw.gauss(0, 3) for _ in range(SLOW_STEPS + 1)]
    share = of(lambda n: 1000.0 + 0.5 * n + noise[n], steps=SLOW_STEPS)
    assert share["slow_growth"] == pytest.approx(80.0, abs=5.0)


@pytest.mark.parametrize("seed", range(5))
def test_two_mib_in_a_hundred_steps_are_seen_over_a_thousand(seed: int) -> None:
    draw = random.Random(seed)
    noise = [draw.gauss(0, 3) for _ in range(LONG_STEPS + 1)]
    assert of(lambda n: 1000.0 + noise[n], steps=LONG_STEPS)["long_growth"] == 0.0
    share = of(lambda n: 1000.0 + 0.025 * n + noise[n], steps=LONG_STEPS)
    assert share["long_growth"] == pytest.approx(20.0, abs=3.0)
    assert share["slow_growth"] < 16


RECORDED = json.loads((Path(__file__).parent / "recorded" / "resident_memory.json").read_text())
"""Resident MiB of the first rank at the end of each step of runs that nothing is wrong with, from the first step on."""


@pytest.mark.parametrize("run", RECORDED)
def test_no_window_of_a_sound_run_is_near_a_warning(run: str) -> None:
    values = RECORDED[run]
    growth = MemoryGrowth(resident=lambda: int(MIB * values[len(shares)]), device=lambda: None, host="a")
    shares: list[dict[str, Any]] = []
    while len(shares) < len(values):
        shares.append(growth.take())
    assert len(shares) >= 199
    assert max(share.get("growth", 0.0) for share in shares) < 32, "of 256 that are told"
    for kind in ("slow_growth", "long_growth"):
        assert max(share.get(kind, 0.0) for share in shares) < 4, "of 16 that are told"


def test_recorded_runs_fill_every_window() -> None:
    assert sum(len(values) >= LONG_STEPS + 100 for values in RECORDED.values()) >= 3


def test_what_has_grown_is_looked_for_once_where_the_growth_is_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    of(lambda n: 1000.0 + n / 20, steps=SLOW_STEPS + TRACED_STEPS)
    assert caplog.messages == []
    kept: list[bytes] = []

    def grows(step: int) -> float:
        kept.append(b"1" * (MIB // 8))
        return 1000.0 + 10 * step

    of(grows, steps=3 * FAST_STEPS)
    (message,) = caplog.messages
    assert message.startswith("the memory of this process grows; in the last 10 steps: 1.25 MiB at ")
    assert "test_memory_growth.py:" in message
    assert not tracemalloc.is_tracing()
    assert len(kept) == 3 * FAST_STEPS


def test_what_only_the_longest_window_shows_is_traced_for_longer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    kept: list[bytes] = []

    def grows(step: int) -> float:
        kept.append(b"1" * (MIB // 40))
        return 1000.0 + step / 40

    of(grows, steps=LONG_STEPS + TRACED_LONG_STEPS + 1)
    (message,) = caplog.messages
    assert message.startswith("the memory of this process grows; in the last 100 steps: 2.5 MiB at ")
    assert len(kept) == LONG_STEPS + TRACED_LONG_STEPS + 1


def test_windows_that_are_not_full_say_nothing() -> None:
    assert set(of(lambda n: 1000.0 + n, steps=FAST_STEPS - 1)) == {"host", "resident"}
    assert set(of(lambda n: 1000.0 + n, steps=FAST_STEPS)) == {"host", "resident", "growth", "free"}
    assert "slow_growth" in of(lambda n: 1000.0 + n, steps=SLOW_STEPS)
    assert "long_growth" not in of(lambda n: 1000.0 + n, steps=LONG_STEPS - 1)
    # what is free costs a few files to read, and is asked for only where something grows
    assert "free" not in of(lambda n: 1000.0, steps=SLOW_STEPS)


def test_the_rank_that_grows_is_named_with_the_steps_that_are_left() -> None:
    sound, leaks = of(lambda n: 3000.0, steps=50), of(lambda n: 1000.0 + 2 * n, steps=50)
    assert memory_metrics([sound, leaks]) == {
        "memory/largest_rss_mib": 3000.0,
        "memory/largest_rss_rank": 0,
        "memory/growth_mib": 80.0,
        "memory/growth_rank": 1,
        "memory/growth_steps_left": 500.0,
    }
    assert memory_metrics([sound, sound])["memory/growth_mib"] == 0.0
    assert "memory/growth_rank" not in memory_metrics([sound, sound])


def test_a_slow_leak_has_a_rank_and_steps_of_its_own() -> None:
    found = memory_metrics([of(lambda n: 1000.0, steps=200), of(lambda n: 1000.0 + n / 2, steps=200)])
    assert found["memory/slow_growth_mib"] == 80.0
    assert found["memory/slow_growth_rank"] == 1
    assert found["memory/slow_growth_steps_left"] == 2000.0
    assert found["memory/growth_mib"] == 20.0
    found = memory_metrics([of(lambda n: 1000.0 + n / 40, steps=1000)])
    assert found["memory/long_growth_mib"] == pytest.approx(20.0)
    assert found["memory/long_growth_rank"] == 0
    assert found["memory/long_growth_steps_left"] == pytest.approx(40_000.0)


def test_ranks_of_one_host_take_from_the_same_memory() -> None:
    shares = [of(lambda n: 1000.0 + 2 * n, steps=50, host=host) for host in ("a", "b", "a")]
    assert memory_metrics(shares)["memory/growth_steps_left"] == 250.0
    assert memory_metrics(shares[:2])["memory/growth_steps_left"] == 500.0


def test_tensors_of_any_gpu_are_looked_at() -> None:
    shares = [of(lambda n: 1.0, steps=50, device=device) for device in (lambda n: 10.0, lambda n: 10.0 + n)]
    found = memory_metrics(shares)
    assert found["memory/device_growth_mib"] == 40.0
    assert found["memory/device_growth_rank"] == 1
    assert found["memory/device_growth_steps_left"] == 500.0


def test_the_memory_of_a_gpu_is_what_tensors_hold_and_what_can_still_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7 * MIB, 99 * MIB))
    growth = MemoryGrowth()
    shares = [growth.take() for _ in range(FAST_STEPS)]
    assert shares[-1]["device_free"] == 9.0
    assert shares[-1]["device_growth"] == 0.0


def test_a_rank_that_does_not_look_is_passed_over() -> None:
    share = of(lambda n: 1000.0 + 2 * n, steps=50)
    assert memory_metrics([None, None]) == {}
    assert memory_metrics([None, share])["memory/growth_rank"] == 1
    unknown = MemoryGrowth(resident=lambda: None, device=lambda: None, host="a").take()
    assert memory_metrics([unknown]) == {}
