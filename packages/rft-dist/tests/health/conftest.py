"""The clock that the monitor reads, and its doubles importable by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft_dist.health import monitor

sys.path.insert(0, str(Path(__file__).parent))
NOW = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the monitor reads: it goes on by waiting alone."""
    now = [NOW]
    waits = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(monitor, "time", waits)
    return now
