"""The catalogue of a command, with its IDs."""

from __future__ import annotations

from pathlib import Path

from rft_core.errors import DataError
from rft_genrec.catalogue.index_files import read_ids
from rft_genrec.catalogue.index_seal import check_seal
from rft_genrec.catalogue.minionerec_files import read_dataset, read_items
from rft_genrec.catalogue.records import Catalogue, Dataset, SemanticIds
from rft_genrec.settings.catalogue import CatalogueSettings


def chosen_dataset(settings: CatalogueSettings) -> tuple[Dataset, SemanticIds]:
    """Read the catalogue that settings name, and its IDs.

    Raises:
        DataError: a file is absent or holds something else, or the catalogue has no IDs.
    """
    found = read_dataset(settings.catalogue)
    catalogue, ids = found.catalogue, found.ids
    if settings.item_meta_path:
        items = read_items(Path(settings.item_meta_path).expanduser())
        if len(items) != len(catalogue):
            raise DataError(
                code="genrec.other_items",
                what=f"{settings.item_meta_path} has {len(items)} items, the catalogue {len(catalogue)}",
                where="--item_meta_path",
                why="samples and IDs name items by their numbers, which are places in this file",
                do="--item_meta_path with the file of this catalogue",
            )
        catalogue = Catalogue(catalogue.name, items)
    if settings.sid_index_path:
        index = Path(settings.sid_index_path).expanduser()
        ids = read_ids(index, len(catalogue))
        check_seal(index, catalogue)
    if ids is None:
        raise DataError(
            code="genrec.no_ids",
            what=f"there is no .index.json in {settings.catalogue}",
            where="--catalogue",
            why="a model is trained to write the semantic ID of an item, and the items have none yet",
            do=f"rft-train genrec sid --catalogue {settings.catalogue}, or --sid_index_path FILE",
        )
    return Dataset(catalogue, ids, found.samples), ids
