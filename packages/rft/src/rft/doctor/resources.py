"""Findings on disks, memory, cores and limits of this process."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rft.installation.facts import MachineFact
from rft_core.host_memory import free_host_memory, total_host_memory

_GIB = 1 << 30
_LITTLE_DISK = 10 * _GIB
_NO_DISK = 1 * _GIB
_LITTLE_MEMORY = 4 * _GIB
_LITTLE_SHARED = 1 * _GIB
_FEW_FILES = 4096


@dataclass(frozen=True, slots=True)
class Volume:
    """A directory that runs write into."""

    purpose: str
    path: str
    free: int
    """Bytes."""
    writable: bool


def volumes_here(save_path: str, environment: Mapping[str, str]) -> list[Volume]:
    """Return the directories of runs, of downloaded models and of temporary files."""
    home = environment.get("HF_HOME") or "~/.cache/huggingface"
    paths = (("runs", save_path or "runs"), ("models of the Hub", home), ("temporary files", tempfile.gettempdir()))
    return [_volume(purpose, Path(path).expanduser()) for purpose, path in paths]


def _volume(purpose: str, path: Path) -> Volume:
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            writable = True
    except OSError:
        writable = False
    return Volume(purpose, str(path), shutil.disk_usage(existing).free, writable)


def disks(volumes: list[Volume]) -> list[MachineFact]:
    """Return findings on the directories that runs write into."""
    return [_disk(volume) for volume in volumes]


def _disk(volume: Volume) -> MachineFact:
    subject, value = f"disk of {volume.purpose}", f"{volume.free / _GIB:.1f} GiB free at {volume.path}"
    if not volume.writable:
        return MachineFact(
            subject, f"{volume.path} cannot be written", "problem", "a run could save nothing", f"ls -ld {volume.path}"
        )
    if volume.free < _NO_DISK:
        return MachineFact(
            subject, value, "problem", "a checkpoint would not fit", f"du -xh -d 2 {volume.path} | sort -h | tail"
        )
    if volume.free < _LITTLE_DISK:
        why = "a model of 7 billion weights in bfloat16 has 14 GiB, and a checkpoint its moments too"
        return MachineFact(subject, value, "note", why)
    return MachineFact(subject, value)


def memory_here() -> tuple[int, int, int]:
    """Return the available and the total memory of this machine or container, and the free shared memory, in bytes."""
    total = total_host_memory()
    available = free_host_memory()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    return total if available is None else available, total, shared


def memory(available: int, total: int, shared: int) -> list[MachineFact]:
    """Return findings on memory, in bytes."""
    value = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    findings = [MachineFact("memory", value)]
    if available < _LITTLE_MEMORY:
        why = "torch and a small model take about 2 GiB a process"
        findings = [MachineFact("memory", value, "note", why, "ps aux --sort=-rss | head")]
    shared_value = f"{shared / _GIB:.1f} GiB free at /dev/shm"
    if shared < _LITTLE_SHARED:
        why = "processes of one machine hand weights and images over there"
        findings.append(
            MachineFact("shared memory", shared_value, "note", why, "in a container: docker run --shm-size=8g")
        )
    else:
        findings.append(MachineFact("shared memory", shared_value))
    return findings


def limits(files: int, cores: int, threads: str | None) -> list[MachineFact]:
    """Return findings on open files, cores and threads.

    Args:
        files: most files that this process may have open.
        cores: cores that it may use.
        threads: value of OMP_NUM_THREADS; None where it is not set.
    """
    findings = [MachineFact("open files", str(files))]
    if files < _FEW_FILES:
        why = "engines, workers and memory maps of data take hundreds each"
        findings = [MachineFact("open files", str(files), "note", why, "ulimit -n 65536")]
    findings.append(MachineFact("cores", str(cores)))
    if threads is not None and threads.isdecimal() and int(threads) > cores:
        why = f"more threads than the {cores} cores that this process may use: many times slower"
        findings.append(MachineFact("OMP_NUM_THREADS", threads, "note", why, f"export OMP_NUM_THREADS={cores}"))
    return findings


def open_files_here() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
