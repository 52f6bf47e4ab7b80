"""Tokens of an index of semantic IDs, as scripts of MiniOneRec ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError


class TokenExtender:
    """The tokens of an index file; exactly the file that is given is read, whatever dots its name has.

    Example: `TokenExtender("data/X.faiss-rq.index.json").get_new_tokens()` begins with "<a_0>".
    """

    def __init__(self, data_path: str | Path, dataset: str = "", index_file: str = "") -> None:
        """`data_path`: the file; or its folder, with the name of the file as `dataset` + `index_file`."""
        self.path = Path(data_path) / f"{dataset}{index_file}" if index_file else Path(data_path)

    def get_new_tokens(self) -> list[str]:
        """Return the distinct tokens, sorted as text.

        Raises:
            DataError: the file is absent or is no index.
        """
        try:
            rows: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._refused(f"cannot be read: {error}") from error
        if not isinstance(rows, dict) or not rows:
            raise self._refused("is no object of lists of tokens")
        tokens: set[str] = set()
        for item, row in cast("dict[str, Any]", rows).items():
            if not isinstance(row, list) or not row or not all(isinstance(token, str) for token in row):  # pyright: ignore[reportUnknownVariableType]
                raise self._refused(f"item {item}: {str(row)[:60]!r} is no list of tokens")  # pyright: ignore[reportUnknownArgumentType]
            tokens.update(cast("list[str]", row))
        return sorted(tokens)

    def _refused(self, what: str) -> DataError:
        return DataError(
            code="genrec.index",
            what=f"{self.path.name} {what}",
            where=str(self.path),
            why='an index has the tokens of every item: {"0": ["<a_1>", "<b_2>", "<c_0>"], ...}',
            do="rft-train genrec sid, which writes it",
        )
