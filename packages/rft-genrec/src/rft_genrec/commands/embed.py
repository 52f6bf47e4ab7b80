"""The record of `rft-train genrec embed`, and what it says of settings without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rft.config.command_record import Command
from rft.config.rules.sourced_values import SourcedValues

EMBED = Command(
    name="genrec-embed",
    two_words=True,
    summary="encode the items of a catalogue as vectors",
    act="rft_genrec.embedding.encode_items:embed",
    settings="rft_genrec.settings.embed:EmbedSettings",
    notes="rft_genrec.commands.embed:idle_settings",
)

_OF_NETWORKS = ("pooling", "max_tokens", "embed_batch_size", "bf16", "device")
_OF_TFIDF = ("svd_dim", "seed")


def idle_settings(sourced: SourcedValues, defaults: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that was asked for and has no effect on the chosen encoder."""
    encoder = str(sourced.values["encoder"])
    is_file = encoder.endswith((".npy", ".safetensors"))
    idle = [] if not (is_file or encoder == "tfidf") else [*_OF_NETWORKS]
    idle += [] if encoder == "tfidf" else [*_OF_TFIDF]
    idle += ["field_characters"] if is_file and not encoder.endswith(".encoder.safetensors") else []
    return [
        f"{name} = {sourced.values[name]} ({sourced.origins[name]}) has no effect: the encoder is {encoder}"
        for name in idle
        if sourced.values[name] != defaults[name]
    ]
