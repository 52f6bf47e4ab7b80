"""Limits of user code from their settings: half of the machine where nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_trainer.workers import limits
from rft_trainer.workers.limits import ProcessLimits, machine_bytes, user_code_limits


def test_memory_is_in_gib_and_variables_are_joined_by_commas() -> None:
    found = user_code_limits(1.5, " HF_TOKEN, AWS_* ,")
    assert found == ProcessLimits(0, 3 << 29, ("HF_TOKEN", "AWS_*"))
    assert user_code_limits(0.0, "") == ProcessLimits(0, machine_bytes() // 2, ())


@pytest.mark.parametrize(("text", "limited"), [("1048576\n", True), ("max\n", False), (None, False)])
def test_the_memory_is_that_of_the_control_group_where_it_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, limited: bool
) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(limits, "_GROUP_LIMIT", file)
    assert (machine_bytes() == 2**20) is limited
    assert machine_bytes() > 0
