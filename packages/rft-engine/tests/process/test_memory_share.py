"""Share of a GPU within what is free, and the second start with less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rft_core.errors import ServiceError
from rft_engine.process.memory_share import share_within, smaller_share, started, within_free
from rft_engine.process.settings import ExternalEngineSettings


def settings(share: float | None = None) -> ExternalEngineSettings:
    return ExternalEngineSettings(model_dir=Path("m"), max_rows=4, max_len=64, memory_utilization=share)


def failure(code: str, do: str) -> ServiceError:
    return ServiceError(code=code, what="vLLM did not start: no room", where="w", why="y", do=do)


@pytest.mark.parametrize(
    ("wanted", "free", "total", "share"),
    [
        (0.9, 81_000, 81_559, 0.9),
        (0.3, 30_000, 81_559, 0.3),
        (0.9, 30_000, 81_559, 0.36),  # (30,000 - 512) / 81,559 = 0.3615
        (0.5, 40_000, 81_559, 0.48),
        (0.9, 4_000, 81_559, None),  # 0.04: a start is not worth trying
        (0.9, 0, 0, 0.9),  # the driver does not tell
    ],
)
def test_the_share_is_what_is_free_rounded_down(wanted: float, free: int, total: int, share: float | None) -> None:
    assert share_within(wanted, free, total) == share


def test_no_share_of_forty_settings_asks_for_more_than_is_free() -> None:
    for wanted in (0.2, 0.4, 0.6, 0.8, 0.95):
        for free in range(8_000, 81_559, 10_000):
            share = share_within(wanted, free, 81_559)
            assert share is not None
            assert share * 81_559 <= free
            # not less than 95 % of what there is, or all that was wanted
            assert share == wanted or share * 81_559 >= 0.95 * free - 1024


def test_less_than_was_asked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert within_free(settings(0.3), 40_000, 80_000) == settings(0.3)
    assert within_free(settings(0.9), 1_000, 80_000) == settings(0.9)
    assert caplog.messages == []
    assert within_free(settings(0.9), 40_000, 80_000) == settings(0.49)
    assert within_free(settings(), 40_000, 80_000) == settings(0.49)
    assert caplog.messages == [
        "vLLM is started with --engine_mem_util 0.49: 0.9 of 80,000 MiB are more than the 40,000 MiB that are free",
        "vLLM is started with --engine_mem_util 0.49: 0.92 of 80,000 MiB are more than the 40,000 MiB that are free",
    ]


@pytest.mark.parametrize(
    ("code", "do", "share"),
    [
        ("engine.vllm.memory.own", "--engine_mem_util 0.37", 0.37),
        ("engine.vllm.memory.others", "end process 4711 (python), or --engine_mem_util 0.37", 0.37),
        ("engine.vllm.memory.share_too_low", "--engine_mem_util 0.95", None),  # more is no second start
        ("engine.vllm.memory.others", "end process 4711 (python)", None),
        ("engine.vllm.start", "see vLLM's message", None),
        ("engine.vllm.start", "--engine_mem_util 0.45, or a smaller --engine_max_rows", 0.45),
        ("engine.sglang.start", "--engine_mem_util 0.45", None),  # another library's
        ("engine.vllm.prefix_cache", "--engine_mem_util 0.1", None),
    ],
)
def test_the_remedy_of_a_failed_start_is_a_share_where_it_is_less(code: str, do: str, share: float | None) -> None:
    assert smaller_share(settings(0.9), failure(code, do)) == share


def test_a_start_is_tried_once_more_with_less_and_no_third_time(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[float | None] = []

    def make(chosen: ExternalEngineSettings) -> str:
        tried.append(chosen.memory_utilization)
        if (chosen.memory_utilization or 1.0) > 0.4:
            raise failure("engine.vllm.memory.own", "--engine_mem_util 0.37")
        return "engine"

    assert started(make, settings(0.9)) == "engine"
    assert tried == [0.9, 0.37]
    assert caplog.messages == ["vLLM did not start: no room; it is started once more with --engine_mem_util 0.37"]

    def never(chosen: ExternalEngineSettings) -> str:
        tried.append(chosen.memory_utilization)
        raise failure("engine.vllm.memory.own", f"--engine_mem_util {(chosen.memory_utilization or 1) / 2:.2f}")

    tried.clear()
    with pytest.raises(ServiceError):
        started(never, replace(settings(0.8)))
    assert tried == [0.8, 0.4]
