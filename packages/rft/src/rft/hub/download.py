"""Download of chosen files of a repository into the cache of huggingface_hub, once for all processes of a machine."""

from __future__ import annotations

import glob
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rft.hub.failures import cache_folder, hub_error, not_in_cache
from rft.hub.hub_names import HubName
from rft_core.durable_files import replace_text
from rft_core.errors import RftError, StorageError

_LOG = logging.getLogger(__name__)
ASIDE = {"aside": True}
"""Marks a notice that does not stand among the results of a command."""

Choose = Callable[["Files"], list[str]]
_ATTEMPTS = 5
_SECONDS_BETWEEN_LINES = 15.0


class Files:
    """The files of a commit: their sizes in bytes by name, and the few that the choice among them is made by."""

    def __init__(self, sizes: Mapping[str, int], folder: Path) -> None:
        self.sizes = sizes
        self.folder = folder
        """Where the files that were downloaded so far are."""

    @property
    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(self.sizes)


def commit_of(name: HubName, flag: str) -> str:
    """Return the commit hash that a name stands for now; without a network the one that the cache has for it.

    Raises:
        OptionsError: the Hub does not know the name or the revision, or does not give it to this person.
        ServiceError: it cannot be reached, and the cache has no commit.
    """
    if name.commit:
        return name.commit
    from huggingface_hub import HfApi, constants

    cached = _cached_commit(name)
    if constants.HF_HUB_OFFLINE:
        if not cached:
            raise not_in_cache(name, flag)
        return cached
    api: Any = HfApi()
    try:
        found = api.repo_info(
            name.repo,
            repo_type=name.kind,
            revision=name.revision or constants.DEFAULT_REVISION,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception as error:
        failure = hub_error(error, name, flag, api.endpoint)
        if not cached or failure.problem.code not in ("hub.unreachable", "hub.slow", "hub.cut"):
            raise failure from error
        _LOG.warning("%s; %s is taken from the cache, at commit %s", failure.problem.what, name.repo, cached)
        return cached
    if found.sha != cached:
        _keep_reference(name, found.sha)
    return str(found.sha)


def fetched(name: HubName, first: list[str], choose: Choose, flag: str) -> tuple[Path, list[str]]:
    """Return the folder of a commit with the chosen files in it, and their names; what is there is not fetched.

    Args:
        name: a name with a commit hash.
        first: small files by which the choice is made, as patterns; those that the repository lacks are no error.
        choose: the names among all files that are needed.
        flag: the setting, for errors.

    Raises:
        OptionsError, ServiceError, StorageError: as `hub_error` tells them.
        DataError: the cache must do, and lacks a file; or `choose` refuses what there is.
    """
    from huggingface_hub import HfApi, constants

    present = _present(name, first, choose)
    if present is not None:
        return present
    if constants.HF_HUB_OFFLINE:
        raise not_in_cache(name, flag, _missing(name, choose))
    try:
        with _one_process(name):
            # another process may have done it meanwhile
            return _present(name, first, choose) or _downloaded(name, first, choose)
    except RftError:
        raise  # what `choose` refuses
    except Exception as error:
        raise hub_error(error, name, flag, HfApi().endpoint) from error


def _present(name: HubName, first: list[str], choose: Choose) -> tuple[Path, list[str]] | None:
    """Return what `fetched` does where all of it is in the cache, without a request."""
    folder = _local(name, first)
    if folder is None:
        return None
    listed = _listed(name)
    if listed is None:
        from huggingface_hub import constants

        if not constants.HF_HUB_OFFLINE:
            return None  # whether the folder is complete is only known by the list
        # downloaded by another program, which kept no list
        listed = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    chosen = choose(Files(listed, folder))
    return (folder, chosen) if all((folder / file).is_file() for file in chosen) else None


def _missing(name: HubName, choose: Choose) -> str:
    """Return what the cache lacks, in words; empty where it has nothing."""
    folder, listed = _snapshot_folder(name), _listed(name)
    if listed is None or not folder.is_dir():
        return ""
    missing = [file for file in choose(Files(listed, folder)) if not (folder / file).is_file()]
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


def _downloaded(name: HubName, first: list[str], choose: Choose) -> tuple[Path, list[str]]:
    folder = Path(_snapshot(name, first))
    files = Files(_listed(name) or {}, folder)
    chosen = choose(files)
    absent = [file for file in chosen if not (folder / file).is_file()]
    if absent:
        progress = _Progress(name, len(absent), sum(files.sizes[file] for file in absent))
        _with_attempts(name, [glob.escape(file) for file in chosen], progress)
        progress.end()
    return folder, chosen


def _with_attempts(name: HubName, patterns: list[str], progress: _Progress) -> None:
    """Download, again where a connection was cut after it had brought something."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for attempt in range(1, _ATTEMPTS + 1):
        before = progress.received
        try:
            _snapshot(name, patterns, progress)
            return
        except (HfHubHTTPError, LocalEntryNotFoundError):
            raise  # an answer of the Hub, which another attempt does not change
        except Exception as error:
            if attempt == _ATTEMPTS or progress.received == before:
                raise
            _LOG.warning("%s: %s; it goes on with what is missing", name.repo, type(error).__name__)


def _snapshot(name: HubName, patterns: list[str], progress: _Progress | None = None) -> str:
    import huggingface_hub

    library: Any = huggingface_hub
    with _quiet():
        return library.snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=patterns,
            tqdm_class=_silent_bar(progress),
        )


@contextmanager
def _quiet() -> Generator[None]:
    """Keep huggingface_hub from lines on every attempt, and on a card that a data set lacks."""
    loggers = [logging.getLogger(f"huggingface_hub.{name}") for name in ("_snapshot_download", "file_download")]

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("No files matched", "Error while downloading"))

    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)


def _local(name: HubName, patterns: list[str]) -> Path | None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    library: Any = huggingface_hub
    try:
        return Path(
            library.snapshot_download(
                name.repo,
                repo_type=name.kind,
                revision=name.revision,
                allow_patterns=patterns,
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None


def _listed(name: HubName) -> dict[str, int] | None:
    """Return the files of the commit with their sizes, as an earlier download has kept the list; None without one."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.revision)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


def _repository_folder(name: HubName) -> Path:
    return cache_folder() / f"{name.kind}s--{name.repo.replace('/', '--')}"


def _snapshot_folder(name: HubName) -> Path:
    return _repository_folder(name) / "snapshots" / name.revision


def _cached_commit(name: HubName) -> str:
    try:
        return _reference(name).read_text().strip()
    except OSError:
        return ""


def _keep_reference(name: HubName, commit: str) -> None:
    """Note the commit of a branch in the cache, as huggingface_hub does, for a start without a network.

    A cache that cannot be written is told by the download, where one is needed.
    """
    file = _reference(name)
    with suppress(OSError, StorageError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, commit)


def _reference(name: HubName) -> Path:
    from huggingface_hub import constants

    return _repository_folder(name) / "refs" / (name.revision or constants.DEFAULT_REVISION)


@contextmanager
def _one_process(name: HubName) -> Generator[None]:
    """Let one process of this machine download a repository, while others wait.

    A cache that cannot be written holds no lock; what is missing in it is told by the download.
    """
    from huggingface_hub.utils import WeakFileLock

    path = cache_folder() / ".locks" / _repository_folder(name).name / "rft.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        yield
        return
    with WeakFileLock(path):
        yield


class _Progress:
    """Progress of a download in a few lines: one at its start, one now and then, one at its end."""

    def __init__(self, name: HubName, num_files: int, num_bytes: int) -> None:
        self._name, self._total = name, num_bytes
        self._lock = threading.Lock()
        self._began = self._last_line = time.monotonic()
        self.received = 0
        noun = "file" if num_files == 1 else "files"
        _LOG.info(
            "downloading %s: %d %s, %s, into %s",
            *(name, num_files, noun, _size(num_bytes), cache_folder()),
            extra=ASIDE,
        )

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.received += num_bytes
            now = time.monotonic()
            if now - self._last_line < _SECONDS_BETWEEN_LINES:
                return
            self._last_line = now
        share = self.received / max(self._total, 1)
        rate = _size(round(self.received / (now - self._began)))
        _LOG.info("%s: %.0f %% of %s, %s/s", self._name.repo, 100 * share, _size(self._total), rate, extra=ASIDE)

    def end(self) -> None:
        _LOG.info("downloaded %s in %.0f s", self._name.repo, time.monotonic() - self._began, extra=ASIDE)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _silent_bar(progress: _Progress | None) -> Any:
    """Return a class of bars that draw nothing, and hand the bytes that were written on to `progress`."""
    from huggingface_hub.utils import tqdm

    base: Any = tqdm

    def begin(bar: Any, *args: Any, **options: Any) -> None:
        # of the bars that a download makes, this one counts what is written
        bar.counts = options.get("name") == "huggingface_hub.snapshot_download"
        base.__init__(bar, *args, **{**options, "disable": True})

    def update(bar: Any, n: float | None = 1) -> None:
        if progress is not None and bar.counts:
            progress.add(int(n or 0))

    return type("Silent", (base,), {"__init__": begin, "update": update})
