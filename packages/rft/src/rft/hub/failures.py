"""Errors of the Hub as a person meets them: what was asked for, what came back, and the way that works from here."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path
from typing import Any

from rft.hub.hub_names import HubName
from rft_core.errors import DataError, OptionsError, RftError, ServiceError, StorageError
from rft_core.nearest_names import nearest_names

_KINDS = {"model": "model", "dataset": "data set"}
_KEPT = "nothing was started; files that came whole are kept, and are not fetched again"


def kind_words(name: HubName) -> str:
    """Return "model" or "data set"."""
    return _KINDS[name.kind]


def page(name: HubName, endpoint: str) -> str:
    """Return the address of the page of a repository."""
    return f"{endpoint}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"


def download_elsewhere(name: HubName) -> str:
    """Return the command that downloads it by hand, and how it is then named."""
    folder = name.repo.rpartition("/")[2]
    kind = " --repo-type dataset" if name.kind == "dataset" else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    command = f"hf download {name.repo}{kind}{revision} --local-dir {folder}"
    return f"{command}, where the Hub can be reached; then name the directory {folder}"


def hub_error(error: Exception, name: HubName, flag: str, endpoint: str) -> RftError:
    """Return the error of a person for what huggingface_hub raised."""
    from huggingface_hub import errors

    cause = _root_of(error)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return not_in_cache(name, flag)
    if isinstance(cause, errors.RevisionNotFoundError):
        return _unknown_revision(name, flag, endpoint)
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.GatedRepoError) or status == 403:
        return _refused(name, flag, endpoint, gated=isinstance(cause, errors.GatedRepoError))
    if status == 401 and _has_token():
        return _refused(name, flag, endpoint, gated=False)
    if isinstance(cause, errors.RepositoryNotFoundError) or status in (401, 404):
        return _unknown(name, flag, endpoint, hidden=status == 401)
    # errors of a connection name no file
    if isinstance(cause, OSError) and (cause.errno == errno.ENOSPC or (cause.errno and cause.filename)):
        return _storage(cause, name)
    if type(cause).__name__.endswith("Timeout"):
        return _slow(cause, name, flag, endpoint)
    if type(cause).__name__ in ("RemoteProtocolError", "ReadError"):
        return _cut(cause, name, flag, endpoint)
    return _unreachable(cause, name, flag, endpoint, status)


def not_in_cache(name: HubName, flag: str, missing: str = "") -> DataError:
    """Return the error of a name that must come from the cache, and is not whole there."""
    lacks = f" lacks {missing}" if missing else " does not hold it"
    return DataError(
        code="hub.not_in_cache",
        what=f"{name}: HF_HUB_OFFLINE is set, and the cache{lacks}",
        where=f"{flag}; {cache_folder()}",
        why="offline nothing is asked of the Hub: all files of the commit must be in the cache",
        do=download_elsewhere(name),
    )


def cache_folder() -> Path:
    """Return the folder of the cache that huggingface_hub uses."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _root_of(error: BaseException) -> BaseException:
    """Return what a "could not be located" of huggingface_hub was raised from."""
    from huggingface_hub import errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _unknown(name: HubName, flag: str, endpoint: str, *, hidden: bool) -> OptionsError:
    folders = [entry.name for entry in Path().iterdir() if entry.is_dir()]
    organisation, _, last = name.repo.partition("/")
    near = [Path(folder) / last for folder in nearest_names(organisation, folders) if (Path(folder) / last).exists()]
    hint = " that may be seen without a token" if hidden else ""
    search = f"{endpoint}/{'datasets' if name.kind == 'dataset' else 'models'}?search={last}"
    if near:
        do = f"{flag} {near[0]}"
    else:
        do = "hf auth login, if it is private" if hidden else f"look for its name at {search}"
    return OptionsError(
        code="hub.unknown",
        what=f"{name.without_revision} is no path here, and {endpoint} has no {kind_words(name)} of this name{hint}",
        where=flag,
        why="ORG/NAME is a path where there is one, and else a name of the Hub",
        do=do,
    )


def _unknown_revision(name: HubName, flag: str, endpoint: str) -> OptionsError:
    return OptionsError(
        code="hub.unknown_revision",
        what=f"{name.repo} has no revision {name.revision or 'main'}",
        where=flag,
        why=f"a revision is a branch, a tag or a commit hash that {page(name, endpoint)} lists",
        do=f"{flag} {name.at('')}",
    )


