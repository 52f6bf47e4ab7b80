"""Amazon reviews of 2018: reviews and metadata in JSON lines, as they are published (`.json.gz`)."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_genrec.catalogue.records import Item
from rft_genrec.interactions.row_files import json_rows
from rft_genrec.interactions.schemas import Column, RowPolicy, RowReader
from rft_genrec.interactions.sources import Interaction

REVIEWS = (
    Column("reviewerID", "name", "the person"),
    Column("asin", "name", "the item"),
    Column("unixReviewTime", "time", "seconds since 1970 of the review"),
)
REVIEW_TEXTS = (
    *REVIEWS,
    Column("reviewText", "text", "the review", required=False),
    Column("summary", "text", "its heading", required=False),
)
METADATA = (
    Column("asin", "name", "the item"),
    Column("title", "text", "its title", required=False),
    Column("description", "texts", "paragraphs of its description", required=False),
    Column("brand", "text", "its brand", required=False),
    Column("category", "texts", "its categories, in the files of 2018", required=False),
    Column("categories", "texts", "its categories, in other files", required=False),
)
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True, slots=True)
class AmazonSource:
    """Reviews and metadata of one category."""

    reviews: Path
    metadata: Path
    policy: RowPolicy = field(default_factory=RowPolicy)

    @property
    def name(self) -> str:
        """Name of the category: that of the reviews' file without its ending and without `_5`."""
        return self.reviews.name.partition(".")[0].removesuffix("_5")

    def interactions(self) -> Iterator[Interaction]:
        """Yield the reviews as interactions."""
        yield from RowReader(self.reviews, REVIEWS, self.policy).read(json_rows(self.reviews))

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield the items of the metadata, without the tags of web pages in their texts."""
        for row in RowReader(self.metadata, METADATA, self.policy).read(json_rows(self.metadata)):
            item, title, description, brand, category, categories = row
            names = tuple(name for name in map(plain_text, category or categories) if name)
            parts = " ".join(text for text in map(plain_text, description) if text)
            yield item, Item(amazon_title(title), parts, plain_text(brand.removeprefix("by\n")), names)

    def review_texts(
        self, users: Mapping[str, int], items: Mapping[str, int]
    ) -> Iterator[tuple[tuple[int, int, int], tuple[str, str]]]:
        """Yield ((user, item, time), (text, summary)) of the reviews of these users and items."""
        rows: Iterator[Any] = RowReader(self.reviews, REVIEW_TEXTS, self.policy).read(json_rows(self.reviews))
        for user, item, time, text, summary in rows:
            if user in users and item in items:
                yield (users[user], items[item], time), (plain_text(text), plain_text(summary))


def amazon_title(title: str) -> str:
    """Return a title as MiniOneRec keeps it: two entities replaced, and spaces and quotes around it removed."""
    return title.replace("&quot;", '"').replace("&amp;", "&").strip(" ").strip('"')


def plain_text(text: str) -> str:
    """Return a text without tags, with its entities replaced, and with single spaces."""
    return " ".join(html.unescape(_TAG.sub("", text)).split())
