"""Which files are handed on as they are, and the sizes from which on an image is refused."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import pytest
from PIL import Image

from rft_core.errors import DataError, OptionsError
from rft_models.vision import image_files
from rft_models.vision.image_files import PixelRules, open_image, require_image_packages


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def plain(size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.effect_noise(size, 60).convert("RGB")


def exif(orientation: int) -> Image.Exif:
    made = Image.Exif()
    made[0x0112] = orientation
    return made


AS_THEY_ARE = {
    "RGB": file_of(plain()),
    "gray": file_of(plain().convert("L")),
    "a camera that is upright": file_of(plain(), "JPEG", exif=exif(1)),
    "WEBP": file_of(plain(), "WEBP"),
}
MADE_ANEW = {
    "a camera that lies": file_of(plain(), "JPEG", exif=exif(8)),
    "a camera upside down": file_of(plain(), "JPEG", exif=exif(3)),
    "a palette": file_of(plain().convert("P")),
    "one transparent colour": file_of(plain(), transparency=(0, 0, 0)),
    "transparency": file_of(plain().convert("RGBA")),
    "frames": file_of(plain(), "TIFF", save_all=True, append_images=[plain()]),
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_file_that_every_program_reads_alike_is_handed_on(name: str) -> None:
    opened = open_image(AS_THEY_ARE[name])
    assert opened.file == AS_THEY_ARE[name]
    assert opened.image.mode == "RGB"


@pytest.mark.parametrize("name", MADE_ANEW)
def test_another_is_made_anew_from_the_pixels(name: str) -> None:
    opened = open_image(MADE_ANEW[name])
    assert opened.file != MADE_ANEW[name]
    again = Image.open(io.BytesIO(opened.file))
    assert (again.format, again.mode) == ("PNG", "RGB")
    assert again.tobytes() == opened.image.tobytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_a_file(kind: Any) -> None:
    assert open_image(kind(AS_THEY_ARE["RGB"])).file == AS_THEY_ARE["RGB"]


def code_of(source: Any, rules: PixelRules | None = None) -> str | None:
    try:
        open_image(source, rules)
    except DataError as error:
        return error.problem.code
    return None


@pytest.mark.parametrize("as_file", [False, True])
def test_an_image_of_the_limit_is_read_and_one_with_a_pixel_more_is_not(as_file: bool) -> None:
    small, large = (file_of(image) if as_file else image for image in (plain((6, 4)), plain((5, 5))))
    for rules, code in (
        (PixelRules(max_decoded=24), "images.too_large"),
        (PixelRules(max_pixels=24, oversize="refuse"), "images.above_max_pixels"),
    ):
        assert code_of(small, rules) is None
        assert code_of(large, rules) == code
    assert code_of(large, PixelRules(max_pixels=24)) is None, "the processor scales it down"
    assert code_of(large, PixelRules(oversize="refuse")) is None
    assert PixelRules().max_decoded == 33_554_432


def test_an_image_has_a_pixel() -> None:
    assert code_of(Image.new("RGB", (0, 3))) == "images.not_an_image"
    assert code_of(Image.new("RGB", (1, 1))) is None
    for source in (Image.new("RGB", (0, 3)), b"", "data:,", 3, "absent.png"):
        with pytest.raises(DataError) as caught:
            open_image(source, where="row 7")
        assert caught.value.problem.where == "row 7"


def test_a_range_may_be_one_size() -> None:
    assert PixelRules(max_pixels=5, min_pixels=5).min_pixels == 5
    with pytest.raises(OptionsError) as caught:
        PixelRules(max_pixels=5, min_pixels=6)
    assert caught.value.problem.code == "images.pixel_range"


def test_a_data_uri_holds_base64() -> None:
    text = base64.b64encode(AS_THEY_ARE["RGB"]).decode()
    assert code_of(f"data:image/png;base64,{text}") is None
    for uri in (f"data:image/png,{text}", f"data:image/png;base64,*{text}", "data:image/png;base64,AAAA"):
        assert code_of(uri) == "images.not_an_image"


def test_only_formats_that_hold_pixels_are_read() -> None:
    assert code_of(file_of(plain(), "EPS")) == "images.not_an_image"
    assert code_of(file_of(plain(), "PCX")) == "images.not_an_image"
    assert code_of(file_of(plain(), "SGI")) == "images.not_an_image"
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert code_of(file_of(plain(), kind)) is None


@pytest.mark.parametrize(
    ("mode", "value", "shade"), [("I;16", 65535, 255), ("I", 256 * 7, 7), ("I;16B", 256 * 9, 9), ("I;16L", 256 * 5, 5)]
)
def test_sixteen_bits_of_gray_become_eight(mode: str, value: int, shade: int) -> None:
    deep = Image.frombytes(
        mode, (1, 1), value.to_bytes(4 if mode == "I" else 2, "big" if mode[-1] == "B" else "little")
    )
    assert open_image(deep).image.getpixel((0, 0)) == (shade,) * 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "P"])
def test_a_large_image_is_converted_in_strips_as_one_of_one_strip_is(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shades = Image.effect_noise((37, 23), 90)
    image = shades.convert("I").convert("I;16") if mode == "I;16" else shades.convert("RGB").convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.effect_noise((37, 23), 70))
    file = file_of(image, transparency=3) if mode == "P" else file_of(image)
    whole = open_image(file).image.tobytes()
    monkeypatch.setattr(image_files, "_STRIP_PIXELS", 4 * 37)
    assert open_image(file).image.tobytes() == whole


def test_an_image_of_the_caller_is_not_the_one_that_is_given_back() -> None:
    image = plain()
    assert open_image(image).image is not image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_white(mode: str) -> None:
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    image = Image.new("PA", (1, 1)) if mode == "PA" else clear.convert(mode)
    assert open_image(image).image.getpixel((0, 0)) == (255, 255, 255)


def test_packages_that_images_need_are_named_where_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    require_image_packages()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(OptionsError) as caught:
        require_image_packages()
    assert caught.value.problem.code == "vision.not_installed"