def _refused(name: HubName, flag: str, endpoint: str, *, gated: bool) -> OptionsError:
    if not _has_token():
        do = "hf auth login, or HF_TOKEN in the environment"
    elif gated:
        do = f"accept its terms at {page(name, endpoint)}, then the same command"
    else:
        do = f"hf auth login with a token that may read {name.repo}"
    return OptionsError(
        code="hub.gated" if gated else "hub.refused",
        what=f"{endpoint} does not give {name.repo} to "
        + ("the owner of the token in use" if _has_token() else "a person without a token"),
        where=flag,
        why="its owners have set terms that a person accepts first"
        if gated
        else "it is private, or the token is wrong",
        do=do,
    )


def _storage(error: OSError, name: HubName) -> StorageError:
    cause = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return StorageError(
        code="hub.cache_refused",
        what=f"{name.repo} cannot be written into the cache: {cause} ({os.strerror(error.errno or 0)})",
        where=str(error.filename or cache_folder()),
        why="files of the Hub are kept in its cache",
        state=_KEPT,
        do="HF_HOME=DIRECTORY with enough room, before the same command",
    )


def _slow(error: BaseException, name: HubName, flag: str, endpoint: str) -> ServiceError:
    from huggingface_hub import constants

    seconds = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
    return ServiceError(
        code="hub.slow",
        what=f"{endpoint} sent nothing of {name.repo} for {seconds} s ({type(error).__name__})",
        where=flag,
        why="a download waits for so long for the next bytes, several times",
        state=_KEPT,
        do=f"HF_HUB_DOWNLOAD_TIMEOUT={6 * seconds} HF_HUB_ETAG_TIMEOUT={6 * seconds} before the same command",
    )


def _cut(error: BaseException, name: HubName, flag: str, endpoint: str) -> ServiceError:
    return ServiceError(
        code="hub.cut",
        what=f"{endpoint} cut the connection again and again while it sent {name.repo}: {error}",
        where=flag,
        why="a download is taken up again some times",
        state=_KEPT,
        do="the same command, which fetches what is missing",
    )


def _unreachable(error: BaseException, name: HubName, flag: str, endpoint: str, status: int | None) -> ServiceError:
    answer = f"answers with status {status}" if status else "cannot be reached"
    text = (str(error).strip().splitlines() or [""])[0]
    return ServiceError(
        code="hub.unreachable",
        what=f"{endpoint} {answer} for {name}: {type(error).__name__}: {text}",
        where=flag,
        why=f"{name.without_revision} is no path here, so it is taken from the Hub",
        state=_KEPT,
        do="the same command in some minutes" if status else download_elsewhere(name),
    )


def refused_files(name: HubName, flag: str, *, code: str, what: str, why: str, do: str) -> DataError:
    """Return the error of a repository whose files cannot be used."""
    return DataError(code=code, what=what, where=f"{flag}; {name}", why=why, do=do)


def push_error(error: Exception, repo: str, folder: Path, endpoint: str) -> RftError:
    """Return the error of an upload; the export stays on this machine."""
    cause: Any = _root_of(error)
    status = getattr(getattr(cause, "response", None), "status_code", None)
    text = (str(cause).strip().splitlines() or [""])[0]
    state = f"the export is complete at {folder}; the Hub has none of it, or a part that no revision names"
    again = f"hf upload {repo} {shlex.quote(str(folder))}"
    if type(cause).__name__ == "LocalTokenNotFoundError" or (status in (401, 403) and not _has_token()):
        what, do = "no token of the Hub is set", f"hf auth login, then {again}"
    elif status in (401, 403):
        what, do = f"the token in use may not write to {repo}", f"hf auth login with a token that may, then {again}"
    else:
        answer = f"answers with status {status}" if status else "cannot be reached, or cut the connection"
        what, do = f"{endpoint} {answer}: {type(cause).__name__}: {text}", again
    kind = OptionsError if "token" in what else ServiceError
    return kind(
        code="hub.push",
        what=what,
        where=f"--push_to_hub {repo}",
        why="an export is uploaded with a token that may write to the repository",
        state=state,
        do=do,
    )
