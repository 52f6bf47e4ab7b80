"""Image files: what is read, what is refused before it is decoded, and what becomes of unusual ones."""

from __future__ import annotations

import base64
import importlib.util
import io
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rft_core.errors import DataError, OptionsError, RftError
from rft_models.tiny_models.vision import build_vision_model
from rft_models.vision.image_files import PixelRules, open_image

RED = (200, 30, 40)


@contextmanager
def refused(code: str, words: str = "") -> Iterator[pytest.ExceptionInfo[RftError]]:
    """An error of this code, whose text has these words."""
    with pytest.raises(RftError, match=words) as caught:
        yield caught
    assert caught.value.problem.code == code


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def claimed(width: int, height: int) -> bytes:
    """A PNG whose header states a size that its data do not have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_paths_bytes_data_uris_and_pil_images_are_one_image(tmp_path: Path) -> None:
    file = as_bytes(Image.new("RGB", (6, 4), RED))
    (tmp_path / "named_wrongly.jpg").write_bytes(file)
    uri = "data:image/png;base64," + base64.b64encode(file).decode()
    for source in (file, tmp_path / "named_wrongly.jpg", str(tmp_path / "named_wrongly.jpg"), uri):
        opened = open_image(source)
        assert opened.image.size == (6, 4)
        assert opened.image.getpixel((0, 0)) == RED
        assert opened.file == file
    assert open_image(Image.new("RGB", (6, 4), RED)).image.tobytes() == Image.new("RGB", (6, 4), RED).tobytes()


def test_a_bomb_is_refused_by_its_header() -> None:
    with refused("images.too_large", r"13,000 x 13,000 = 169,000,000"):
        open_image(claimed(13_000, 13_000))
    with refused("images.too_large"):
        open_image(claimed(60_000, 60_000))  # above pillow's own limit too


def test_threads_that_decode_at_once_are_under_our_limit_alone_and_put_pillows_own_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    file = as_bytes(Image.new("RGB", (8, 8), RED))
    first_inside, second_inside, first_done = (threading.Event() for _ in range(3))
    decode = Image.open

    def overlapping(*arguments: Any, **options: Any) -> Any:
        """The second thread begins while the first decodes, and decodes when the first is done."""
        if not first_inside.is_set():
            first_inside.set()
            assert second_inside.wait(30)
        else:
            second_inside.set()
            assert first_done.wait(30)
        return decode(*arguments, **options)

    monkeypatch.setattr(Image, "open", overlapping)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(open_image, file)
        assert first_inside.wait(30)
        second = pool.submit(open_image, file)
        assert first.result(30).image.size == (8, 8)
        first_done.set()
        assert second.result(30).image.size == (8, 8)
    assert Image.MAX_IMAGE_PIXELS == 10


def test_large_images_are_refused_where_that_is_asked_for() -> None:
    rules = PixelRules(max_pixels=20, oversize="refuse")
    with refused("images.above_max_pixels", r"--max_pixels 24"):
        open_image(claimed(6, 4), rules)  # by the header: these data do not decode
    assert open_image(as_bytes(Image.new("RGB", (5, 4))), rules).image.size == (5, 4)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    for source in (b"", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"not an image", 17):
        with refused("images.not_an_image", r"row 3"):
            open_image(source, where="row 3")
    with refused("images.no_file"):
        open_image(tmp_path / "absent.png")
    with refused("images.no_file"):
        open_image("https://example.com/cat.png")
    with refused("images.not_an_image"):
        open_image("data:image/png;base64,%%%")
    whole = as_bytes(Image.effect_noise((64, 64), 50).convert("RGB"))
    with pytest.raises(DataError) as caught:
        open_image(whole[: len(whole) // 2])
    assert caught.value.problem.code == "images.not_an_image"


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new("RGB", (5, 7), RED).convert("L").convert("I").convert("I;16") if mode == "I;16" else None
    image = image or Image.new("RGB", (5, 7), RED).convert("L" if mode in ("I", "F") else "RGB").convert(mode)
    opened = open_image(as_bytes(image, "TIFF"))
    assert opened.image.mode == "RGB"
    assert opened.image.size == (5, 7)
    assert Image.open(io.BytesIO(opened.file)).convert("RGB").tobytes() == opened.image.tobytes()


def test_sixteen_bits_keep_their_shades() -> None:
    deep = Image.new("I;16", (2, 1))
    deep.putpixel((0, 0), 65535)
    deep.putpixel((1, 0), 32768)
    opened = open_image(as_bytes(deep))
    assert [opened.image.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (128, 128, 128)]


def test_transparency_is_white_and_cameras_are_held_upright() -> None:
    clear = open_image(as_bytes(Image.new("RGBA", (2, 2), (0, 0, 0, 0))))
    assert clear.image.getpixel((0, 0)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = open_image(as_bytes(Image.new("RGB", (8, 3), RED), "JPEG", exif=exif))
    assert turned.image.size == (3, 8)
    assert Image.open(io.BytesIO(turned.file)).size == (3, 8)


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    opened = open_image(as_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert opened.image.getpixel((1, 1)) == (255, 0, 0)


def test_no_range_without_pixels() -> None:
    with refused("images.pixel_range"):
        PixelRules(max_pixels=100, min_pixels=200)


@pytest.mark.parametrize("absent", ["PIL", "torchvision"])
def test_a_missing_package_is_named_before_anything_is_made(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    if absent == "PIL":
        monkeypatch.setitem(sys.modules, absent, None)
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else found(name))
    with pytest.raises(OptionsError) as caught:
        build_vision_model(tmp_path / "model", object())
    assert caught.value.problem.code == "vision.not_installed"
    assert "--extra vision" in caught.value.problem.do
    assert not (tmp_path / "model").exists()
