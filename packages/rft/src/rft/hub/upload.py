"""Upload of an exported model to the Hub."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from rft.hub.download import ASIDE
from rft.hub.failures import push_error
from rft_core.errors import OptionsError

_LOG = logging.getLogger(__name__)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_target(repo: str) -> None:
    """Refuse what is no name of a repository, or cannot be written to, before anything is exported.

    Raises:
        OptionsError: the name is no ORG/NAME, the Hub is switched off, or there is no token.
    """
    from huggingface_hub import constants, get_token

    what, do = "", f"hf auth login, or HF_TOKEN in the environment, before --push_to_hub {repo}"
    if not _REPOSITORY.fullmatch(repo):
        what, do = f"{repo!r} is no name of a repository", "--push_to_hub ORG/NAME"
    elif constants.HF_HUB_OFFLINE:
        what, do = "HF_HUB_OFFLINE is set", "HF_HUB_OFFLINE=0 before the same command"
    elif get_token() is None:
        what = "no token of the Hub is set"
    if what:
        raise OptionsError(
            code="hub.push_target",
            what=what,
            where=f"--push_to_hub {repo}",
            why="an export is uploaded to ORG/NAME with a token that may write to it",
            do=do,
        )


def push(folder: Path, repo: str, *, private: bool) -> list[str]:
    """Upload a directory as one commit, into a repository that is made where there is none; return lines on it.

    An existing repository keeps its visibility. The directory stays.

    Raises:
        OptionsError: the token may not write there.
        ServiceError: the Hub cannot be reached, or refuses the files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    api: Any = HfApi()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    _LOG.info("uploading %s, %.1f MB, to %s", folder, size / 1e6, repo, extra=ASIDE)
    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Model exported by rft-train")
    except Exception as error:
        raise push_error(error, repo, folder, api.endpoint) from error
    finally:
        if not were_off:
            enable_progress_bars()
    return [f"uploaded    {api.endpoint}/{repo}, commit {done.oid}"]
