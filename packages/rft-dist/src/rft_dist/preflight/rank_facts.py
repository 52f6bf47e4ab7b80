"""Facts that must be equal on every rank, as short texts: versions, code, settings, files; imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "rft_core",
    "rft_algos",
    "rft_models",
    "rft_dist",
    "rft_engine",
    "rft_trainer",
    "rft",
    "rft_cli",
    "rft_kernels",
    "rft_genrec",
)
LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "tokenizers", "triton", "vllm", "deepspeed")

OF_FILES = "file "
"""How the names of `file_facts` begin."""

WHOLE_BYTES = 256 * 2**20
"""Files up to this size are hashed whole; of a larger one its size and 16 blocks, spread evenly."""
_BLOCK, _NUM_BLOCKS = 2**22, 16
_NAMED_ENTRIES = 12


def machine_facts() -> dict[str, str]:
    """Python, the libraries that decide what is computed, and our own code."""
    facts = {"python": platform.python_version()}
    facts |= {f"package {name}": _version(name) for name in LIBRARIES}
    return facts | {f"code {name}": code_hash(name) for name in PACKAGES}


def settings_facts(values: Mapping[str, object]) -> dict[str, str]:
    """One fact a setting, so that a difference names the setting."""
    return {f"setting {name}": repr(value) for name, value in values.items()}


def file_facts(files: Mapping[str, str | Path]) -> dict[str, str]:
    """The content of files and folders by what they are for, such as `{"prompt_data": "train.jsonl"}`."""
    return {f"{OF_FILES}{name}": fingerprint(Path(path).expanduser()) for name, path in files.items() if str(path)}


def code_hash(package: str) -> str:
    """Twelve digits of the SHA-256 over a package's Python files, with their names; "absent" where it is not there."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        return "absent"
    root = Path(places[0])
    return _digest((path.relative_to(root).as_posix(), path) for path in sorted(root.rglob("*.py")))


def fingerprint(path: Path) -> str:
    """Size and hash of a file, or number of files and hash of a folder; "absent" or the reason it cannot be read."""
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            return f"{len(files)} files, {_digest((file.relative_to(path).as_posix(), file) for file in files)}"
        if not path.exists():
            return "absent"
        return f"{path.stat().st_size:,} bytes, {_digest([('', path)])}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def model_facts(directory: str | Path) -> dict[str, str]:
    """A model's JSON files by content and its weights by name and size: reading those would take too long."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        return {"model": "absent"}
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    facts = {f"model {name}": fingerprint(path / name) for name in names}
    weights = [f"{file.name} {file.stat().st_size}" for file in sorted(path.glob("*.safetensors"))]
    listed = "; ".join(weights[:_NAMED_ENTRIES])
    more = f"; {len(weights)} in all, {_of_text(weights)}" if len(weights) > _NAMED_ENTRIES else ""
    return facts | {"model weights": listed + more or "absent"}


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        # names and sizes too: files that share the same bytes out differently must not look alike
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        _add(digest, path)
    return digest.hexdigest()[:12]


def _add(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(_BLOCK):
                digest.update(block)
            return
        for index in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK) * index // (_NUM_BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(_BLOCK))


def _of_text(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
