"""Images of scored items: their bytes, data URIs, and markers in a text."""

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
from rft_trainer.data.media_cache import image_files, stored_media
from rft_trainer.records.scores import RewardItem

Images = tuple[bytes, ...]

OTHER_MARKER = "(image)"
"""Text in place of a marker that stands for no image."""

PROBE_SIDE = 56
"""Pixels a side of the image that servers are tried with: two features of 28 pixels a side."""


@dataclass(frozen=True, slots=True)
class HeldImages:
    """Images in memory, as the media of an item."""

    files: Images


def files_of(items: Sequence[RewardItem]) -> list[Images]:
    """Read the encoded images of each item's prompt; adjacent items of one prompt are read once.

    Raises:
        DataError: a file has gone or changed since the rows were read.
    """
    images: list[Images] = []
    for index, item in enumerate(items):
        before = items[index - 1] if index else None
        # by identity, since all samples of a prompt share its media
        images.append(images[-1] if before is not None and before.media is item.media else image_files(item.media))
    return images


def sources_of(item: RewardItem) -> list[str]:
    """Return the path of each image of the prompt, or a data URI for one without a path."""
    stored = stored_media(item.media)
    if stored is None:
        return [data_uri(file) for file in image_files(item.media)]
    return [str(Path(image.path).absolute()) if image.path else data_uri(image.data) for image in stored.images]


def data_uri(file: bytes) -> str:
    """Return a file as a base64 data URI."""
    return f"data:{media_type(file)};base64,{base64.b64encode(file).decode()}"


def digests_of(images: Images) -> str:
    """Return the SHA-256 digests of images, joined by colons, as their identity."""
    return ":".join(hashlib.sha256(image).hexdigest() for image in images)


def as_text(content: Any) -> str:
    """Return the content of a message as text, with a marker in place of each image."""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return "".join(MARKER if part.get("type") == "image" else str(part.get("text", "")) for part in parts)


def without_markers(text: str) -> str:
    """Replace all image markers in a text, so that it takes no image."""
    return text.replace(MARKER, OTHER_MARKER)


def with_places(text: str, num_images: int) -> str:
    """Return `text` with exactly `num_images` markers: surplus ones become text, missing ones are put in front."""
    pieces = text.split(MARKER)
    kept = MARKER.join(pieces[: num_images + 1])
    rest = "".join(OTHER_MARKER + piece for piece in pieces[num_images + 1 :])
    return MARKER * max(0, num_images + 1 - len(pieces)) + kept + rest


def message_parts(text: str, images: Images) -> list[dict[str, Any]]:
    """Split a text with one marker an image into the message parts of an OpenAI-compatible server."""
    pieces = text.split(MARKER)
    assert len(pieces) == len(images) + 1, f"{len(pieces) - 1} places for {len(images)} images"
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index:
            parts.append({"type": "image_url", "image_url": {"url": data_uri(images[index - 1])}})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def probe_image() -> bytes:
    """Return a white PNG of `PROBE_SIDE` pixels a side."""
    side = PROBE_SIDE
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    body = zlib.compress((b"\0" + b"\xff" * 3 * side) * side, 9)
    chunks = (b"IHDR", header), (b"IDAT", body), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
