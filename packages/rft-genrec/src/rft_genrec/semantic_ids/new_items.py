"""Semantic IDs of items that come later: codebooks and the IDs that exist stay as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_core.durable_files import replace_text
from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.index_files import read_ids
from rft_genrec.catalogue.index_seal import check_seal
from rft_genrec.catalogue.records import Catalogue
from rft_genrec.embedding.vector_files import stored_facts
from rft_genrec.semantic_ids import catalogue_files, collisions
from rft_genrec.semantic_ids.codebooks import Quantiser, load_quantiser, refused_codebooks
from rft_genrec.semantic_ids.tokens import codes_of, tokens_of
from rft_genrec.settings.sid import SidSettings

_SAME = ("encoder", "pooling", "normalised")
"""Facts of vectors without which codes of one file mean nothing for another."""


def add_items(
    settings: SidSettings, known: Catalogue, new: Catalogue, points_ND: Tensor, items_file: Path
) -> Iterator[str]:
    """Give new items IDs, and write items and IDs of all into the catalogue, or into `save_path`.

    Raises:
        DataError: codebooks of other vectors, or IDs that the codebooks did not make.
        OptionsError: a way of resolving collisions that would change IDs that exist.
    """
    vectors, how = settings.vectors, settings.quantiser.collisions
    if how == "sinkhorn":
        raise OptionsError(
            code="genrec.new_items_collisions",
            what="collisions = sinkhorn with new_items",
            where="--collisions",
            why="it assigns codes of whole groups anew, and the IDs that exist do not change",
            do="--collisions free",
        )
    source = Path(vectors.catalogue)
    folder = Path(settings.output.save_path or source)
    codebooks = Path(settings.quantiser.codebooks or source / f"{known.name}.codebooks.safetensors")
    quantiser = load_quantiser(codebooks)
    _check_vectors(codebooks, quantiser, points_ND, vectors.embeddings)
    index = catalogue_files.index_file(source, known.name)
    ids = read_ids(index, len(known))
    check_seal(index, known)
    taken = _codes_that_exist(index, ids.tokens_by_item, quantiser)
    codes_NL = quantiser.codes(points_ND)
    left_Nd = collisions.last_residuals(quantiser.latents(points_ND), codes_NL, quantiser.codebooks)
    codes = collisions.resolve(codes_NL, left_Nd, quantiser.codebooks[-1], how, epsilon=1.0, taken=taken)
    shared = sum(one in set(taken) for one in codes) + len(codes) - len(set(codes))
    tokens = [*ids.tokens_by_item, *(tokens_of(one) for one in codes)]
    unseen = {token for one in tokens[len(known) :] for token in one} - set(ids.vocabulary)
    if settings.output.save_path:
        folder.mkdir(parents=True, exist_ok=True)
        catalogue_files.copy_catalogue(source, items_file, folder)
    rows = json.loads(items_file.read_text(encoding="utf-8"))
    added = json.loads(Path(vectors.new_items).read_text(encoding="utf-8"))
    rows |= {str(len(known) + number): added[str(number)] for number in range(len(new))}
    replace_text(folder / items_file.name, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    grown = Catalogue(known.name, (*known.items, *new.items))
    catalogue_files.renew_samples(folder, grown, tokens)
    catalogue_files.write_index(catalogue_files.index_file(folder, known.name), grown, tokens)
    yield f"{len(new):,} items added as {len(known)} to {len(known) + len(new) - 1}, {shared} of them share an ID"
    if unseen:
        yield (
            f"{len(unseen)} tokens that no item had before, such as {min(unseen)}: a model that was trained on the "
            "earlier IDs has no rows for them"
        )
    yield f"{catalogue_files.index_file(folder, known.name)}: {len(tokens):,} items"


def _check_vectors(file: Path, quantiser: Quantiser, points_ND: Tensor, embeddings: str) -> None:
    if quantiser.dim != points_ND.shape[1]:
        what = f"codes of vectors of {quantiser.dim} numbers for vectors of {points_ND.shape[1]}"
        raise refused_codebooks(
            file, what, "new items are encoded as the others were", "--embeddings of the same encoder"
        )
    made_of: Mapping[str, Any] = quantiser.facts.get("vectors", {})
    facts = stored_facts(embeddings)
    other = [name for name in _SAME if name in made_of and name in facts and made_of[name] != facts[name]]
    if other:
        what = f"{other[0]} {made_of[other[0]]} of its vectors, {facts[other[0]]} of {Path(embeddings).name}"
        raise refused_codebooks(
            file, what, "new items are encoded as the others were", "--embeddings of the same encoder"
        )


def _codes_that_exist(
    index: Path, tokens_by_item: Sequence[Sequence[str]], quantiser: Quantiser
) -> list[collisions.Codes]:
    found, sizes = list[collisions.Codes](), quantiser.sizes
    for item, tokens in enumerate(tokens_by_item):
        codes = codes_of(tokens)
        if codes is None or len(codes) < len(sizes) or any(c >= k for c, k in zip(codes, sizes, strict=False)):
            raise DataError(
                code="genrec.ids_of_others",
                what=f"item {item} has the ID {''.join(tokens)[:60]}; the codebooks have {list(sizes)} codes",
                where=str(index),
                why="new items get IDs beside those that the same codebooks made",
                do="--codebooks FILE of the codebooks that made these IDs",
            )
        found.append(codes)
    return found
