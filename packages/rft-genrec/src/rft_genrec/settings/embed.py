"""Settings of `rft-train genrec embed`: what is encoded, by what, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_models.settings import Device

Pooling = Literal["auto", "mean", "last"]


@dataclass(frozen=True, kw_only=True)
class ItemTextSettings:
    """The items, and what of their texts is read."""

    catalogue: str
    """Directory of the catalogue."""
    item_meta_path: str = ""
    """File of items (`.item.json`); empty = the one in the catalogue."""
    field_characters: int = field(default=2000, metadata={"minimum": 0})
    """Characters of a title and of a description that are read; what is beyond is cut off; 0 = all."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The encoder that turns a text into a vector."""

    encoder: str = "tfidf"
    """tfidf; minilm (the extra `minilm`); a Hugging Face directory or ORG/NAME[@REVISION] of the Hub; one's own .npy or
    .safetensors file with a row an item; or the .encoder.safetensors of an earlier tfidf, for items that came later."""
    pooling: Pooling = "auto"
    """How the states of a text become one vector; auto = as the encoder's directory states, else the last token of a
    decoder and the mean of any other."""
    max_tokens: int = field(default=512, metadata={"minimum": 1})
    """Tokens of a text that an encoder reads, fewer where it has fewer positions; what is beyond is cut off."""
    embed_batch_size: int = field(default=64, metadata={"minimum": 1})
    """Texts that are encoded at once."""
    svd_dim: int = field(default=256, metadata={"minimum": 1})
    """Numbers of a vector of tfidf; fewer where the texts have fewer words, which is said."""
    normalise: bool = True
    """Scale every vector to length 1."""
    bf16: bool = False
    """Compute the encoder in bfloat16; the file is float32 either way."""
    device: Device = "auto"
    """Where the encoder computes; auto = a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class EmbedOutputSettings:
    """The files of vectors."""

    save_path: str = ""
    """Directory of the files that are written; empty = that of the catalogue."""
    seed: int = 42
    """Seed of the projection of tfidf."""


@dataclass(frozen=True, kw_only=True)
class EmbedSettings:
    """Encode the text of every item of a catalogue as a vector."""

    items: ItemTextSettings
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    output: EmbedOutputSettings = field(default_factory=EmbedOutputSettings)
