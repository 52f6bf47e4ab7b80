"""Limits of user code from their settings: half of the machine where nothing is said."""

from __future__ import annotations

import pytest

from rft_trainer.workers import limits
from rft_trainer.workers.limits import ProcessLimits, user_code_limits


def test_memory_is_in_gib_and_variables_are_joined_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    found = user_code_limits(1.5, " HF_TOKEN, AWS_* ,")
    assert found == ProcessLimits(0, 3 << 29, ("HF_TOKEN", "AWS_*"))
    monkeypatch.setattr(limits, "total_host_memory", lambda: 1001)
    assert user_code_limits(0.0, "") == ProcessLimits(0, 500, ())
