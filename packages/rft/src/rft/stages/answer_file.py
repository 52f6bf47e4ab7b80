"""The file that answers are written to: refused before a model loads where it cannot be written, a row a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rft_core.durable_files import kind_of, storage_errors
from rft_core.errors import OptionsError


def refuse_unwritable(output: str) -> None:
    """Refuse a file that could not be written once everything is answered; nothing is made. "" is no file.

    Raises:
        OptionsError: it is a directory, its folder is missing or none, or the system would not let it be written.
    """
    if not output:
        return
    path = Path(output).expanduser()
    folder = path.absolute().parent
    if path.is_dir():
        inside = path / "answers.jsonl"
        raise _refused(output, f"{output} is a directory", f"--output {inside}")
    if not folder.exists():
        raise _refused(output, f"{folder} is not there", f"mkdir -p {folder}")
    if not folder.is_dir():
        raise _refused(output, f"{folder} is {kind_of(folder)} and no directory", f"--output {path.name}")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK):
        here = (
            f"--output {path.name}" if folder != Path.cwd() and os.access(Path.cwd(), os.W_OK) else f"ls -ld {target}"
        )
        raise _refused(output, f"this user may not write {target}", here)


def write_answers(output: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows to the file, which is replaced.

    Raises:
        StorageError: the system refuses.
    """
    with storage_errors("write", Path(output).expanduser()):
        Path(output).expanduser().write_text("".join(json.dumps(row) + "\n" for row in rows))


def _refused(output: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code="output.not_writable",
        what=f"output = {output} cannot be written",
        where="--output",
        why=why,
        state="nothing was started",
        do=do,
    )
