"""Folders of processes in shared memory: whose they are, and which of them a later process may remove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rft_engine.weight_sync import private_folder as module
from rft_engine.weight_sync.private_folder import private_folder, remove_empty_folders, remove_leftovers

Owner = subprocess.Popen[str]
OWNER = """
import sys
from pathlib import Path
from rft_engine.weight_sync import private_folder as module
{first}
(module.private_folder(Path(sys.argv[1])) / "weights").write_text("14 GiB")
print(module.private_folder(Path(sys.argv[1])), flush=True)
{then}
"""
WAITS = "sys.stdin.read()"


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Owner]]]:
    """Start a process with a folder in `tmp_path`; it does `first` before and `then` afterwards."""
    started: list[Owner] = []

    def start(first: str = "", then: str = WAITS) -> tuple[Path, Owner]:
        code = OWNER.format(first=first, then=then)
        command = [sys.executable, "-c", code, str(tmp_path)]
        owner = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        started.append(owner)
        assert owner.stdout is not None
        return Path(owner.stdout.readline().strip()), owner

    yield start
    for owner in started:
        owner.kill()
        owner.communicate()


def test_what_a_killed_process_left_goes_and_what_a_running_one_holds_stays(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    killed, owner = owned()
    running, _ = owned()
    # of another container: its process number means nothing here, and the lock alone speaks for it
    elsewhere, _ = owned("module._namespace = lambda: '77'")
    assert [folder.is_dir() for folder in (killed, running, elsewhere)] == [True] * 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert killed.is_dir(), "its owner could not remove it"
    mine = private_folder(tmp_path)
    assert [folder.is_dir() for folder in (killed, running, elsewhere, mine)] == [False, True, True, True]
    assert private_folder(tmp_path) == mine
    remove_empty_folders()
    assert not mine.exists()
    assert private_folder(tmp_path) != mine, "a new word"
    remove_empty_folders()


def test_what_a_killed_process_of_another_container_left_goes(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    killed, owner = owned("module._namespace = lambda: '77'")
    owner.kill()
    owner.wait()
    remove_leftovers(tmp_path)
    assert not killed.exists()


@pytest.mark.parametrize("then", ["", "raise SystemExit(7)", "1 / 0"])
def test_a_process_that_ends_by_itself_leaves_nothing(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]], then: str
) -> None:
    folder, owner = owned(then=then)
    owner.wait()
    assert str(folder).startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_the_folder_to_its_parent(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    folder, owner = owned("import os", "os.fork() or sys.exit()\nos.wait()\nprint(flush=True)\nsys.stdin.read()")
    assert owner.stdout is not None
    owner.stdout.readline()
    assert (folder / "weights").exists()
    remove_leftovers(tmp_path)
    assert (folder / "weights").exists(), "the lock is still held"


def test_what_is_not_proven_to_be_left_over_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    killed, owner = owned()
    owner.kill()
    owner.wait()
    uid = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_boot", lambda: "")
        remove_leftovers(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_boot", lambda: "anotherboot")
        remove_leftovers(tmp_path)
    with monkeypatch.context() as patch:
        # the folder of a user under the name that another one's would have
        patch.setattr(module.os, "geteuid", lambda: uid + 1)
        others = killed.rename(tmp_path / killed.name.replace(f"rft-{uid}-", f"rft-{uid + 1}-"))
        remove_leftovers(tmp_path)
        killed = others.rename(killed)
    assert (killed / "weights").exists()
    remove_leftovers(tmp_path)
    assert not killed.exists()


def test_a_file_or_link_under_such_a_name_stops_nothing(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    killed, owner = owned()
    owner.kill()
    owner.wait()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "data").touch()
    name = killed.name.rpartition("-")[0]
    (tmp_path / f"{name}-0").touch()
    (tmp_path / f"{name}-1").symlink_to(kept)
    (tmp_path / killed.name.split("-7")[0]).touch()
    remove_leftovers(tmp_path)
    assert not killed.exists()
    assert (kept / "data").exists()


def test_a_process_that_runs_is_believed_where_its_lock_is_lost(
    tmp_path: Path, owned: Callable[..., tuple[Path, Owner]]
) -> None:
    running, owner = owned(then="import os; os.closerange(3, 100)\nprint(flush=True)\nsys.stdin.read()")
    assert owner.stdout is not None
    owner.stdout.readline()
    remove_leftovers(tmp_path)
    assert running.is_dir()
    owner.kill()
    owner.wait()
    remove_leftovers(tmp_path)
    assert not running.exists()
