"""`rft-train genrec sid`: vectors of a catalogue to semantic IDs, their codebooks and their report."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rft.process.machine import choose_device
from rft.resolved import Resolved
from rft_core.durable_files import replace_bytes, replace_text
from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, permutation
from rft_genrec.catalogue.records import Catalogue
from rft_genrec.embedding.encode_items import read_catalogue
from rft_genrec.embedding.texts import digest_of_texts, item_texts
from rft_genrec.embedding.vector_files import read_embeddings, refuse_other_texts, stored_facts
from rft_genrec.semantic_ids import catalogue_files, collisions, measures
from rft_genrec.semantic_ids.codebooks import Quantiser
from rft_genrec.semantic_ids.fitting import fit
from rft_genrec.semantic_ids.new_items import add_items
from rft_genrec.semantic_ids.report_page import page
from rft_genrec.semantic_ids.tokens import tokens_of
from rft_genrec.settings.embed import ItemTextSettings
from rft_genrec.settings.sid import SidSettings, VectorSettings


def sid(resolved: Resolved[SidSettings]) -> Iterator[str]:
    """Fit codebooks, write the IDs of all items, and report what they are worth; or give IDs to new items."""
    settings = with_vectors(resolved.settings)
    yield from resolved.notes
    vectors, output = settings.vectors, settings.output
    source = Path(vectors.catalogue)
    catalogue = read_catalogue(ItemTextSettings(catalogue=vectors.catalogue, item_meta_path=vectors.item_meta_path))
    device = choose_device(settings.quantiser.device, 0)
    if vectors.new_items:
        new = read_catalogue(ItemTextSettings(catalogue=vectors.catalogue, item_meta_path=vectors.new_items))
        yield from add_items(settings, catalogue, new, read_vectors(vectors, new).to(device), item_file(vectors))
        return
    folder = Path(output.save_path) if output.save_path else source
    if not output.overwrite:
        catalogue_files.refuse_overwriting(folder)
    catalogue_files.check_samples(source, len(catalogue))
    points_ND = read_vectors(vectors, catalogue).to(device)
    held_out = yield from _held_out_errors(points_ND, settings)
    quantiser, codes_NL = yield from fit(points_ND, settings, key=derive_key(output.seed, "sid"))
    codes = collisions.resolve(
        codes_NL,
        collisions.last_residuals(quantiser.latents(points_ND), codes_NL, quantiser.codebooks),
        quantiser.codebooks[-1],
        settings.quantiser.collisions,
        epsilon=settings.quantiser.sinkhorn_epsilon,
    )
    report = measured(points_ND, codes_NL, codes, quantiser, neighbours=output.neighbours) | held_out
    if output.save_path:
        folder.mkdir(parents=True, exist_ok=True)
        catalogue_files.copy_catalogue(source, item_file(vectors), folder)
    quantiser = replace(quantiser, facts={"vectors": stored_facts(vectors.embeddings), "seed": output.seed})
    _write(folder, catalogue, quantiser, codes_NL, codes, report)
    yield from _lines(folder, catalogue, report)


def with_vectors(settings: SidSettings) -> SidSettings:
    """Return the settings with the file of vectors that they mean: the only one of the catalogue where none is named.

    Raises:
        OptionsError: there is none, there are several, or new items are added, whose vectors the catalogue's are not.
    """
    vectors = settings.vectors
    if vectors.embeddings:
        return settings
    found = sorted(Path(vectors.catalogue).glob("*.emb-*.npy"))
    if len(found) == 1 and not vectors.new_items:
        return replace(settings, vectors=replace(vectors, embeddings=str(found[0])))
    what = f"{vectors.catalogue} holds {', '.join(file.name for file in found) or 'no file *.emb-*.npy'}"
    why, do = "IDs are made from one file of vectors", f"--embeddings {found[0] if found else 'FILE'}"
    if vectors.new_items:
        why, do = "new items need vectors of their own texts", "--embeddings FILE of the new items"
    elif not found:
        do = f"rft-train genrec embed --catalogue {vectors.catalogue}"
    raise OptionsError(code="genrec.no_vectors", what=what, where="--embeddings", why=why, do=do)


def read_vectors(vectors: VectorSettings, catalogue: Catalogue) -> Tensor:
    """Read the vectors of the items.

    Raises:
        DataError: vectors of other items, of no finite numbers, or of zeros where those are refused.
    """
    num_items, facts = len(catalogue), stored_facts(vectors.embeddings)
    points_ND = read_embeddings(vectors.embeddings, num_items)
    if "field_characters" in facts:
        texts = item_texts(catalogue, int(facts["field_characters"]))
        refuse_other_texts(vectors.embeddings, digest_of_texts(texts), facts)
    zero = (points_ND == 0).all(1).nonzero().flatten()
    # a single one shares its codes with no other
    if len(zero) > 1 and vectors.zero_vectors == "refuse":
        raise DataError(
            code="genrec.zero_vectors",
            what=f"{len(zero)} of {num_items} vectors are 0, the first is that of item {int(zero[0])}",
            where=vectors.embeddings,
            why="items without a direction all get one code, whatever they are",
            do="--zero_vectors keep, or vectors of an encoder that knows their texts",
        )
    return points_ND


def item_file(vectors: VectorSettings) -> Path:
    """Return the file of items of the settings, which `read_catalogue` found to be the only one."""
    if vectors.item_meta_path:
        return Path(vectors.item_meta_path)
    return next(iter(Path(vectors.catalogue).glob("*.item.json")))


def measured(
    points_ND: Tensor, raw_NL: Tensor, codes: list[collisions.Codes], quantiser: Quantiser, *, neighbours: int
) -> dict[str, Any]:
    """Return the report of IDs as a record."""
    raw_NL = raw_NL.cpu()
    codes_NL = collisions.as_tensor(codes, raw_NL.shape[1])
    near_NK = measures.nearest_items(points_ND, min(neighbours, len(points_ND) - 1)).cpu()
    prefixes = {
        levels: measures.shared_prefixes(codes_NL, near_NK, levels) for levels in range(1, min(3, raw_NL.shape[1] + 1))
    }
    raw = [tuple(row) for row in raw_NL.tolist()]
    return {
        "method": quantiser.method,
        "items": len(codes),
        "collision_rate_before": collisions.collision_rate(raw),
        "collision_rate": collisions.collision_rate(codes),
        "colliding_items": sum(len(members) for members in collisions.groups_of(codes).values() if len(members) > 1),
        "tokens": len({token for one in codes for token in tokens_of(one)}),
        "longest_id": max(map(len, codes)),
        "levels": [
            asdict(measures.level_use(codes_N, size))
            for codes_N, size in zip(codes_NL.unbind(1), quantiser.sizes, strict=True)
        ],
        "unexplained_share": measures.unexplained_share(points_ND, quantiser, points_ND.mean(0)),
        "neighbours": near_NK.shape[1],
        "neighbours_share": {str(levels): shared for levels, (shared, _) in prefixes.items()},
        "chance_share": {str(levels): chance for levels, (_, chance) in prefixes.items()},
        "histograms": [
            measures.histogram(codes_N, size) for codes_N, size in zip(codes_NL.unbind(1), quantiser.sizes, strict=True)
        ],
    }


def _held_out_errors(points_ND: Tensor, settings: SidSettings) -> Generator[str, None, dict[str, Any]]:
    """Fit without a share of the items, and return how much of those and of the others is not explained."""
    output, num = settings.output, len(points_ND)
    left_out = round(output.held_out_share * num)
    if not left_out:
        return {}
    order_N = permutation(derive_key(output.seed, "sid-held-out"), num).to(points_ND.device)
    fitted_ND, rest_ND = points_ND[order_N[left_out:]], points_ND[order_N[:left_out]]
    quantiser, _ = yield from fit(fitted_ND, settings, key=derive_key(output.seed, "sid"))
    mean_D = fitted_ND.mean(0)
    return {
        "held_out_items": left_out,
        "held_out_unexplained_share": measures.unexplained_share(rest_ND, quantiser, mean_D),
        "fitted_unexplained_share": measures.unexplained_share(fitted_ND, quantiser, mean_D),
    }


def _write(
    folder: Path,
    catalogue: Catalogue,
    quantiser: Quantiser,
    codes_NL: Tensor,
    codes: list[collisions.Codes],
    report: dict[str, Any],
) -> None:
    tokens = [tokens_of(one) for one in codes]
    buffer = io.BytesIO()
    np.save(buffer, codes_NL.cpu().numpy(), allow_pickle=False)
    replace_bytes(folder / f"{catalogue.name}.codes.npy", buffer.getvalue())
    quantiser.save(folder / f"{catalogue.name}.codebooks.safetensors")
    replace_text(folder / f"{catalogue.name}.sid.json", json.dumps(report, indent=2) + "\n")
    replace_text(folder / f"{catalogue.name}.sid.html", page(catalogue.name, report))
    catalogue_files.renew_samples(folder, catalogue, tokens)
    # last: whoever finds the index finds the rest
    catalogue_files.write_index(catalogue_files.index_file(folder, catalogue.name), catalogue, tokens)


def _lines(folder: Path, catalogue: Catalogue, report: dict[str, Any]) -> Iterator[str]:
    yield f"collisions {report['collision_rate_before']:.2%} of the items before, {report['collision_rate']:.2%} after"
    for level, use in enumerate(report["levels"]):
        yield f"level {level + 1}: {use['used']} of {use['codes']} codes used, perplexity {use['perplexity']:.1f}"
    if "held_out_items" in report:
        yield (
            f"not explained: {report['held_out_unexplained_share']:.1%} of the spread of {report['held_out_items']} "
            f"items that a fit left out, {report['fitted_unexplained_share']:.1%} of those it had"
        )
    for levels, shared in report["neighbours_share"].items():
        chance = report["chance_share"][levels]
        first = "code" if levels == "1" else f"{levels} codes"
        near = f"{shared:.1%} of the {report['neighbours']} nearest items"
        yield f"{near} share the first {first} ({chance:.2%} by chance)"
    yield f"{catalogue_files.index_file(folder, catalogue.name)}: {report['items']:,} items, {report['tokens']} tokens"
