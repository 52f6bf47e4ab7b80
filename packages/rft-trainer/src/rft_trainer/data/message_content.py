"""Content of a chat message: a text, or parts of which some are images.

Parts are what chat templates of vision-language models take: `{"type": "text", "text": "..."}` and
`{"type": "image"}`. The image itself is in the column that --images_key names; a part only says its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rft_core.errors import DataError
from rft_trainer.data.readers.rows import Row, shown, wrong_type

Content = str | tuple[str | None, ...]
"""A text, or parts in order: a text each, None for an image."""

_INLINE = ("image", "image_url", "url", "path", "base64")
_OTHER_MEDIA = ("video", "audio", "input_audio")


def content_of(value: Any, row: Row, field: str, *, with_images: bool) -> Content:
    """Parse the content of a row's message.

    Raises:
        DataError: it is neither a text nor a list of parts, or holds images and no column of images is named.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise wrong_type(row, field, shown(value), "the content of a message is text" + _OR_PARTS * with_images)
    if not with_images:
        raise DataError(
            code="data.parts_without_images",
            what=f"the content is a list of {len(value)} parts, but images_key is empty",
            where=row.where(field),
            why="the content of a message is text, unless a column holds its images",
            do="--images_key images",
        )
    return tuple(_part(part, row, f"{field}[{number}]") for number, part in enumerate(value))


_OR_PARTS = ", or a list of parts"


def _part(part: Any, row: Row, field: str) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        # a null beside the type is no image: writers of uniform columns add such keys
        inline = next((name for name in _INLINE if part.get(name)), None)
        if inline is None:
            return None
        raise _inline(row, f"{field}.{inline}", part[inline])
    if kind in _OTHER_MEDIA:
        raise wrong_type(row, field, f"a part of type {kind}", "prompts are text and images")
    raise wrong_type(row, field, shown(part), 'a part is {"type": "text", "text": ...} or {"type": "image"}')


def as_template_content(content: Content) -> str | list[dict[str, str]]:
    """Convert content to the form that a chat template takes."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in content]


def texts_of(contents: Sequence[Content]) -> list[str]:
    """Return every text in the contents, in order."""
    return [t for c in contents for t in ([c] if isinstance(c, str) else [part for part in c if part is not None])]


def count_image_parts(contents: Sequence[Content]) -> int:
    """Count the parts that are images."""
    return sum(part is None for content in contents if not isinstance(content, str) for part in content)


def _inline(row: Row, field: str, value: Any) -> DataError:
    return wrong_type(
        row,
        field,
        f"an image inside a message: {shown(value)}",
        "a part marks the place of an image; the image itself is in the column that --images_key names",
        do='leave {"type": "image"} there, and write the image into a column of its own, as "image": "a.png"',
    )
