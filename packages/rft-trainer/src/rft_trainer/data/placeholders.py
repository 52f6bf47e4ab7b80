"""Where the images of a row go in its text: one `<image>` marker, or one part of a message, an image.

A row without any place gets its images in front of its text (of the last turn of a conversation).
"""

from __future__ import annotations

from collections.abc import Sequence

from rft_algos.errors import DataError
from rft_trainer.data.content_parts import Content, count_image_parts, texts_of
from rft_trainer.data.images import MARKER, ImageColumn
from rft_trainer.data.rows import Row


def count_places(contents: Sequence[Content]) -> int:
    """Places for images: markers in texts, and parts."""
    return sum(text.count(MARKER) for text in texts_of(contents)) + count_image_parts(contents)


def check_images(row: Row, input_key: str, column: ImageColumn, contents: Sequence[Content], num_images: int) -> None:
    """Refuse a row whose images and places are not equally many; images without any place are fine."""
    num_places = count_places(contents)
    if num_places == num_images or (num_places == 0 and num_images > 0):
        return
    more = "images" if num_images > num_places else "places"
    raise DataError(
        code="data.image_places",
        what=f"{num_images} images in {column.key} and {num_places} places ({MARKER} markers or image parts) in "
        f"{input_key}: more {more}",
        where=row.where(input_key),
        why="every place takes one image and every image has one place; without any place, images stand in front",
        do=f"write {MARKER} {num_images} times into {row.where(input_key)}"
        if num_images
        else f"give row {row.where()} its images in {column.key}, or take {MARKER} out of its text",
    )


def check_mixture(row: Row, column: ImageColumn, num_images: int) -> None:
    """Refuse a row of text alone unless such rows were announced."""
    if num_images or column.mixed:
        return
    raise DataError(
        code="data.row_without_image",
        what=f"the row has no image in {column.key}",
        where=row.where(column.key),
        why="a missing image would otherwise be trained on as text alone without a word",
        do="--mixed_mm_data",
    )


def put_in_front(content: Content, num_images: int) -> Content:
    """`content` with the places of `num_images` images before it."""
    return MARKER * num_images + content if isinstance(content, str) else (*(None,) * num_images, *content)
