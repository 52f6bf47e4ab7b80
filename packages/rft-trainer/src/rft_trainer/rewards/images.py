"""The images of what is scored: their bytes, as addresses that hold data, and their places in a text."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_trainer.data.image_headers import media_type
from rft_trainer.data.images import MARKER
from rft_trainer.data.media_cache import StoredMedia, image_files
from rft_trainer.records.scores import RewardItem

Images = tuple[bytes, ...]

OTHER_MARKER = "(image)"
"""What is read in place of a marker that stands for no image."""

PROBE_SIDE = 56
"""Pixels a side of the image that servers are tried with: two features of 28 pixels a side."""


@dataclass(frozen=True, slots=True)
class HeldImages:
    """Images that are in memory, as the media of an item."""

    files: Images


def files_of(items: Sequence[RewardItem]) -> list[Images]:
    """The encoded images of each item's prompt; those of neighbours with one prompt are read once.

    Raises:
        DataError: a file has gone or changed since the rows were read.
    """
    found: list[Images] = []
    for place, item in enumerate(items):
        before = items[place - 1] if place else None
        found.append(found[-1] if before is not None and before.media is item.media else image_files(item.media))
    return found


def sources_of(item: RewardItem) -> list[str]:
    """Of each image of the prompt its path, or where it has none a data URI."""
    if isinstance(item.media, StoredMedia):
        return [str(Path(image.path).absolute()) if image.path else data_uri(image.data) for image in item.media.images]
    return [data_uri(file) for file in image_files(item.media)]


def data_uri(file: bytes) -> str:
    """The file as an address that holds it."""
    return f"data:{media_type(file)};base64,{base64.b64encode(file).decode()}"


def digests_of(images: Images) -> str:
    """What tells these images from others."""
    return ":".join(hashlib.sha256(image).hexdigest() for image in images)


def as_text(content: Any) -> str:
    """The content of a message as text, with a marker in the place of each image."""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return "".join(MARKER if part.get("type") == "image" else str(part.get("text", "")) for part in parts)


def without_markers(text: str) -> str:
    """A text that takes no image, whatever it spells."""
    return text.replace(MARKER, OTHER_MARKER)


def with_places(text: str, num_images: int) -> str:
    """`text` with exactly so many markers: what is too much is read as text, what lacks stands in front."""
    pieces = text.split(MARKER)
    kept = MARKER.join(pieces[: num_images + 1])
    rest = "".join(OTHER_MARKER + piece for piece in pieces[num_images + 1 :])
    return MARKER * max(0, num_images + 1 - len(pieces)) + kept + rest


def message_parts(text: str, images: Images) -> list[dict[str, Any]]:
    """A text with as many markers as images as the parts of a message of an OpenAI-compatible server."""
    pieces = text.split(MARKER)
    assert len(pieces) == len(images) + 1, f"{len(pieces) - 1} places for {len(images)} images"
    parts: list[dict[str, Any]] = []
    for place, piece in enumerate(pieces):
        if place:
            parts.append({"type": "image_url", "image_url": {"url": data_uri(images[place - 1])}})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def probe_image() -> bytes:
    """A white PNG."""
    side = PROBE_SIDE
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    body = zlib.compress((b"\0" + b"\xff" * 3 * side) * side, 9)
    chunks = (b"IHDR", header), (b"IDAT", body), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
