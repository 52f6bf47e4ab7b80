"""Settings of `rft-train genrec data`: the source, the filters, the splits, and the files that are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SourceName = Literal["amazon", "movielens", "table", "minionerec", "synthetic"]


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The interactions and the texts of the items."""

    source: SourceName
    """Form of the input: amazon = reviews and metadata of Amazon 2018 (JSON lines, also .gz); movielens = a directory
    of MovieLens (ratings.dat, ratings.csv or u.data); table = one CSV, TSV, JSONL or parquet file of interactions;
    minionerec = a directory in MiniOneRec's formats, which is checked and written anew; synthetic = people and items
    that are made up."""

    input: str = ""
    """File of interactions (amazon, table) or directory (movielens, minionerec)."""

    items_file: str = ""
    """File of the items' texts: the metadata of amazon, or a table with an item a row; empty = the texts are in the
    table of interactions."""

    dataset_name: str = ""
    """Name of the catalogue, with which its files begin; empty = from the input."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row that is not as its columns are declared: refuse = the command ends with its place; skip =
    it is left out and counted."""


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """Names of the columns of a table (`--source table`)."""

    user_column: str = "user"
    """Column of the person."""

    item_column: str = "item"
    """Column of the item, in both files."""

    time_column: str = "timestamp"
    """Column of the time: seconds since 1970, or a date such as 2018-03-01T12:00 (UTC unless it says another zone)."""

    title_column: str = "title"
    """Column of the item's title."""

    description_column: str = "description"
    """Column of the item's description, where there is one."""

    brand_column: str = "brand"
    """Column of the item's brand, where there is one."""

    categories_column: str = "categories"
    """Column of the item's categories, joined by commas, where there is one."""


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """The interactions that are kept."""

    title_filter: bool = True
    """Leave out items as MiniOneRec does: those without a title, with `<span id` in it, with one character, or with
    more than 20 words."""

    start_date: str = ""
    """First day or month of the interactions, in UTC: 2016-10-01 or 2016-10; empty = no bound."""

    end_date: str = ""
    """End of the interactions: the first second of this day or month in UTC, which is still taken, as MiniOneRec does;
    empty = no bound."""

    min_items: int = field(default=0, metadata={"minimum": 0})
    """Fewest items: while fewer are left, `start_date` goes back by a year, down to 1996 (MiniOneRec: 3000); 0 = it
    stays as given."""

    repeats: Literal["keep", "merge"] = "keep"
    """An item that one person took several times: keep = every time, as MiniOneRec does; merge = the first time."""

    user_k: int = field(default=5, metadata={"minimum": 1})
    """Fewest interactions of a user, counted again until all users and items have enough."""

    item_k: int = field(default=5, metadata={"minimum": 1})
    """Fewest interactions of an item."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The samples of training, validation and test."""

    split: Literal["time", "leave_last_out"] = "time"
    """How samples are divided: time = all samples by the time of their targets, the newest for the test (MiniOneRec's);
    leave_last_out = the last item of every user for the test, the last but one for validation."""

    valid_share: float = field(default=0.1, metadata={"minimum": 0, "below": 1})
    """Share of the samples for validation (with `split` time)."""

    test_share: float = field(default=0.1, metadata={"minimum": 0, "below": 1})
    """Share of the samples for the test (with `split` time)."""

    max_history: int = field(default=10, metadata={"minimum": 1})
    """Newest items that the history of a sample holds."""


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    """The people that `--source synthetic` makes up."""

    users: int = field(default=4000, metadata={"minimum": 1})
    """Number of people."""

    personas: int = field(default=4, metadata={"minimum": 1})
    """Kinds of people: each has its own order in which sub-categories follow one another."""

    seed: int = 42
    """Seed of all that is drawn."""


@dataclass(frozen=True, kw_only=True)
class DataOutputSettings:
    """The files that are written."""

    save_path: str = ""
    """Directory of the catalogue, which must be new or empty; empty = nothing is written, and the report shown."""

    write_reviews: bool = False
    """Write the texts of the reviews too, as `.review.json` (`--source amazon`)."""


@dataclass(frozen=True, kw_only=True)
class GenrecDataSettings:
    """Make a catalogue and its samples from interactions."""

    sources: SourceSettings
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    filters: FilterSettings = field(default_factory=FilterSettings)
    splits: SplitSettings = field(default_factory=SplitSettings)
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)
    output: DataOutputSettings = field(default_factory=DataOutputSettings)
