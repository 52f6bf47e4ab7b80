"""Images of data rows: location, digest and size of each, and limits on their number.

An image is a file's bytes as they are (PNG, JPEG, ...); nothing is decoded here. It comes as a path relative to the
data file, as bytes (parquet), as the object that `datasets` writes (`{"bytes": ..., "path": ...}`), or as a data URI.
Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.image_headers import KINDS, image_kind, image_size
from rft_trainer.data.readers.rows import Row, shown

MARKER = "<image>"
"""Marker of an image's position in a text."""

MAX_IMAGE_BYTES = 64 * 1024 * 1024
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ImageColumn:
    """Column that holds the images of a row, and limits on their number."""

    key: str
    limit: int = -1
    """Most images of one row; -1 = any number."""
    mixed: bool = False
    """Whether rows without an image may stand beside rows with one."""


@dataclass(frozen=True, slots=True)
class RowImage:
    """One image of a row; `path` where the bytes are in a file, else `data` holds them."""

    where: str
    """file:line:field of the row that names it."""
    digest: str
    """SHA-256 of the bytes."""
    path: str = ""
    data: bytes = b""
    num_bytes: int = 0
    """Size of the encoded image in bytes."""
    size: tuple[int, int] | None = None
    """(width, height) as the file's header states them; None where it has none."""

    def read(self) -> bytes:
        """Read the bytes of the encoded image.

        Raises:
            DataError: its file has gone or has other bytes than when the rows were read.
        """
        if not self.path:
            return self.data
        data = _file_bytes(Path(self.path), self.where)
        # at every read: the file is opened again long after the rows were read
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise DataError(
                code="data.image_changed",
                what=f"{self.path} has changed since the rows were read",
                where=self.where,
                why="a run trains on the data that it started with",
                do="start again, once nothing writes to the images",
            )
        return data


def images_of(row: Row, column: ImageColumn) -> tuple[RowImage, ...]:
    """Read the images of a row, in order; none where the field is absent, null or an empty list.

    Raises:
        DataError: a value that is no image, a file that is not there, or more images than are allowed.
    """
    value = _value(row, column.key)
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    many = isinstance(value, list | tuple)
    if 0 <= column.limit < len(values):
        raise DataError(
            code="data.too_many_images",
            what=f"{len(values)} images; limit_mm_image_per_prompt = {column.limit}",
            where=row.where(column.key),
            why="no image of a row is left out, so the limit must allow for the row with the most images",
            do=f"--limit_mm_image_per_prompt {len(values)}",
        )
    return tuple(
        _image(item, row, f"{column.key}[{number}]" if many else column.key) for number, item in enumerate(values)
    )


def _value(row: Row, key: str) -> Any:
    # a field whose own name has a dot comes before a path through objects
    if key in row.fields:
        return row.fields[key]
    value: Any = row.fields
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _image(value: Any, row: Row, field: str) -> RowImage:
    where = row.where(field)
    if isinstance(value, Mapping):  # what `datasets` writes for a column of images
        # bytes first: a path that stands beside them may be one of the machine that wrote the data
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return _in_memory(bytes(value), where)
    if not isinstance(value, str) or not value.strip():
        raise _not_an_image(where, f"{type(value).__name__} {shown(value)}")
    if value.startswith("data:"):
        return _in_memory(_data_uri(value, where), where)
    if "://" in value[:12]:
        raise DataError(
            code="data.image_address",
            what=f"{shown(value)} is a URL",
            where=where,
            why="images are read from this machine; nothing is downloaded",
            do=f"save the image beside {row.file} and give its path",
        )
    # CSV has no lists: without this message the text would be looked for as a file
    if value.strip()[0] == "[" and value.strip()[-1] == "]":
        raise _list_as_text(where, value)
    path = Path(row.file).parent / Path(value).expanduser()
    data = _file_bytes(path, where)
    _refuse_other_kinds(data, where, str(path))
    return _described(where, data, path=str(path))


def _in_memory(data: bytes, where: str) -> RowImage:
    _refuse_other_kinds(data, where, f"{len(data):,} bytes")
    return _described(where, data, contents=data)


def _described(where: str, data: bytes, *, path: str = "", contents: bytes = b"") -> RowImage:
    return RowImage(where, hashlib.sha256(data).hexdigest(), path, contents, len(data), image_size(data))


def _file_bytes(path: Path, where: str) -> bytes:
    try:
        if not path.is_file():
            raise _no_file(path, where, "is a directory or a device" if path.exists() else "is not there")
        # before it is read: a wrong path may name a file of any size
        size = path.stat().st_size
        if size > MAX_IMAGE_BYTES:
            raise _no_file(path, where, f"has {size:,} bytes, more than the {MAX_IMAGE_BYTES:,} of an image")
        return path.read_bytes()
    except OSError as error:
        raise _no_file(path, where, f"cannot be read: {error.strerror or error}") from error


def _no_file(path: Path, where: str, what: str) -> DataError:
    return DataError(
        code="data.image_file",
        what=f"the image file {path} {what}",
        where=where,
        why="a path in an image column is relative to the data file",
        do=f"ls -l {shlex.quote(str(path))}",
    )


def _data_uri(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _not_an_image(where, f"the data URI {shown(text)}")
    try:
        # `validate`, since characters outside of the alphabet are dropped without a word otherwise
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _not_an_image(where, f"the data URI {shown(text)} ({error})") from error


def _refuse_other_kinds(data: bytes, where: str, named: str) -> None:
    if image_kind(data) is None:
        seen = f"beginning with {shown(data[:_SHOWN])}" if data else "an empty file"
        raise _not_an_image(where, f"{named}, {seen},")


def _list_as_text(where: str, value: str) -> DataError:
    return DataError(
        code="data.images_as_text",
        what=f"{shown(value)} is a list written as text",
        where=where,
        why="several images of a row are given as a list, which JSON and parquet can hold and CSV cannot",
        do="write the rows as JSON lines, with a list in this field",
    )


def _not_an_image(where: str, what: str) -> DataError:
    return DataError(
        code="data.not_an_image",
        what=f"{what} is not an image",
        where=where,
        why=f"an image is a path, bytes or a base64 data URI of {', '.join(KINDS)}",
        do=f"correct {where}",
    )
