"""Model directories: checks before anything is read from one, each with its own error, and quiet reading."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from rft_core.durable_files import kind_of
from rft_core.errors import DataError
from rft_core.nearest_names import nearest_names
from rft_models.files.config_values import check_config, check_sizes, wrong_value

_WHY = "a model is a Hugging Face directory on this machine; ORG/NAME@main is always one of the Hub"
_LARGEST_HEADER = 100_000_000
"""Bytes that the safetensors format allows for a header."""


_LISTED: ContextVar[Mapping[Path, Mapping[str, int]]] = ContextVar("listed weights", default=MappingProxyType({}))


@contextmanager
def weights_by_list(files: Mapping[Path, Mapping[str, int]]) -> Generator[None]:
    """Take weight files that are not here as if they were, while the block runs: to check a model that is elsewhere.

    Args:
        files: bytes of each file that a directory lacks, by the directory.
    """
    token = _LISTED.set(files)
    try:
        yield
    finally:
        _LISTED.reset(token)


def existing_directory(directory: str | Path) -> Path:
    """Return the path if it is a directory; else raise `DataError` naming what is there instead."""
    path = Path(directory).expanduser()
    # an empty text would be the working directory
    if str(directory) and path.is_dir():
        _refuse_adapters(path)
        return path
    if not str(directory):
        raise DataError(
            code="models.no_directory",
            what="the path of the model is empty",
            where="the path of the model",
            why=_WHY,
            do="--pretrain DIRECTORY",
        )
    parent = next(candidate for candidate in path.absolute().parents if candidate.is_dir())
    # of the nearest directory that exists, so that the error shows where the path goes wrong
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())
    missing = path.absolute().relative_to(parent).parts[0]
    near = nearest_names(missing, names, count=1, cutoff=0.5)
    # a file of a model, such as its weights
    is_inside = path.is_file() and (path.parent / "config.json").is_file()
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise DataError(
        code="models.no_directory",
        what=f"{path} is {kind_of(path)}; {parent} holds {listed or 'no directories'}",
        where=str(path),
        why=_WHY,
        do=f"use {path.parent}" if is_inside else f"use {parent / near[0]}" if near else f"ls {parent}",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `DataError` with line and column where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            code="models.damaged_json",
            what=f"{path.name} cannot be read: {error.strerror or error}",
            where=str(path),
            why="the files of a model are read as they stand",
            do=f"ls -l {path}",
        ) from error
    # a number of too many digits is a ValueError alone, and a value in thousands of others a RecursionError
    except (ValueError, RecursionError) as error:
        raise DataError(
            code="models.damaged_json",
            what=f"{path.name} is not valid JSON: {error}",
            where=str(path),
            why="the file was cut off or edited by hand",
            do=f"copy {path.name} of the model again",
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            code="models.damaged_json",
            what=f"{path.name} holds a {type(value).__name__} where a JSON object is needed",
            where=str(path),
            why="this file maps names to values",
            do=f"copy {path.name} of the model again",
        )
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory; `DataError` where there is none, a damaged one, or one with impossible values."""
    if not (path / "config.json").is_file():
        inside = sorted(entry.name for entry in path.iterdir())
        below = [entry.name for entry in path.iterdir() if (entry / "config.json").is_file()]
        raise DataError(
            code="models.no_config",
            what=f"no config.json in {path}; it holds {', '.join(inside[:8]) or 'nothing'}",
            where=str(path),
            why="config.json names the architecture and its sizes",
            do=f"use {path / below[0]}" if below else f"copy the model's config.json into {path}",
        )
    config = read_json(path / "config.json")
    check_config(path / "config.json", config)
    return config


def checked_model_directory(directory: str | Path) -> tuple[Path, dict[str, Any]]:
    """(path, config.json) of a directory with a configuration and a complete set of safetensors files."""
    path = existing_directory(directory)
    config = read_config(path)
    _refuse_adapters_beside(path)
    listed = _LISTED.get().get(path, {})
    _refuse_missing_weights(path, listed)
    # of a file that is not here its whole size, which is a little more than what its header speaks of
    sizes = [*listed.values(), *(_stated_bytes(file) for file in path.glob("*.safetensors"))]
    # a damaged file says nothing of the configuration; it is refused by its own name when it is read
    if None not in sizes:
        check_sizes(path / "config.json", config, sum(size or 0 for size in sizes))
    return path, config


