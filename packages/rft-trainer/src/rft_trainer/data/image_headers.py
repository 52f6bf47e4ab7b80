"""Kind and size of an image from the first bytes of its file. Nothing is decoded."""

from __future__ import annotations

import struct

_STARTS = {
    "PNG": (b"\x89PNG\r\n\x1a\n", 0),
    "JPEG": (b"\xff\xd8\xff", 0),
    "GIF": (b"GIF8", 0),
    "WebP": (b"WEBP", 8),
    "BMP": (b"BM", 0),
    "TIFF": (b"II*\x00", 0),
    "TIFF (big-endian)": (b"MM\x00*", 0),
}
KINDS = tuple(kind for kind in _STARTS if "(" not in kind)
"""Names of the kinds that are read."""

_NO_SIZE = (0xC4, 0xC8, 0xCC)
"""JPEG markers among those of frames (C0 to CF) that begin none."""
_TIFF_TAGS = {256: 0, 257: 1}
_TIFF_TYPES = {3: "H", 4: "I"}


def image_kind(data: bytes) -> str | None:
    """Return one of `KINDS`, by the bytes that such files begin with; None for anything else."""
    for kind, (start, at) in _STARTS.items():
        if data[at : at + len(start)] == start:
            return kind.partition(" ")[0]
    return None


def media_type(data: bytes) -> str:
    """Return the media type for a data URI, "image/png" for example."""
    return f"image/{(image_kind(data) or 'octet-stream').lower()}"


def image_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) in pixels as the header states them; None where they cannot be read.

    Of a file that is shown turned (EXIF) these are the sides as they are stored.
    """
    readers = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif, "WebP": _webp, "BMP": _bmp, "TIFF": _tiff}
    kind = image_kind(data)
    try:
        size = readers[kind](data) if kind else None
    except (struct.error, IndexError):
        return None
    # a side of 0 is none: a JPEG may leave its height to a later marker
    return size if size and min(size) > 0 else None


def _png(data: bytes) -> tuple[int, int] | None:
    return struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" else None


def _gif(data: bytes) -> tuple[int, int]:
    return struct.unpack_from("<HH", data, 6)


def _bmp(data: bytes) -> tuple[int, int]:
    """Read a BMP header: sides of 16 bits if it has 12 bytes; a negative height means rows stored from the top."""
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return struct.unpack_from("<HH", data, 18)
    width, height = struct.unpack_from("<ii", data, 18)
    return width, abs(height)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        low, high, down_low, down_high = struct.unpack_from("<HBHB", data, 24)
        # 24 bits each, stored less one
        return 1 + low + (high << 16), 1 + down_low + (down_high << 16)
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        # 14 bits each, stored less one
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        # the two bits above are a factor for display
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Walk the segments of a JPEG until one begins a frame, which holds the size."""
    at = 2
    # ends with an IndexError on a file that is cut off, which the caller takes for no size
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            # over the whole segment by its stated length: bytes inside may look like markers
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def _tiff(data: bytes) -> tuple[int, int] | None:
    """Read tags 256 and 257 (width, height) of a TIFF's first directory."""
    order = "<" if data[:2] == b"II" else ">"
    first = struct.unpack_from(f"{order}I", data, 4)[0]
    sides = [0, 0]
    for number in range(struct.unpack_from(f"{order}H", data, first)[0]):
        at = first + 2 + 12 * number
        tag, kind = struct.unpack_from(f"{order}HH", data, at)
        if tag in _TIFF_TAGS and kind in _TIFF_TYPES:
            sides[_TIFF_TAGS[tag]] = struct.unpack_from(order + _TIFF_TYPES[kind], data, at + 8)[0]
    return sides[0], sides[1]
