"""One torch thread, and an empty working directory for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, without the settings of the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_FAULT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
