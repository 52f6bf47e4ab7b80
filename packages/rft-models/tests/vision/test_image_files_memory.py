"""S6: what bad images cost in memory while they are read, refused or not, one after another and several at once."""

from __future__ import annotations

import ctypes
import io
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from rft_core.errors import RftError
from rft_models.vision.image_files import FORMATS, open_image

MOST_BYTES = 256 << 20
MOST_BYTES_OF_THE_LARGEST = 288 << 20
"""Four bytes a pixel of the image and of what it is converted to, with 35 MiB for the rest."""
BOMB = (13_000, 13_000)


def resident(which: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or the most since `forget_the_peak` (VmHWM)."""
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
    assert found is not None
    return 1024 * int(found[1])


def forget_the_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def give_free_memory_back() -> None:
    """Leave no free pages of this process in which an image could lie unseen."""
    ctypes.CDLL(None).malloc_trim(0)


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of these chunks behind a header that states a size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IEND", b"")])


def restated(file: bytes, place: int, layout: str) -> bytes:
    """A file whose header states the size of a bomb at this place."""
    return file[:place] + struct.pack(layout, *BOMB) + file[place + struct.calcsize(layout) :]


def zeros(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


SMALL = Image.effect_noise((64, 48), 60).convert("RGB")
FILES = {kind: file_of(SMALL, kind) for kind in FORMATS}
LARGEST = 5_760
"""Side of a square image that is still read: 33,177,600 of 33,554,432 pixels."""


@cache
def bombs() -> dict[str, bytes]:
    """Small files that state, or hold, a great deal."""
    text = zeros(100 << 20)
    return {
        "a bomb of zeros": png(*BOMB, chunk(b"IDAT", zeros(13_000 * 100))),
        "a bomb of 16 bits": png(*BOMB, chunk(b"IDAT", zeros(10_000)), depth=16, colour=6),
        "a compressed text": png(8, 8, chunk(b"zTXt", b"a\0\0" + text), chunk(b"IDAT", zeros(8 * 25))),
        "a compressed profile": png(8, 8, chunk(b"iCCP", b"a\0\0" + text), chunk(b"IDAT", zeros(8 * 25))),
        "pixels behind the image": png(8, 8, chunk(b"IDAT", text)),
        "a width of four thousand million": png(2**31 - 1, 1, chunk(b"IDAT", zeros(100))),
        "a GIF that states a bomb": restated(FILES["GIF"], 6, "<HH"),
        "a BMP that states a bomb": restated(FILES["BMP"], 18, "<ii"),
        "a PPM that states a bomb": b"P6\n13000 13000\n255\n" + bytes(100),
        "a WEBP that states its whole length": FILES["WEBP"][:4] + b"\xff\xff\xff\x7f" + FILES["WEBP"][8:],
        "a TIFF with entries without end": FILES["TIFF"][:8] + b"\xff\xff" + FILES["TIFF"][10:],
        "frames": file_of(SMALL, "GIF", save_all=True, append_images=[SMALL.rotate(n) for n in range(1, 60)]),
    }


def large() -> dict[str, Callable[[], bytes]]:
    """Files of the largest size that is read, in modes that are converted."""
    size = (LARGEST, LARGEST)
    return {
        "the largest RGB": lambda: png(*size, chunk(b"IDAT", zeros(LARGEST * (3 * LARGEST + 1)))),
        "the largest RGBA": lambda: png(*size, chunk(b"IDAT", zeros(LARGEST * (4 * LARGEST + 1))), colour=6),
        "the largest of 16 bits": lambda: png(
            *size, chunk(b"IDAT", zeros(LARGEST * (2 * LARGEST + 1))), depth=16, colour=0
        ),
        "the largest, cut": lambda: png(*size, chunk(b"IDAT", zeros(LARGEST * (3 * LARGEST + 1))[:20_000])),
    }


def damaged(number: int) -> dict[str, bytes]:
    """Files that are cut, or of which some bytes are others, drawn by their number."""
    made: dict[str, bytes] = {}
    for index in range(number):
        draw, kind = Random(f"images {index}"), FORMATS[index % len(FORMATS)]
        file = bytearray(FILES[kind])
        if index // len(FORMATS) % 2:
            del file[draw.randrange(len(file)) :]
        else:
            for _ in range(draw.randint(1, 8)):
                file[draw.randrange(len(file) if draw.random() < 0.5 else 64)] = draw.randrange(256)
        made[f"{kind} {index}"] = bytes(file)
    return made


def ended(file: bytes) -> str:
    try:
        opened = open_image(file)
    except RftError as error:
        return error.problem.code
    assert opened.image.mode == "RGB"
    return "read"


def test_s6_bad_images_take_little_memory() -> None:
    files = bombs() | damaged(84)
    ended(FILES["PNG"])  # which imports what reading needs
    give_free_memory_back()
    before, ends = resident("VmRSS"), Counter[str]()
    forget_the_peak()
    for name, file in files.items():
        end = ended(file)
        assert end in ("read", "images.not_an_image", "images.too_large"), name
        ends[end] += 1
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ended, bombs().values()))
    grown = resident("VmHWM") - before
    print(f"\nS6: {len(files)} images, {dict(ends)}, at most {grown >> 20} MiB more")
    assert ends["images.too_large"] >= 5
    assert grown < MOST_BYTES


@pytest.mark.parametrize("name", large())
def test_s6_the_largest_images_that_are_read_stay_within_the_limit(name: str) -> None:
    file = large()[name]()
    give_free_memory_back()
    before = resident("VmRSS")
    forget_the_peak()
    end = ended(file)
    grown = resident("VmHWM") - before
    print(f"\nS6: {name}, {len(file) >> 10} KiB: {end}, at most {grown >> 20} MiB more")
    assert grown < MOST_BYTES_OF_THE_LARGEST


def test_s6_the_measure_sees_what_an_image_takes() -> None:
    give_free_memory_back()
    before = resident("VmRSS")
    forget_the_peak()
    Image.new("RGB", (LARGEST, LARGEST), "white")
    assert resident("VmHWM") - before > 64 << 20
