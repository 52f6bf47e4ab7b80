"""Settings that say where items, semantic IDs and samples are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CatalogueSettings:
    """The catalogue that a command works on."""

    catalogue: str
    """Directory of the catalogue: items, semantic IDs and samples."""
    sid_index_path: str = ""
    """File of semantic IDs (`.index.json`); empty = the one in the catalogue."""
    item_meta_path: str = ""
    """File of items (`.item.json`); empty = the one in the catalogue."""
