"""Image placeholders in the text of a row: one `<image>` marker, or one message part, an image.

A row without any placeholder gets its images in front of its text (of the last turn of a conversation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.images import MARKER, ImageColumn
from rft_trainer.data.message_content import Content, count_image_parts, texts_of
from rft_trainer.data.readers.rows import Row

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def count_places(contents: Sequence[Content]) -> int:
    """Count the placeholders for images: markers in texts, and image parts."""
    return sum(text.count(MARKER) for text in texts_of(contents)) + count_image_parts(contents)


def check_images(row: Row, input_key: str, column: ImageColumn, contents: Sequence[Content], num_images: int) -> None:
    """Raise `DataError` for a row with unequal numbers of images and placeholders; no placeholder is accepted."""
    num_places = count_places(contents)
    if num_places == num_images or (num_places == 0 and num_images > 0):
        return
    more = "images" if num_images > num_places else "placeholders"
    images, markers = _counted(num_images, "image"), _counted(num_places, "placeholder")
    raise DataError(
        code="data.image_places",
        what=f"{images} in {column.key} and {markers} ({MARKER} markers or image parts) in {input_key}: more {more}",
        where=row.where(input_key),
        why="every placeholder takes one image and every image needs one; without any, images stand in front",
        do=f"write {MARKER} {_times(num_images)} there, or give {column.key} {_counted(num_places, 'image')}"
        if num_images
        else f"give row {row.where()} its images in {column.key}, or take {MARKER} out of its text",
    )


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def check_column(row: Row, column: ImageColumn) -> None:
    """Raise `DataError` for a row without the image column where another of its fields holds images."""
    if column.key in row.fields or "." in column.key:
        return
    meant = _column_of_images(row)
    if meant is None:
        return
    raise DataError(
        code="data.no_image_column",
        what=f"no field {column.key}; the row has {', '.join(row.fields)}, and {meant} seems to hold images",
        where=row.where(column.key),
        why="images_key names the column of the images; under another name they would be left out",
        do=f"--images_key {meant}",
    )


def check_no_column(row: Row, input_key: str, text: str | None) -> None:
    """Raise `DataError` for a text with markers beside a field of images, where no image column is named."""
    meant = _column_of_images(row) if text is not None and MARKER in text else None
    if meant is None:
        return
    raise DataError(
        code="data.images_not_named",
        what=f"{input_key} has {MARKER}, {meant} has images, but images_key is empty",
        where=row.where(meant),
        why="without a column of images the marker would reach the model as text, and no image would",
        do=f"--images_key {meant}",
    )


def _column_of_images(row: Row) -> str | None:
    return next((name for name, value in row.fields.items() if _seems_an_image(value)), None)


def _seems_an_image(value: Any) -> bool:
    if isinstance(value, str):
        # a text may end with a file's name, but has spaces before it
        is_path = value.lower().endswith(_SUFFIXES) and not set(value) & set(" \n<")
        return is_path or value.startswith("data:image/")
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_seems_an_image, value))
    if isinstance(value, Mapping):  # what `datasets` writes
        return set(value) == {"bytes", "path"}
    return isinstance(value, bytes | bytearray | memoryview)


def check_mixture(row: Row, column: ImageColumn, num_images: int) -> None:
    """Raise `DataError` for a row without images unless such rows are allowed (`mixed`)."""
    if num_images or column.mixed:
        return
    raise DataError(
        code="data.row_without_image",
        what=f"the row has no image in {column.key}",
        where=row.where(column.key),
        why="otherwise a row that lacks its image would be trained on as text alone, unnoticed",
        do="--mixed_mm_data",
    )


def put_in_front(content: Content, num_images: int) -> Content:
    """Return `content` with the placeholders of `num_images` images in front."""
    return MARKER * num_images + content if isinstance(content, str) else (*(None,) * num_images, *content)
