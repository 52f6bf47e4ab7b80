"""Digests of a model's directory: its configuration, its tokenizer, its weights. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rft.identity.record import Content

WHOLE_BYTES = 16 * 2**20
"""Files up to this size are hashed whole; of a larger one the size, the first megabyte and 15 blocks, spread evenly."""
_BLOCK, _NUM_BLOCKS = 2**20, 16
CONFIGURATION = ("config.json", "generation_config.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def model_contents(directory: str) -> dict[str, Content]:
    """Contents of a model that is trained: `model`, `tokenizer` and `weights`."""
    path = Path(directory).expanduser()
    return {
        "model": _content(path, _named(path, CONFIGURATION)),
        "tokenizer": _content(path, _named(path, TOKENIZER)),
        "weights": _content(path, sorted(path.glob("*.safetensors"))),
    }


def directory_content(directory: str) -> Content:
    """Content of a model as a whole: configuration, tokenizer and weights."""
    path = Path(directory).expanduser()
    return _content(path, [*_named(path, (*CONFIGURATION, *TOKENIZER)), *sorted(path.glob("*.safetensors"))])


def file_content(file: str) -> Content:
    """Content of one file."""
    path = Path(file).expanduser()
    return _content(path, [path] if path.is_file() else [])


def _named(path: Path, names: Iterable[str]) -> list[Path]:
    return [path / name for name in names if (path / name).is_file()]


def _content(place: Path, files: list[Path]) -> Content:
    """Content of files of one folder, by their names in it."""
    if not files:
        return Content("absent", "no such file", str(place))
    digest = hashlib.sha256()
    sampled = 0
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        for block in _blocks(file, size):
            digest.update(block)
        sampled += size > WHOLE_BYTES
    names = ", ".join(file.name for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    part = f"; {sampled} of them by size and {_NUM_BLOCKS} blocks of 1 MiB" if sampled else ""
    return Content(digest.hexdigest(), names + part, str(place))


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file, or those of some blocks."""
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            yield stream.read()
            return
        for index in range(_NUM_BLOCKS):
            stream.seek((size - _BLOCK) * index // (_NUM_BLOCKS - 1), os.SEEK_SET)
            yield stream.read(_BLOCK)
