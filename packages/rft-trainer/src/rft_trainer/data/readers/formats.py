"""Reader of data files of all formats: JSON Lines, JSON, CSV, parquet, Arrow, `save_to_disk` directories.

Nothing is downloaded and nothing compressed is unpacked (a small file can unpack to any size).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rft_core.errors import DataError
from rft_core.nearest_names import nearest_names
from rft_trainer.data.readers.arrow import is_saved_dataset, read_arrow, read_parquet, read_saved_dataset
from rft_trainer.data.readers.csv import read_csv
from rft_trainer.data.readers.files import BYTE_ORDER_MARK, no_such_split, open_data_file, unreadable
from rft_trainer.data.readers.json import MAX_LINE_BYTES, read_json, read_jsonl
from rft_trainer.data.readers.rows import Row, SkipLog

_READERS: dict[str, Callable[[Path, SkipLog], list[Row]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
    ".parquet": lambda file, _: read_parquet(file),
    ".arrow": lambda file, _: read_arrow(file),
}
# a folder with Arrow files is a saved data set, whose state.json says which of them count
_IN_DIRECTORIES = _READERS.keys() - {".arrow"}
_COMPRESSED = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd -k", ".zip": "unzip"}
_ALIKE = 0.75
"""Similarity of names from which on a file is taken for the one that was meant."""
_SHARD = re.compile(r"[-_.]\d+(-of-\d+)?$")


def read_rows(path: str | Path, *, split: str | None = None, skips: SkipLog | None = None) -> list[Row]:
    """Read every row of a file, of the files that a pattern matches, or of a directory.

    `split` chooses among the splits of a directory (a saved `DatasetDict`, or files named
    `train-00000-of-00002.parquet`, `test.jsonl`, ...); a file that is named itself is one split,
    whatever it is called. `skips` sets how many unusable rows are passed over (none by default).

    Raises `DataError` with file, line and field for anything malformed, `OptionsError` for a
    split that is not there.
    """
    skips = skips if skips is not None else SkipLog()
    rows: list[Row] = []
    for file in resolve_files(path, split=split):
        if file.is_dir():
            rows.extend(read_saved_dataset(file, split=split))
        else:
            rows.extend(read_file(file, skips))
    return rows


def read_file(file: Path, skips: SkipLog | None = None) -> list[Row]:
    """Read every row of one file; errors as `read_rows` raises them."""
    return _READERS[_checked_suffix(file).suffix.lower()](file, skips if skips is not None else SkipLog())


def read_published_file(file: Path, skips: SkipLog | None = None) -> list[Row]:
    """Read every row of a file of a published data set, whose `.json` may hold an object a line."""
    if file.suffix.lower() == ".json":
        with open_data_file(file) as stream:
            first = stream.readline(MAX_LINE_BYTES).removeprefix(BYTE_ORDER_MARK).strip()
        if first.startswith(b"{") and first.endswith(b"}"):
            return read_jsonl(file, skips if skips is not None else SkipLog())
    return read_file(file, skips)


def resolve_files(path: str | Path, *, split: str | None = None) -> list[Path]:
    """Resolve `path` to its files, in reading order; a saved data set stays one directory.

    Raises `DataError` when nothing is there, what is there may not be read, or a file has a suffix that is not read.
    """
    target = Path(path).expanduser()
    try:
        return _resolved(path, target, split)
    except PermissionError as error:
        raise unreadable(Path(error.filename or target), error) from error


def _resolved(path: str | Path, target: Path, split: str | None) -> list[Path]:
    if target.is_dir():
        # a saved data set has files of suffixes that are read elsewhere; which of them count is in its state.json
        return [target] if is_saved_dataset(target) else _files_of_directory(target, split)
    # a name with brackets may be a file: only what is not there is tried as a pattern
    if target.exists():
        return [_checked_suffix(target)]
    if glob.has_magic(str(target)):
        # sorted, since `glob` gives them in the order of the disk
        matches = sorted(Path(match) for match in glob.glob(str(target), recursive=True))
        files = [_checked_suffix(match) for match in matches if match.is_file()]
        if files:
            return files
    raise _not_found(path, target)


def _checked_suffix(file: Path) -> Path:
    suffix = file.suffix.lower()
    if suffix in _READERS:
        return file
    if suffix in _COMPRESSED:
        raise DataError(
            code="data.compressed",
            what=f"{file} is compressed ({suffix})",
            where=str(file),
            why="compressed text is not read: a small file can unpack to any size; parquet is compressed and is read",
            do=f"{_COMPRESSED[suffix]} {file}",
        )
    near = nearest_names(suffix, _READERS, count=1)
    hint = f"; nearest {near[0]}" if near else ""
    raise DataError(
        code="data.unknown_suffix",
        what=f"{file} has the suffix {suffix or '(none)'}; those that are read: {', '.join(_READERS)}{hint}",
        where=str(file),
        why="the suffix of a data file determines its format",
        # a file of another format is not made one of these by its name
        do=f"mv {file} {file.with_suffix(near[0])}" if near else f"head -c 300 {file}",
    )


def _files_of_directory(directory: Path, split: str | None) -> list[Path]:
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.suffix.lower() in _IN_DIRECTORIES)
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_SHARD.sub("", file.stem), []).append(file)
    if not splits:
        raise DataError(
            code="data.no_files",
            what=f"{directory} holds no data file and is not a saved data set",
            where=str(directory),
            why=f"a directory needs files ending in {', '.join(sorted(_IN_DIRECTORIES))}, or what save_to_disk writes",
            do=f"ls -R {directory}",
        )
    if split in splits:
        return splits[split]
    if len(splits) == 1 and split is None:
        return next(iter(splits.values()))
    why = "a directory with several splits is read one split at a time, so that none is trained on by accident"
    raise no_such_split(directory, split, list(splits), why)


def _not_found(path: str | Path, target: Path) -> DataError:
    # by their stems: files that share a suffix alone are not alike
    siblings = (
        {
            entry.stem: entry.name
            for entry in target.parent.iterdir()
            if entry.is_dir() or entry.suffix.lower() in _READERS
        }
        if target.parent.is_dir()
        else {}
    )
    near = [siblings[stem] for stem in nearest_names(target.stem, siblings, count=1, cutoff=_ALIKE)]
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None and not target.suffix
    if near:
        do = f"--prompt_data {target.parent / near[0]}"
    elif hub:
        do = f"hf download --repo-type dataset {path} --local-dir {target.name}"
    else:
        do = f"ls {target.parent}"
    return DataError(
        code="data.not_found",
        what=f"no file, pattern match or directory at {path}" + (f"; nearest {near[0]}" if near else ""),
        where=str(path),
        why="data are read from disk; nothing is downloaded",
        do=do,
    )
