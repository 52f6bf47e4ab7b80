"""Interactions in one table, with the texts of the items in it or in a table of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rft_genrec.catalogue.records import Item
from rft_genrec.interactions.row_files import read_rows
from rft_genrec.interactions.schemas import Column, RowPolicy, RowReader
from rft_genrec.interactions.sources import Interaction
from rft_genrec.settings.data import ColumnSettings


@dataclass(frozen=True, slots=True)
class TableSource:
    """A CSV, TSV, JSONL or parquet file with an interaction a row."""

    path: Path
    items_path: Path | None
    """Table with an item a row; None where the texts are in the table of interactions."""
    names: ColumnSettings
    policy: RowPolicy = field(default_factory=RowPolicy)

    @property
    def name(self) -> str:
        """Name of the file without its ending."""
        return self.path.name.partition(".")[0]

    def interactions(self) -> Iterator[Interaction]:
        """Yield the rows as interactions."""
        columns = (
            Column(self.names.user_column, "name", "the person"),
            Column(self.names.item_column, "name", "the item"),
            Column(self.names.time_column, "time", "the time of the interaction"),
        )
        yield from read_rows(RowReader(self.path, columns, self.policy))

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield the texts of the items; where they are in the table of interactions, once a row."""
        columns = (
            Column(self.names.item_column, "name", "the item"),
            Column(self.names.title_column, "text", "its title"),
            Column(self.names.description_column, "texts", "its description", required=False),
            Column(self.names.brand_column, "text", "its brand", required=False),
            Column(self.names.categories_column, "texts", "its categories", required=False),
        )
        rows = read_rows(RowReader(self.items_path or self.path, columns, self.policy))
        for item, title, description, brand, categories in rows:
            parts = [part for text in categories for part in text.split(",")] if len(categories) == 1 else categories
            yield item, Item(title, " ".join(description), brand, tuple(part.strip() for part in parts if part.strip()))
