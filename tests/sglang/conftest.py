"""Tests against an installed SGLang on a GPU; collected where there is one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))  # its `policy_side`: the trainer's half of both

_spec = importlib.util.find_spec("sglang")
collect_ignore_glob = [] if _spec and _spec.origin else ["test_*.py"]  # this folder has that name, and is no package


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, grouped heads of 64, tied embedding, weights spread out: texts differ and no token is certain."""
    from rft_models.tiny_models.text import build_character_model

    path = tmp_path_factory.mktemp("sglang") / "model"
    return build_character_model(path, hidden=256, heads=4, kv_heads=2, ffn=192, init_std=0.1)
