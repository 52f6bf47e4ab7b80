"""Tests against an installed vLLM; collected where there is one (`tests/integration/test_vllm_real.py` brings it)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_spec = importlib.util.find_spec("vllm")
collect_ignore_glob = [] if _spec and _spec.origin else ["test_*.py"]  # this folder has that name, and is no package


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, grouped heads, tied embedding, weights spread out: texts differ and no token is certain."""
    from rft_models.tiny_models.text import build_character_model

    path = tmp_path_factory.mktemp("vllm") / "model"
    return build_character_model(path, hidden=128, heads=4, kv_heads=2, ffn=96, init_std=0.15)


@pytest.fixture(scope="session", autouse=True)
def _small_cache() -> None:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
