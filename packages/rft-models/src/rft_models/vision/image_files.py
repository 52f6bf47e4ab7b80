"""Image files -> RGB images of a bounded size. The header of a file is checked before anything is decoded.

A file of 20 KiB can hold 13,000 x 13,000 pixels, half a gigabyte once decoded. No file is decoded that states more
pixels than `PixelRules.max_decoded`; one with more than `max_pixels` is refused on request, or scaled down by the
model's own processor.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from rft_core.errors import DataError, OptionsError, install_command

ImageSource: TypeAlias = Any
"""A path (str or Path), the bytes of a file, a "data:image/...;base64,..." text, or a PIL image."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is read. Formats that run programs or name other files (EPS, SVG, ...) are not."""

_DATA_URI = "data:"
_STRIP_PIXELS = 1 << 18
"""Of a strip in which a large image is converted."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation of the camera; 1 is upright."""


@dataclass(frozen=True, slots=True)
class PixelRules:
    """Limits of the sizes of images, in pixels."""

    max_pixels: int | None = None
    """Largest size of an image as the model reads it, in pixels; None = the limit of the model's processor."""
    min_pixels: int | None = None
    """Pixels that smaller images are enlarged to; None = the limit of the model's processor."""
    oversize: Literal["downscale", "refuse"] = "downscale"
    """What becomes of an image with more than `max_pixels`."""
    max_decoded: int = 32 * 1024 * 1024
    """Pixels of the largest file that is decoded at all."""

    def __post_init__(self) -> None:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise OptionsError(
                code="images.pixel_range",
                what=f"min_pixels = {self.min_pixels:,}, max_pixels = {self.max_pixels:,}",
                where="--min_pixels, --max_pixels",
                why="no image can have at least min_pixels and at most max_pixels",
                do=f"--min_pixels {self.max_pixels}",
            )


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """A decoded image, and the file that it is."""

    image: Any
    """PIL, RGB, upright."""
    file: bytes


def open_image(source: ImageSource, rules: PixelRules | None = None, *, where: str = "image") -> OpenedImage:
    """Read an image as upright RGB of a checked size.

    Raises:
        DataError: no file, no image, of a format that is not read, damaged, or of more pixels than allowed.
        OptionsError: pillow is not installed.
    """
    pillow = require_pillow()
    rules = rules or PixelRules()
    if isinstance(source, pillow.Image):
        file = b""
        image = source
        _check_header(image.size, rules, where)
    else:
        file = _bytes_of(source, where)
        image = _opened(file, rules, where)
    upright = _upright_rgb(image, where, is_own=bool(file))
    # an engine opens the file by itself, and must see the pixels that the trainer has
    return OpenedImage(upright, file if file and _is_plain(image, upright) else _png(upright))


def require_pillow() -> Any:
    """Return PIL's `Image`, or raise an error with the command that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow") from error
    return Image


def require_image_packages() -> None:
    """Check that every package that images need is installed.

    Raises:
        OptionsError: pillow or torchvision is not.
    """
    require_pillow()
    if importlib.util.find_spec("torchvision") is None:
        raise missing_extra("torchvision")


def missing_extra(package: str) -> OptionsError:
    """Return the error for a package that images need and the base install lacks."""
    return OptionsError(
        code="vision.not_installed",
        what=f"{package} is not installed",
        where="vision-language models",
        why="images are decoded by pillow and prepared by transformers' processors, which need torchvision",
        do=install_command("vision"),
    )


def _bytes_of(source: ImageSource, where: str) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source.startswith(_DATA_URI):
        head, _, body = source.partition(",")
        if not head.endswith(";base64"):
            raise _refused(where, f"{head[:60]}... is not base64 text", "data URIs hold their file as base64")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refused(where, f"the base64 text is damaged: {error}", "it must decode to a file") from error
    if not isinstance(source, str | Path):
        kind = type(cast(object, source)).__name__
        raise _refused(where, f"a {kind} is not an image", "paths, bytes, data URIs and PIL images are accepted")
    path = Path(source)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            code="images.no_file",
            what=f"{source}: {reason}",
            where=where,
            why="an image is a file on this machine; nothing is downloaded",
            do=f"put the file at {path}",
        ) from error


def _opened(file: bytes, rules: PixelRules, where: str) -> Any:
    """Decode the image of a file whose header is good; its first frame where it has several."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _PILLOW_LIMIT.lifted():  # our own check comes first, with its own error
            image = Image.open(io.BytesIO(file), formats=FORMATS)
            _check_header(image.size, rules, where)
            image.load()
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise _refused(where, f"{len(file):,} bytes are not an image", f"formats that are read: {known}") from error
    # pillow's readers raise any of these for a damaged file
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, MemoryError, OverflowError) as error:
        raise _refused(where, f"the image is damaged: {error}", "it must decode completely") from error
    return image


