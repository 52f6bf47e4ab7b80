"""Facts of a rank are digests of names, sizes and bytes, as a reference written here computes them."""

from __future__ import annotations

import hashlib
import io
import platform
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft_dist.preflight import rank_facts
from rft_dist.preflight.rank_facts import (
    LIBRARIES,
    PACKAGES,
    code_hash,
    file_facts,
    fingerprint,
    machine_facts,
    model_facts,
)


def digest(*files: tuple[str, bytes], size: int | None = None) -> str:
    """Twelve digits over names, sizes and bytes."""
    text = b"".join(f"{name}\0{len(data) if size is None else size}\0".encode() + data for name, data in files)
    return hashlib.sha256(text).hexdigest()[:12]


def test_a_file_is_its_size_and_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5
    (tmp_path / "data").write_bytes(data)
    assert fingerprint(tmp_path / "data") == f"1,280 bytes, {digest(('', data))}"
    assert fingerprint(tmp_path / "none") == "absent"


def test_of_a_large_file_blocks_from_its_first_to_its_last_byte_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WHOLE_BYTES", 10), ("_BLOCK", 4), ("_NUM_BLOCKS", 4)):
        monkeypatch.setattr(rank_facts, name, value)
    for size in (10, 11, 40):
        data = bytes(range(size))
        (tmp_path / "data").write_bytes(data)
        starts = [(size - 4) * index // 3 for index in range(4)]
        read = data if size == 10 else b"".join(data[start : start + 4] for start in starts)
        assert fingerprint(tmp_path / "data") == f"{size} bytes, {digest(('', read), size=size)}"


class Zeros(io.BytesIO):
    """A file whose size is that of a sparse one, and which takes no time to read."""

    left = 0

    def read(self, size: int | None = -1, /) -> bytes:
        length = min(size or 0, self.left)
        self.left -= length
        return _ZEROS[:length]

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset


_ZEROS = bytes(2**23)


@pytest.mark.parametrize(("size", "blocks"), [(2**28, 64), (2**28 + 1, 16)])
def test_files_up_to_256_mebibytes_are_read_whole_and_64_of_larger_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, blocks: int
) -> None:
    path, lengths = tmp_path / "sparse", list[int]()
    with path.open("wb") as file:
        file.truncate(size)
    zeros = Zeros()
    zeros.left = size
    recorder = SimpleNamespace(update=lambda block: lengths.append(len(block)), hexdigest=lambda: "0" * 64)
    monkeypatch.setattr(rank_facts, "hashlib", SimpleNamespace(sha256=lambda: recorder))
    monkeypatch.setattr(Path, "open", lambda path, mode: zeros)
    fingerprint(path)
    assert lengths[1:] == [2**22] * blocks


def test_a_folder_is_the_digest_of_its_files_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "a" / "empty").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"22")
    assert fingerprint(tmp_path) == f"2 files, {digest(('a/x', b'1'), ('b', b'22'))}"


def test_code_is_the_digest_of_a_packages_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "some_package_of_this_test"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_bytes(b"A = 1\n")
    (package / "room" / "module.py").write_bytes(b"B = 2\n")
    (package / "notes.txt").write_bytes(b"left out")
    (tmp_path / "some_module_of_this_test.py").write_bytes(b"C = 3\n")
    assert code_hash(package.name) == digest(("__init__.py", b"A = 1\n"), ("room/module.py", b"B = 2\n"))
    assert code_hash("some_module_of_this_test") == "absent"
    assert code_hash("no_package_of_this_test") == "absent"


def test_facts_of_the_machine_are_python_the_libraries_and_our_packages() -> None:
    facts = machine_facts()
    assert set(facts) == {"python", *(f"package {n}" for n in LIBRARIES), *(f"code {n}" for n in PACKAGES)}
    assert facts["python"] == platform.python_version()
    assert facts["package torch"] == version("torch")
    assert facts["code rft_dist"] == code_hash("rft_dist") != "absent"


def test_files_are_named_by_what_they_are_for_and_those_not_given_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.jsonl").write_bytes(b"{}")
    facts = file_facts({"prompt_data": "~/train.jsonl", "eval_data": ""})
    assert facts == {"file prompt_data": f"2 bytes, {digest(('', b'{}'))}"}


@pytest.mark.parametrize("count", [0, 1, 12, 13])
def test_a_model_is_its_json_files_and_the_names_and_sizes_of_its_weights(tmp_path: Path, count: int) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    rows = [f"part_{number:02d}.safetensors {number}" for number in range(count)]
    for number in range(count):
        (tmp_path / f"part_{number:02d}.safetensors").write_bytes(b"x" * number)
    listed = "; ".join(rows[:12]) or "absent"
    if count == 13:
        listed += f"; 13 in all, {hashlib.sha256(chr(10).join(rows).encode()).hexdigest()[:12]}"
    others = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert model_facts(tmp_path) == {
        "model config.json": f"2 bytes, {digest(('', b'{}'))}",
        **{f"model {name}": "absent" for name in others},
        "model weights": listed,
    }
    assert model_facts(tmp_path / "none") == {"model": "absent"}
