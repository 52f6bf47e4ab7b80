"""MovieLens in its three forms: `ratings.dat` with `movies.dat` (1M, 10M), `.csv` (20M and newer), `u.data` (100K)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_genrec.catalogue.file_errors import refused_file
from rft_genrec.catalogue.records import Item
from rft_genrec.interactions.row_files import read_rows, separated_rows
from rft_genrec.interactions.schemas import Column, RowPolicy, RowReader
from rft_genrec.interactions.sources import Interaction

RATINGS = (
    Column("userId", "name", "the person"),
    Column("movieId", "name", "the film"),
    Column("timestamp", "time", "seconds since 1970 of the rating"),
)
MOVIES = (
    Column("movieId", "name", "the film"),
    Column("title", "text", "its title and year"),
    Column("genres", "text", "its genres, divided by |", required=False),
)
_GENRES_100K = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
_FORMS = {"ratings.dat": "movies.dat", "ratings.csv": "movies.csv", "u.data": "u.item"}
_RATING_NAMES = ("userId", "movieId", "rating", "timestamp")


@dataclass(frozen=True, slots=True)
class MovieLensSource:
    """A directory of MovieLens."""

    folder: Path
    policy: RowPolicy = field(default_factory=RowPolicy)

    @property
    def name(self) -> str:
        """Name of the directory, as in ml-1m."""
        return self.folder.resolve().name

    def interactions(self) -> Iterator[Interaction]:
        """Yield the ratings as interactions, whatever the number of stars."""
        path = self.folder / self._ratings()
        reader = RowReader(path, RATINGS, self.policy)
        if path.suffix == ".csv":
            yield from read_rows(reader)
        else:
            separator = "::" if path.suffix == ".dat" else "\t"
            yield from reader.read(separated_rows(path, separator, _RATING_NAMES, "latin-1"))

    def items(self) -> Iterator[tuple[str, Item]]:
        """Yield the films, whose genres are their categories."""
        path = self.folder / _FORMS[self._ratings()]
        reader = RowReader(path, MOVIES, self.policy)
        rows: Iterator[tuple[Any, ...]]
        if path.suffix == ".csv":
            rows = read_rows(reader)
        elif path.suffix == ".dat":
            rows = reader.read(separated_rows(path, "::", ("movieId", "title", "genres"), "latin-1"))
        else:
            rows = self._films_of_100k(path)
        for film, title, genres in rows:
            yield film, Item(title, categories=tuple(genre for genre in genres.split("|") if genre))

    def _films_of_100k(self, path: Path) -> Iterator[tuple[str, str, str]]:
        """Yield (film, title, genres) of u.item, whose last 19 columns say 1 for each genre that a film has."""
        names = ("movieId", "title", "released", "video", "imdb", *_GENRES_100K)
        columns = (*MOVIES[:2], *(Column(genre, "name", "1 or 0") for genre in _GENRES_100K))
        for film, title, *flags in RowReader(path, columns, self.policy).read(
            separated_rows(path, "|", names, "latin-1")
        ):
            yield film, title, "|".join(name for name, flag in zip(_GENRES_100K, flags, strict=True) if flag == "1")

    def _ratings(self) -> str:
        found = next((name for name in _FORMS if (self.folder / name).is_file()), None)
        if found is None:
            what = f"none of {', '.join(_FORMS)} is in it"
            raise refused_file(self.folder, what, "a directory of MovieLens, unpacked", "--input DIRECTORY")
        return found
