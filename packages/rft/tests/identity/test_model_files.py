"""Digests of a model's directory, part by part, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rft.identity import model_files
from rft.identity.model_files import directory_content, file_content, model_contents


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the names of a model's files."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "README.md"):
        (path / name).write_text(name)
    for shard in (1, 2):
        (path / f"model-{shard}.safetensors").write_bytes(bytes(range(256)) * 4)
    return path


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("config.json", "model"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
        ("preprocessor_config.json", "tokenizer"),
        ("model-2.safetensors", "weights"),
        ("README.md", ""),
    ],
)
def test_a_changed_file_changes_its_part_alone(model: Path, file: str, part: str) -> None:
    before, whole = model_contents(str(model)), directory_content(str(model))
    data = (model / file).read_bytes()
    (model / file).write_bytes(data[:-1] + b"\0")
    after = model_contents(str(model))
    assert [name for name in before if before[name].digest != after[name].digest] == ([part] if part else [])
    assert (directory_content(str(model)).digest != whole.digest) is bool(part)


def test_another_place_is_the_same_model(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    digests = [
        {name: content.digest for name, content in model_contents(str(path)).items()}
        for path in (model, tmp_path / "copy")
    ]
    assert digests[0] == digests[1]


def test_large_weights_are_read_in_blocks_and_this_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "WHOLE_BYTES", 512)
    monkeypatch.setattr(model_files, "_BLOCK", 16)
    before = model_contents(str(model))["weights"]
    assert before.covers == "model-1.safetensors, model-2.safetensors; 2 of them by size and 16 blocks of 1 MiB"
    file = model / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    for index, noticed in ((0, True), (len(data) - 1, True), (20, False)):
        changed = data.copy()
        changed[index] ^= 1
        file.write_bytes(changed)
        assert (model_contents(str(model))["weights"].digest != before.digest) is noticed
    file.write_bytes(data[:-16])
    assert model_contents(str(model))["weights"].digest != before.digest


def test_what_is_not_there_is_absent(tmp_path: Path) -> None:
    assert directory_content(str(tmp_path / "none")).digest == "absent"
    assert file_content(str(tmp_path / "none")).digest == "absent"
    (tmp_path / "judge.txt").write_text("a")
    first = file_content(str(tmp_path / "judge.txt")).digest
    (tmp_path / "judge.txt").write_text("b")
    assert file_content(str(tmp_path / "judge.txt")).digest not in (first, "absent")
