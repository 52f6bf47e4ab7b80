"""Kind and size of image files from their first bytes, each header written here by hand."""

from __future__ import annotations

import struct

import pytest

from rft_trainer.data.image_headers import KINDS, image_kind, image_size, media_type
from rft_trainer.tasks.drawn_images import SIZE, drawings


def riff(kind: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


def tiff(order: str, *entries: tuple[int, int, int]) -> bytes:
    """(tag, type, value) each; the directory stands behind the header."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    rows = b"".join(
        struct.pack(f"{order}HHI", tag, kind, 1)
        + (struct.pack(f"{order}HH", value, 0) if kind == 3 else struct.pack(f"{order}I", value))
        for tag, kind, value in entries
    )
    return start + struct.pack(f"{order}IH", 8, len(entries)) + rows


PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + struct.pack(">II", 20_000, 3) + bytes(5)
APP0 = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
TABLE = b"\xff\xc4" + struct.pack(">H", 5) + bytes(3)
FRAME = struct.pack(">HBHH", 17, 8, 480, 640)
BITS = (640 - 1) | (480 - 1) << 14

FILES = {
    "png": (PNG, "PNG", (20_000, 3)),
    "jpeg, baseline": (b"\xff\xd8" + APP0 + TABLE + b"\xff\xc0" + FRAME, "JPEG", (640, 480)),
    "jpeg, progressive, filled": (b"\xff\xd8" + APP0 + b"\xff\xff\xc2" + FRAME, "JPEG", (640, 480)),
    "gif": (b"GIF89a" + struct.pack("<HH", 640, 480), "GIF", (640, 480)),
    "bmp, from the top": (b"BM" + bytes(12) + struct.pack("<Iii", 40, 640, -480), "BMP", (640, 480)),
    "bmp, old": (b"BM" + bytes(12) + struct.pack("<IHH", 12, 640, 480), "BMP", (640, 480)),
    "webp, lossy": (riff(b"VP8 ", bytes(6) + struct.pack("<HH", 640 | 1 << 14, 480)), "WebP", (640, 480)),
    "webp, lossless": (riff(b"VP8L", b"\x2f" + struct.pack("<I", BITS)), "WebP", (640, 480)),
    "webp, lossy, its other side enlarged": (
        riff(b"VP8 ", bytes(6) + struct.pack("<HH", 640, 480 | 1 << 15)),
        "WebP",
        (640, 480),
    ),
    "webp, lossless, with alpha": (riff(b"VP8L", b"\x2f" + struct.pack("<I", BITS | 1 << 28)), "WebP", (640, 480)),
    "webp, extended, sides of more than 16 bits": (
        riff(b"VP8X", bytes(4) + (0x20304).to_bytes(3, "little") + (0x30405).to_bytes(3, "little")),
        "WebP",
        (0x20305, 0x30406),
    ),
    "webp, extended": (
        riff(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")),
        "WebP",
        (640, 480),
    ),
    "tiff": (tiff("<", (254, 4, 0), (256, 3, 640), (257, 4, 480)), "TIFF", (640, 480)),
    "tiff, big-endian": (tiff(">", (256, 4, 640), (257, 3, 480)), "TIFF", (640, 480)),
}


@pytest.mark.parametrize("name", FILES)
def test_the_size_is_read_from_the_header(name: str) -> None:
    data, kind, size = FILES[name]
    assert (image_kind(data), image_size(data)) == (kind, size)
    assert kind in KINDS


def test_the_smallest_image_has_a_size() -> None:
    data = PNG.replace(struct.pack(">II", 20_000, 3), struct.pack(">II", 1, 1))
    assert image_size(data) == (1, 1)


def test_a_jpeg_states_its_size_behind_the_markers_that_begin_a_frame() -> None:
    found = {}
    for marker in range(0xC0, 0xD1):
        segment = bytes([0xFF, marker]) + struct.pack(">HBHH", 7, 8, 1, 2)
        found[marker] = image_size(b"\xff\xd8" + segment + b"\xff\xc0" + FRAME)
    others = {0xC4, 0xC8, 0xCC, 0xD0}
    assert found == {marker: (640, 480) if marker in others else (2, 1) for marker in range(0xC0, 0xD1)}


@pytest.mark.parametrize("name", FILES)
def test_a_header_that_is_cut_off_has_no_size_and_no_error(name: str) -> None:
    data, _, size = FILES[name]
    found = {image_size(data[:length]) for length in range(len(data))}
    assert found <= {None, size}
    assert image_size(data[:12]) in (None, size)


def test_a_header_that_states_nothing_has_no_size() -> None:
    assert image_size(PNG.replace(struct.pack(">II", 20_000, 3), bytes(8))) is None
    assert image_size(tiff("<", (256, 3, 640))) is None
    assert image_size(tiff("<", (257, 3, 480))) is None
    assert image_size(b"\xff\xd8" + APP0 + b"\xff\xd9") is None
    assert (image_size(b"no image at all"), image_kind(b"")) == (None, None)


def test_what_is_drawn_here_has_its_size_and_type() -> None:
    (drawing,) = drawings(0, "test", 1)
    assert image_size(drawing.png) == (SIZE, SIZE)
    assert media_type(drawing.png) == "image/png"
    assert media_type(FILES["jpeg, baseline"][0]) == "image/jpeg"
