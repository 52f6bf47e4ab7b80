"""The sentence encoder of the extra minilm."""

import hashlib
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rft_core.errors import DataError, PreflightError
from rft_genrec.embedding import minilm


def installed(folder: Path) -> ModuleSpec:
    spec = ModuleSpec(minilm.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="--extra minilm"):
        minilm.minilm_directory()


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed(tmp_path))
    with pytest.raises(DataError, match="absent"):
        minilm.minilm_directory()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(DataError, match=hashlib.sha256(b"weights").hexdigest()):
        minilm.minilm_directory()
    monkeypatch.setattr(minilm, "WEIGHTS_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert minilm.minilm_directory() == tmp_path / "model"
