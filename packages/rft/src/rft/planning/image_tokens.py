"""Image tokens of a run's data before it starts: tokens of prompts, rows that are left out, and a remedy.

Some rows, evenly spread, are read, and of their images the headers; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rft.build.images import row_images, tokenizer_with_images
from rft.build.prompt_data import renderer_for
from rft.hub.sources import located_sources
from rft_models.vision.processor import HfProcessor
from rft_models.vision.token_counts import PlannedImages
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.prompts import PromptRow, prompts_from_rows
from rft_trainer.data.row_forms import Keys, as_read
from rft_trainer.data.sources import rows_of_source

SAMPLED = 512
"""Rows that are looked at."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Text tokens and image sizes of one row."""

    where: str
    text_tokens: int
    """With one placeholder an image; of a demonstration its output too."""
    sizes: tuple[tuple[int, int] | None, ...]
    """(width, height) of each image; None where its header does not say."""

    def tokens(self, images: PlannedImages, most_pixels: int | None = None) -> int | None:
        """Return the tokens of the whole prompt; None where an image has no size or a shape that is refused."""
        counts = self.image_tokens(images, most_pixels)
        return None if counts is None else self.text_tokens + sum(counts) - len(counts)

    def image_tokens(self, images: PlannedImages, most_pixels: int | None = None) -> list[int] | None:
        """Return the features of each image; None where an image has no size or a shape that is refused."""
        counts = [images.image_tokens(*size, most_pixels) if size else None for size in self.sizes]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Image tokens and rejected rows of the data; counts are of the rows that were sampled."""

    num_rows: int
    """In the data."""
    num_sampled: int
    num_images: int
    images_a_row: tuple[int, int]
    """Fewest and most, of rows that have some."""
    pixels: tuple[int, int]
    tokens_a_row: tuple[int, float, int]
    """Placeholders of a row with images: fewest, mean, most."""
    longest: int
    longest_row: str
    limit: int
    """Tokens that a prompt (or demonstration) may have."""
    limit_flag: str
    too_long: int
    too_many: int
    """Rows with more images than are allowed."""
    most_images: int
    unreadable: int
    """Rows with an image whose header does not say its size, or whose shape the processor refuses."""
    first_unreadable: str
    remedy: str
    """Settings with which no row is left out; "" where none is."""


def image_plan(settings: Any, *, limit: int, limit_flag: str) -> ImagePlan | None:
    """Plan the images of the training rows of RL or SFT settings; None where no row has an image.

    Raises:
        DataError, OptionsError: as the start would for a row, the model's processor or a package that is missing.
    """
    tokenizer = tokenizer_with_images(settings.model, settings.images)
    assert isinstance(tokenizer, HfProcessor)
    images = PlannedImages(tokenizer)
    column = row_images(settings.images, 0).column
    assert column is not None
    chosen, num_rows = _sampled(settings.data, column)
    renderer = renderer_for(settings.data, tokenizer)
    rows = [_planned(row, renderer.text(row), images) for row in chosen]
    return _summed(rows, num_rows, images, column, limit, limit_flag)


def _sampled(data: Any, column: ImageColumn) -> tuple[list[PromptRow], int]:
    """Some rows with all their images, however many are allowed, and how many rows there are."""
    probabilities = data.prompt_data_probs or None
    specs = located_sources(data.prompt_data, probabilities, split=data.prompt_split, flag="--prompt_data")
    tables = [rows_of_source(spec, split=data.prompt_split or None) for spec in specs]
    total = sum(map(len, tables))
    chosen: list[PromptRow] = []
    for spec, rows in zip(specs, tables, strict=True):
        # rounded up, so that rows of every source are looked at
        wanted = min(len(rows), -(-SAMPLED * len(rows) // total))
        picked = [rows[index * len(rows) // wanted] for index in range(wanted)]
        output = getattr(data, "output_key", None)
        # rows above the limit must be read to be counted
        unlimited = replace(column, limit=-1)
        read = as_read(picked, Keys(data.input_key, output=output))
        chosen += prompts_from_rows(
            read.rows, source=spec.name, input_key=read.keys.input, output_key=read.keys.output, images=unlimited
        )
    return chosen, total


def _planned(row: PromptRow, text: str, images: PlannedImages) -> PlannedRow:
    output = 0 if row.output is None else len(images.encode(row.output)) + len(images.eos_ids[:1])
    where = row.images[0].where if row.images else row.prompt_id
    sizes = tuple(image.size for image in row.images)
    return PlannedRow(where, images.text_tokens(text) + output, sizes)


def _summed(
    rows: Sequence[PlannedRow], num_rows: int, images: PlannedImages, column: ImageColumn, limit: int, flag: str
) -> ImagePlan | None:
    seeing = [row for row in rows if row.sizes]
    unreadable = [row for row in seeing if row.image_tokens(images) is None]
    readable = [row for row in rows if row not in unreadable]
    counts = [sum(row.image_tokens(images) or ()) for row in readable if row.sizes]
    if not counts:
        return None
    lengths = {row: row.tokens(images) or 0 for row in readable}
    longest = max(lengths, key=lambda row: lengths[row])
    too_long = sum(length > limit for length in lengths.values())
    pixels = [size[0] * size[1] for row in seeing for size in row.sizes if size]
    numbers = [len(row.sizes) for row in seeing]
    return ImagePlan(
        num_rows=num_rows,
        num_sampled=len(rows),
        num_images=sum(numbers),
        images_a_row=(min(numbers), max(numbers)),
        pixels=(min(pixels), max(pixels)),
        tokens_a_row=(min(counts), fmean(counts), max(counts)),
        longest=lengths[longest],
        longest_row=longest.where,
        limit=limit,
        limit_flag=flag,
        too_long=too_long,
        too_many=sum(0 <= column.limit < number for number in numbers),
        most_images=max(numbers),
        unreadable=len(unreadable),
        first_unreadable=unreadable[0].where if unreadable else "",
        remedy=_remedy(list(lengths), images, limit, flag, lengths[longest]) if too_long else "",
    )


def _remedy(rows: Sequence[PlannedRow], images: PlannedImages, limit: int, flag: str, longest: int) -> str:
    """The largest cap on pixels with which all rows fit, and the limit that holds them as they are."""
    as_they_are = f"{flag} {longest}"
    max_pixels = largest_cap(rows, images, limit)
    if not max_pixels:
        return as_they_are
    # the processor enlarges images below its least size, so a cap under that must lower it too
    below = f" --min_pixels {images.pixels_of_token}" if max_pixels < images.least_pixels else ""
    return f"--max_pixels {max_pixels}{below} or {as_they_are}"


def largest_cap(rows: Sequence[PlannedRow], images: PlannedImages, limit: int) -> int:
    """Return the largest cap on pixels, in full features, with which each row has at most `limit` tokens; 0: none.

    Fewer pixels never have more features, so that halving finds it.
    """
    token = images.pixels_of_token
    sizes = [size[0] * size[1] for row in rows for size in row.sizes if size]
    if not token or not sizes:
        return 0

    def fits(features: int) -> bool:
        return all((row.tokens(images, features * token) or 0) <= limit for row in rows)

    # above the largest image a cap has no effect
    low, high = 0, max(sizes) // token + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * token
