"""Operations of a checkpoint on the disk: what is written, hashed, flushed, renamed and removed."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_core import fault_points
from rft_dist.checkpoint_format import file_operations
from rft_dist.checkpoint_format.file_operations import (
    PUBLISH,
    Digest,
    create_directory,
    digest_file,
    remove_tree,
    rename,
    sync_directory,
    write_file,
)

MIB = 2**20


@pytest.fixture
def passed() -> list[str]:
    """Names of the fault points that were passed, without the prefix that all of them have."""
    names: list[str] = []
    fault_points.install(lambda name: names.append(name.removeprefix("checkpoint.")))
    return names


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Calls that put a file on the disk and forget it, each with the size that the file then has."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(file_operations.os, "fsync", lambda handle: calls.append(("fsync", os.fstat(handle).st_size)))
    monkeypatch.setattr(
        file_operations.os,
        "posix_fadvise",
        lambda handle, *arguments: calls.append(("forget", os.fstat(handle).st_size, *arguments)),
    )
    return calls


@pytest.fixture(autouse=True)
def no_descriptor_stays() -> Iterator[None]:
    """Every file that was opened is closed."""
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def digest(content: bytes, block: int = MIB) -> Digest:
    """The digest by its definition."""
    blocks = tuple(zlib.crc32(content[start : start + block]) for start in range(0, len(content), block))
    return Digest(len(content), hashlib.sha256(content).hexdigest(), blocks)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 10, 13, 35])
@pytest.mark.parametrize("piece", [1, 3, 5, 7, 40])
def test_a_digest_is_that_of_the_whole_however_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, piece: int
) -> None:
    monkeypatch.setattr(file_operations, "BLOCK_BYTES", 5)
    monkeypatch.setattr(file_operations, "_CHUNK_BYTES", 4)
    content = bytes(range(size))
    path = tmp_path / "a"
    pieces = [content[start : start + piece] for start in range(0, size, piece)]
    written = write_file(path, [memoryview(part) if number % 2 else part for number, part in enumerate(pieces)])
    assert path.read_bytes() == content
    assert written == digest_file(path) == digest(content, 5)


def test_large_files_are_written_in_parts_and_hashed_in_blocks_of_a_mebibyte(
    memory_path: Path, passed: list[str]
) -> None:
    content = bytes(8 * MIB) + b"1"
    written = write_file(memory_path / "a", [content])
    assert [name for name in passed if name == "file.write.before"] == ["file.write.before"] * 2
    assert written == digest(content)
    assert len(written.crc32_blocks) == 9


def test_a_file_is_flushed_whole_and_then_forgotten(
    tmp_path: Path, passed: list[str], flushed: list[tuple[object, ...]]
) -> None:
    mask = os.umask(0)
    try:
        write_file(tmp_path / "a", [b"ab", b"c"])
    finally:
        os.umask(mask)
    forgotten = ("forget", 3, 0, 0, os.POSIX_FADV_DONTNEED)
    assert flushed == [("fsync", 3), forgotten]
    operations = ["open", "write", "write", "sync"]
    assert passed == [f"file.{name}.{when}" for name in operations for when in ("before", "after")]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666
    digest_file(tmp_path / "a")
    assert len(flushed) == 2, "reading alone flushes nothing"
    digest_file(tmp_path / "a", sync=True)
    assert flushed[2:] == [("fsync", 3), forgotten]
    assert passed[-2:] == ["file.sync.before", "file.sync.after"]


def test_nothing_that_exists_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("new")
    for name in ("a", "link"):
        with pytest.raises(FileExistsError):
            write_file(tmp_path / name, [b"x"])
    assert (tmp_path / "a").read_text() == "old"
    assert not (tmp_path / "new").exists()


def test_a_refused_write_or_flush_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    for name in ("write", "fsync"):
        path = tmp_path / name
        with monkeypatch.context() as change:
            change.setattr(file_operations.os, name, refuse)
            with pytest.raises(OSError, match="no space left") as caught:
                write_file(path, [b"x"])
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    with monkeypatch.context() as change:
        change.setattr(file_operations.os, "fsync", refuse)
        for action in (sync_directory, lambda path: digest_file(path / "write", sync=True)):
            with pytest.raises(OSError, match="no space left") as caught:
                action(tmp_path)
            assert str(caught.value.filename).startswith(str(tmp_path))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    expected = {"link": errno.ELOOP, "pipe": errno.EINVAL, "": errno.EINVAL, "none": errno.ENOENT}
    for name, number in expected.items():
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
            digest_file(tmp_path / name)
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / name))


def test_names_of_a_directory_are_flushed_between_two_points(
    tmp_path: Path, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    sync_directory(tmp_path)
    assert flushed == [tmp_path.stat().st_ino]
    assert passed == ["directory.sync.before", "directory.sync.after"]
    passed.clear()
    create_directory(tmp_path / "a")
    assert (tmp_path / "a").is_dir()
    assert passed == ["mkdir.before", "mkdir.after"]
    with pytest.raises(FileExistsError):
        create_directory(tmp_path / "a")
    assert passed[2:] == ["mkdir.before"]


def test_a_rename_takes_a_free_name_and_flushes_the_folder_of_that_name(
    tmp_path: Path, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    source, target = tmp_path / "from" / "a", tmp_path / "to" / "b"
    source.mkdir(parents=True)
    target.parent.mkdir()
    rename(PUBLISH, source, target)
    assert target.is_dir()
    assert not source.exists()
    assert flushed == [target.parent.stat().st_ino]
    assert passed == ["publish.before", "publish.after", "directory.sync.before", "directory.sync.after"]
    source.symlink_to("nowhere")
    with pytest.raises(FileExistsError) as caught:
        rename(PUBLISH, target, source)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(source))
    assert target.is_dir()


def test_a_tree_is_removed_in_the_order_of_its_names_and_links_are_not_followed(
    tmp_path: Path, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, kept = tmp_path / "tree", tmp_path / "kept"
    (tree / "b" / "inner").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").write_text("x")
    for name in ("z", "b/y", "a", "b/inner/x"):
        (tree / name).write_text("x")
    (tree / "c").symlink_to(kept)
    removed: list[str] = []
    real = os.unlink

    def unlink(path: str) -> None:
        removed.append(os.path.relpath(path, tree))
        real(path)

    monkeypatch.setattr(file_operations.os, "unlink", unlink)
    remove_tree(tree)
    assert removed == ["a", "b/inner/x", "b/y", "c", "z"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").exists()
    kinds = ["unlink", "unlink", "rmdir", "unlink", "rmdir", "unlink", "unlink", "rmdir"]
    assert passed == [f"{kind}.{when}" for kind in kinds for when in ("before", "after")]