class _PillowLimit:
    """Pillow's own limit of pixels, a global, lifted while any thread decodes and put back by the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_decoding = 0
        self._limit: int | None = None

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Lift the limit for the block; other threads decode at the same time."""
        image = require_pillow()
        # the lock is held for the change alone, so that threads do not wait for each other's decoding
        with self._lock:
            # a thread that comes later would find None, and put that back
            if not self._num_decoding:
                self._limit, image.MAX_IMAGE_PIXELS = image.MAX_IMAGE_PIXELS, None
            self._num_decoding += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_decoding -= 1
                if not self._num_decoding:
                    image.MAX_IMAGE_PIXELS = self._limit


_PILLOW_LIMIT = _PillowLimit()


def _check_header(size: tuple[int, int], rules: PixelRules, where: str) -> None:
    """Check the size that the header states, before anything is decoded."""
    width, height = size
    pixels = width * height
    if pixels < 1:
        raise _refused(where, f"the image has {width} x {height} pixels", "an image has at least one")
    if pixels > rules.max_decoded:
        raise DataError(
            code="images.too_large",
            what=f"the file states {width:,} x {height:,} = {pixels:,} pixels; at most {rules.max_decoded:,} are read",
            where=where,
            why="a small file can decode to gigabytes; the header is checked first",
            state="nothing of the image was decoded",
            do="scale the file down, or leave its row out",
        )
    if rules.oversize == "refuse" and rules.max_pixels is not None and pixels > rules.max_pixels:
        raise DataError(
            code="images.above_max_pixels",
            what=f"{width:,} x {height:,} = {pixels:,} pixels, max_pixels = {rules.max_pixels:,}",
            where=where,
            why="larger images are set to be refused, not scaled down",
            state="nothing of the image was decoded",
            do=f"--max_pixels {pixels}",
        )


def _upright_rgb(image: Any, where: str, *, is_own: bool) -> Any:
    """Turn an image as its EXIF data state, put transparency on white and convert 16-bit gray to 8.

    One that was opened here, and is upright RGB already, is returned as it is: a copy of a large one takes as much
    memory again.
    """
    from PIL import ImageOps

    try:
        if image.getexif().get(_ORIENTATION, 1) != 1:
            image = ImageOps.exif_transpose(image)
        if image.mode in ("I;16", "I;16B", "I;16L", "I"):
            return _in_strips(image, _gray_of_16_bits)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            return _in_strips(image, _on_white)
        if is_own and image.mode == "RGB" and getattr(image, "n_frames", 1) == 1:
            return image
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, KeyError, OverflowError) as error:
        raise _refused(
            where, f"an image of mode {image.mode} cannot be converted to RGB: {error}", "images are read as RGB"
        ) from error


def _gray_of_16_bits(image: Any) -> Any:
    # pillow's own conversion to 8 bits clips: all gray above 255 of 65,535 would be white
    return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")


def _on_white(image: Any) -> Any:
    from PIL import Image

    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _in_strips(image: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert an image strip by strip, where it is large: each step of a conversion holds all pixels again."""
    from PIL import Image

    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    if rows >= height:
        return convert(image)
    made = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        made.paste(convert(image.crop((0, top, width, min(height, top + rows)))), (0, top))
    return made


def _is_plain(image: Any, upright: Any) -> bool:
    """Return true where an engine that opens the file and converts it to RGB gets the same pixels."""
    one = getattr(image, "n_frames", 1) == 1 and image.getexif().get(_ORIENTATION, 1) == 1
    return one and image.mode in ("RGB", "L") and image.size == upright.size and "transparency" not in image.info


def _png(image: Any) -> bytes:
    """Encode the image as PNG, for files in which another program would see another image."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _refused(where: str, what: str, why: str) -> DataError:
    return DataError(
        code="images.not_an_image", what=what, where=where, why=why, do="put another file there, or leave its row out"
    )
