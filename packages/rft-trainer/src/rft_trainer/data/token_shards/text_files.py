"""Files of the texts of a source: .txt files, and every other file of rows."""

from __future__ import annotations

import glob
from pathlib import Path

from rft_trainer.data.readers.formats import resolve_files

SUFFIX = ".txt"


def text_files(path: str, *, split: str | None = None) -> list[Path]:
    """Return the files of a path, a pattern or a directory, in reading order.

    Raises:
        DataError: nothing is there, or a file has a suffix that is not read.
    """
    target = Path(path).expanduser()
    if target.suffix.lower() == SUFFIX and target.is_file():
        return [target]
    if target.is_dir():
        texts = sorted(file for file in target.iterdir() if file.is_file() and file.suffix.lower() == SUFFIX)
        if texts:
            return texts
    elif not target.exists() and glob.has_magic(str(target)):
        # sorted, since `glob` gives them in the order of the disk
        matches = sorted(Path(match) for match in glob.glob(str(target), recursive=True))
        if matches and all(match.suffix.lower() == SUFFIX for match in matches):
            return matches
    return resolve_files(path, split=split)
