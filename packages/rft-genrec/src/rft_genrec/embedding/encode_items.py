"""`rft-train genrec embed`: the texts of a catalogue to a file of vectors."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rft.hub.run_settings import local_directory
from rft.process.machine import choose_device
from rft.resolved import Resolved
from rft_core.errors import DataError
from rft_genrec.catalogue.file_errors import refuse_closed
from rft_genrec.catalogue.minionerec_files import read_items
from rft_genrec.catalogue.records import Catalogue
from rft_genrec.embedding.minilm import MOST_TOKENS, WEIGHTS_SHA256, minilm_directory
from rft_genrec.embedding.texts import digest_of_texts, item_texts
from rft_genrec.embedding.tfidf import fit_tfidf, load_tfidf
from rft_genrec.embedding.vector_files import read_embeddings, write_embeddings
from rft_genrec.settings.embed import EmbedSettings, EncoderSettings, ItemTextSettings

_FITTED = ".encoder.safetensors"
_PROGRESS_SECONDS = 5.0

Encoded = Generator[str, None, tuple[Tensor, dict[str, Any]]]
"""Lines on the way; then vectors [N, D] and the facts of the encoder."""


def embed(resolved: Resolved[EmbedSettings]) -> Iterator[str]:
    """Encode every item, and write `NAME.emb-ENCODER.npy` and the JSON beside it."""
    settings = resolved.settings
    yield from resolved.notes
    # a missing package or model is an error before a large catalogue is read
    network = _network_directory(settings.encoder.encoder)
    catalogue = read_catalogue(settings.items)
    texts = item_texts(catalogue, settings.items.field_characters)
    folder = Path(settings.output.save_path or settings.items.catalogue)
    folder.mkdir(parents=True, exist_ok=True)
    label = encoder_label(settings.encoder.encoder)
    file = folder / f"{catalogue.name}.emb-{label}.npy"
    values_ND, facts = yield from _encoded(settings, network, texts, file)
    num_zero = int((values_ND.norm(dim=1) == 0).sum())
    if num_zero:
        yield f"{num_zero} items have the vector 0: nothing of their text is known to the encoder"
    if settings.encoder.normalise:
        values_ND = F.normalize(values_ND)
    write_embeddings(
        file,
        values_ND,
        facts
        | {
            "items": len(values_ND),
            "dim": values_ND.shape[1],
            "texts_sha256": digest_of_texts(texts),
            "field_characters": settings.items.field_characters,
            "normalised": settings.encoder.normalise,
            "zero_vectors": num_zero,
        },
    )
    yield f"{file}: {len(values_ND):,} items x {values_ND.shape[1]} numbers by {label}"


def read_catalogue(items: ItemTextSettings) -> Catalogue:
    """Read the items that the settings name.

    Raises:
        DataError: no file, or not one file, of items.
    """
    if items.item_meta_path:
        file = Path(items.item_meta_path)
    else:
        refuse_closed(Path(items.catalogue))
        found = sorted(Path(items.catalogue).glob("*.item.json"))
        if len(found) != 1:
            raise DataError(
                code="genrec.item_file",
                what=f"{len(found)} files *.item.json in {items.catalogue}",
                where="--catalogue",
                why="the directory of a catalogue holds one file of items",
                do="--item_meta_path FILE.item.json" if found else "--catalogue DIRECTORY",
            )
        file = found[0]
    return Catalogue(file.name.removesuffix(".item.json"), read_items(file))


def encoder_label(encoder: str) -> str:
    """Return the name of an encoder in names of files: `org-name` of a directory or a name of the Hub."""
    if encoder.endswith(_FITTED):
        return "tfidf"
    name = Path(encoder).stem if encoder.endswith((".npy", ".safetensors")) else Path(encoder.partition("@")[0]).name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "encoder"


def _network_directory(encoder: str) -> Path | None:
    """Return the directory of an encoder that is a network; None for tfidf and for files of vectors.

    Raises:
        PreflightError: the extra `minilm` is not installed, or the Hub cannot be asked.
        DataError: there is no such model, or its weights are others.
    """
    if encoder == "tfidf" or encoder.endswith((".npy", ".safetensors")):
        return None
    return minilm_directory() if encoder == "minilm" else Path(local_directory(encoder, "--encoder"))


def _encoded(settings: EmbedSettings, network: Path | None, texts: list[str], file: Path) -> Encoded:
    chosen = settings.encoder
    if network is not None:
        return (yield from _by_network(chosen, network, texts))
    if chosen.encoder == "tfidf":
        yield f"fitting words of {len(texts):,} texts"
        fitted = fit_tfidf(texts, chosen.svd_dim, seed=settings.output.seed)
        dim = fitted.directions_VD.shape[1]
        if dim < chosen.svd_dim:
            yield f"{dim} numbers a vector in place of svd_dim = {chosen.svd_dim}: the texts have no more directions"
        fitted.save(file.with_suffix(_FITTED))
        facts = {"encoder": "tfidf", "words": len(fitted.words), "seed": settings.output.seed, "pooling": "svd"}
        return fitted.encode(texts), facts
    if chosen.encoder.endswith(_FITTED):
        fitted = load_tfidf(chosen.encoder)
        return fitted.encode(texts), {"encoder": "tfidf", "words": len(fitted.words), "pooling": "svd"}
    return read_embeddings(chosen.encoder, len(texts)), {"encoder": chosen.encoder, "pooling": "none"}


def _by_network(chosen: EncoderSettings, directory: Path, texts: list[str]) -> Encoded:
    from rft_models.text_encoder.encoder import load_text_encoder

    is_minilm = chosen.encoder == "minilm"
    encoder = load_text_encoder(
        directory,
        pooling=chosen.pooling,
        max_tokens=min(chosen.max_tokens, MOST_TOKENS) if is_minilm else chosen.max_tokens,
        dtype=torch.bfloat16 if chosen.bf16 else torch.float32,
        device=choose_device(chosen.device, 0),
    )
    how = f"{encoder.pooling} pooling, up to {encoder.max_tokens} tokens, {encoder.device}"
    yield f"encoding {len(texts):,} texts, {how}"
    values_ND = torch.empty(len(texts), encoder.dim)
    done, start = 0, time.monotonic()
    shown = start
    for places, vectors_BD in encoder.encode(texts, batch_size=chosen.embed_batch_size):
        values_ND[torch.tensor(places)] = vectors_BD
        done += len(places)
        if (now := time.monotonic()) - shown > _PROGRESS_SECONDS:
            shown = now
            yield f"{done:,} of {len(texts):,} texts, {done / (now - start):.0f} a second"
    facts: dict[str, Any] = {"encoder": chosen.encoder, "pooling": encoder.pooling, "max_tokens": encoder.max_tokens}
    if is_minilm:
        facts |= {"weights_sha256": WEIGHTS_SHA256, "licence": "MIT"}
    return values_ND, facts | {"bf16": chosen.bf16}
