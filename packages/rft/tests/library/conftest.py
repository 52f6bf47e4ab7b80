"""A small model for runs that are started from Python, and a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_models.tiny_models.text import build_character_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep rows and models of a test out of the cache of the user."""
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model of hidden size 16."""
    return build_character_model(
        tmp_path_factory.mktemp("small") / "model",
        alphabet="0123456789+=",
        hidden=16,
        layers=1,
        heads=2,
        ffn=16,
        max_positions=32,
        init_std=0.4,
    )
