"""The copy of the interpreter: what is in it, what is left out, and that it goes when the process does."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft_core.errors import PreflightError
from rft_trainer.sandbox import interpreter

LISTED = """
/bin/python:
\tlinux-vdso.so.1 (0x00007f)
\tlibown.so.1 => {folder}/libown.so.1.2 (0x00007f)
\tlibabsent.so => not found
\t{folder}/ld-own.so.2 (0x00007f)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of three files beside packages of somebody."""
    library = tmp_path / "python"
    for name in ("os.py", "json/decoder.py", "site-packages/own.py", "test/test_os.py", "lib-dynload/_ssl.so"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    (library / "os.py").chmod(0o600)
    (tmp_path / "libown.so.1.2").write_text("own")
    (tmp_path / "ld-own.so.2").write_text("loader")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    told = SimpleNamespace(stdout=LISTED.format(folder=tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(interpreter.tempfile, "tempdir", str(copies))
    interpreter.caged_python.cache_clear()
    yield library
    interpreter.caged_python.cache_clear()


def test_the_copy_holds_interpreter_library_and_shared_libraries_and_no_package(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[object] = []
    monkeypatch.setattr(interpreter.atexit, "register", lambda *call, **_: removed.append(call[1]))
    python = interpreter.caged_python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = {str(path.relative_to(python.directory)) for path in python.directory.rglob("*") if path.is_file()}
    below = f"{sys.platlibdir}/{version}"
    assert found == {
        "bin/python3",
        "lib/libown.so.1",
        "lib/loader",
        *(f"{below}/{name}" for name in ("os.py", "json/decoder.py", "lib-dynload/_ssl.so")),
    }
    assert python.loader == str(library.parent / "ld-own.so.2")
    # whoever is nobody reads it and writes nothing
    assert {path.stat().st_mode & 0o022 for path in python.directory.rglob("*")} == {0}
    assert (python.directory / below / "os.py").stat().st_mode & 0o777 == 0o644
    assert (python.directory / "bin" / "python3").stat().st_mode & 0o777 == 0o755
    assert removed == [python.directory]
    assert interpreter.caged_python() is python


HOLDER = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from rft_trainer.sandbox import interpreter
print(interpreter._locked_directory(), flush=True)
sys.stdin.read()
"""


def test_a_copy_is_removed_once_its_process_was_killed_and_not_before(tmp_path: Path) -> None:
    others = tmp_path / "rft-cage-locked-target"
    (tmp_path / "kept").mkdir()
    others.symlink_to(tmp_path / "kept")
    (tmp_path / "rft-cage-old").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        copy = Path(holder.stdout.readline().strip())
        (copy / "bin").mkdir()
        (copy / "bin" / "python3").write_text("")
        interpreter.remove_stale_copies(tmp_path)
        assert (copy / "bin" / "python3").is_file(), "its process is there"
        holder.kill()
        holder.wait()
        interpreter.remove_stale_copies(tmp_path)
    assert not copy.exists()
    # a link, and the folder of an older version, whose process holds no lock
    assert {path.name for path in tmp_path.iterdir()} == {others.name, "kept", "rft-cage-old"}


def test_a_start_removes_stale_copies_and_keeps_those_of_other_users(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = library.parent / "copies"
    (copies / "rft-cage-locked-stale" / "bin").mkdir(parents=True)
    user = interpreter.os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(interpreter.os, "getuid", lambda: user + 1)
        interpreter.remove_stale_copies(copies)
    assert (copies / "rft-cage-locked-stale").is_dir()
    python = interpreter.caged_python()
    assert list(copies.iterdir()) == [python.directory]


def test_an_interpreter_without_a_loader_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="not a dynamic executable"))
    with pytest.raises(PreflightError, match="names no dynamic loader"):
        interpreter.caged_python()

    def no_program(*_: object, **__: object) -> None:
        raise FileNotFoundError("ldd")

    monkeypatch.setattr(subprocess, "run", no_program)
    with pytest.raises(PreflightError, match="cannot be listed: ldd"):
        interpreter.caged_python()
