"""Image entries in rows of prompts and responses: the origin of each image, so that a sample can be inspected.

A row holds no pixels. An image that is a file is named by its path; one whose bytes stood in the data is written once,
under its digest, into a folder beside the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rft_core.durable_files import replace_bytes, storage_errors
from rft_trainer.data.image_headers import image_kind
from rft_trainer.data.images import RowImage
from rft_trainer.data.media_cache import stored_media
from rft_trainer.records.rollouts import Prompt

FOLDER = "images"
"""Folder of the written images, next to the files of rows."""

_DIGITS = 32


def image_entries(prompt: Prompt) -> dict[str, object]:
    """Return the row entries of the images of a prompt; empty without images.

    `images` has an entry an image: `path` (absolute; null where the bytes stood in the data), `where` (file:line:field
    of the row that names it), `digest` (SHA-256 of the file), `bytes`, `width` and `height` as the file states them
    (null where it does not), `tokens` (placeholders in the prompt). `image_tokens` is the sum of these.
    """
    media = stored_media(prompt.media)
    if media is None:
        return {}
    counts = media.image_tokens or (None,) * len(media.images)
    entries = [_entry(image, number) for image, number in zip(media.images, counts, strict=True)]
    return {"images": entries, "image_tokens": media.num_tokens}


def _entry(image: RowImage, num_tokens: int | None) -> dict[str, object]:
    width, height = image.size or (None, None)
    return {
        "path": str(Path(image.path).absolute()) if image.path else None,
        "where": image.where,
        "digest": image.digest,
        "bytes": image.num_bytes or None,
        "width": width,
        "height": height,
        "tokens": num_tokens,
    }


def keep_images(
    rows: Sequence[Mapping[str, object]], prompts: Sequence[Prompt], directory: Path, limit: int
) -> list[dict[str, object]]:
    """Write images without a file below `directory`, at most `limit` of them, and return the rows that name the files.

    Their entries get `file`, relative to `directory`, null beyond the limit. A file that is there already is the same
    image: its name is the digest, and it is counted but not written again.

    Raises:
        StorageError: the disk refuses.
    """
    in_memory = {image.digest: image for prompt in prompts for image in _in_memory(prompt)}
    files: dict[str, str] = {}
    # in the order of the rows, so that a limit keeps the images of the first ones
    for digest in [entry["digest"] for row in rows for entry in entries_of(row) if entry["digest"] in in_memory]:
        if digest not in files and len(files) < limit:
            files[digest] = _write(in_memory[digest], directory)
    return [_with_files(row, files) for row in rows]


def entries_of(row: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the image entries of a row; empty where it has none of this form."""
    images = row.get("images")
    listed = cast("list[Any]", images) if isinstance(images, list) else []
    return listed if all(isinstance(entry, dict) and {"path", "digest"} <= entry.keys() for entry in listed) else []


def image_path(entry: Mapping[str, Any], directory: Path) -> Path | None:
    """Return the file of an image entry in the rows of `directory`; None where there is none."""
    if entry.get("path"):
        return Path(str(entry["path"]))
    return directory / str(entry["file"]) if entry.get("file") else None


def _in_memory(prompt: Prompt) -> list[RowImage]:
    media = stored_media(prompt.media)
    return [] if media is None else [image for image in media.images if not image.path]


def _write(image: RowImage, directory: Path) -> str:
    name = f"{FOLDER}/{image.digest[:_DIGITS]}.{(image_kind(image.data) or 'bin').lower()}"
    file = directory / name
    # the name is the digest: a file of this name has these bytes
    if not file.exists():
        with storage_errors("make", file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(file, image.data)
    return name


def _with_files(row: Mapping[str, object], files: Mapping[str, str]) -> dict[str, object]:
    entries = entries_of(row)
    if all(entry["path"] for entry in entries):
        return dict(row)
    images = [entry if entry["path"] else {**entry, "file": files.get(entry["digest"])} for entry in entries]
    return {**row, "images": images}