def damaged_weights(path: Path, error: Exception) -> DataError:
    """Return the error that weights do not load: those of a file, or all of a directory."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    is_directory = path.is_dir()
    copied = (
        f"the *.safetensors and config.json of the model into {path}" if is_directory else f"{path.name} of the model"
    )
    return DataError(
        code="models.damaged_weights",
        what=f"the weights do not load: {lines[0]}",
        where=str(path),
        why="a file is damaged, or its tensors do not have the sizes that config.json states"
        if is_directory
        else "the file is absent, cut off or damaged",
        do=f"copy {copied} again",
    )


def missing_weights(path: Path, what: str) -> DataError:
    """Return the error that the files of a directory lack tensors which its configuration needs."""
    return DataError(
        code="models.missing_weights",
        what=what,
        where=str(path),
        why="a tensor that is not loaded would start from random values",
        do=f"copy the *.safetensors that belong to this config.json into {path}",
    )


def _refuse_adapters(path: Path) -> None:
    """Raise a DataError where a directory holds adapters alone."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        raise DataError(
            code="models.adapters_alone",
            what=f"{path} holds adapters without their base model ({base or 'which it does not name'})",
            where=str(path),
            why="a model is a directory with all of its weights",
            do=f"rft-train export {path} {path}-merged, then use {path}-merged instead",
        )


def _refuse_adapters_beside(path: Path) -> None:
    """Raise a DataError where transformers would read the base model of adapters instead of the directory's weights."""
    if (path / "adapter_config.json").is_file():
        raise DataError(
            code="models.adapters_beside",
            what=f"{path} holds a model and adapters, adapter_config.json",
            where=str(path / "adapter_config.json"),
            why="it is not clear which weights are meant: adapters name a base model of their own",
            do=f"move adapter_config.json and the adapters' weights out of {path}",
        )


def _refuse_missing_weights(path: Path, listed: Collection[str]) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict):
            raise wrong_value(index, "weight_map", weight_map, "an object with the file of each tensor")
        shards = set(map(str, cast(dict[str, Any], weight_map).values()))
        foreign = sorted(name for name in shards if not name.endswith(".safetensors") or Path(name).name != name)
        if foreign:
            raise DataError(
                code="models.foreign_shard",
                what=f"{index.name} names {foreign[0]}",
                where=str(index),
                why="weights are read from *.safetensors beside it; a pickled file can run code when it is opened",
                do=f"convert the weights to safetensors and remove {foreign[0]} from {index}",
            )
        absent = sorted(name for name in shards if name not in listed and not (path / name).is_file())
        if absent:
            raise DataError(
                code="models.missing_shard",
                what=f"{len(absent)} of {len(shards)} weight files are missing; the first is {absent[0]}",
                where=str(index),
                why="the index names every file that holds a part of the weights",
                do=f"copy {absent[0]} into {path}",
            )
        return
    if listed or any(path.glob("*.safetensors")):
        return
    pickled = sorted(entry.name for pattern in ("*.bin", "*.pt", "*.pth") for entry in path.glob(pattern))
    raise DataError(
        code="models.no_weights",
        what=f"no *.safetensors in {path}" + (f", only {pickled[0]}" if pickled else ""),
        where=str(path),
        why="weights are read from safetensors; a pickled file can run code when it is opened"
        if pickled
        else "a model directory holds its weights as safetensors",
        do=f"convert {pickled[0]} to model.safetensors" if pickled else f"copy model.safetensors into {path}",
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars on stderr while it reads or writes weights, and DeepSpeed from a warning.

    Where DeepSpeed is installed, accelerate imports it to write any model, which warns that there is no GPU.
    """
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # keeps DeepSpeed from its warning
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def no_load_report() -> Iterator[None]:
    """Keep transformers from listing the tensors of a file that were left out on purpose."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _stated_bytes(file: Path) -> int | None:
    """Return the bytes that the header of a safetensors file speaks of; None where there is no such header.

    The size of the file is not asked: of one that was cut the header still tells how large the model is.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LARGEST_HEADER:
                return None
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return max(map(int, ends), default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
