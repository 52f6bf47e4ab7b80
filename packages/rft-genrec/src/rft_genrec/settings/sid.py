"""Settings of `rft-train genrec sid`: vectors to semantic IDs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rft_models.settings import Device

Method = Literal["rqkmeans", "rqkmeans_balanced", "rqkmeans_plus", "rqvae"]
Collisions = Literal["free", "sinkhorn", "extra", "keep"]
StraightThrough = Literal["sum", "per_level"]


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """The items, and a vector of each."""

    catalogue: str
    """Directory of the catalogue."""
    embeddings: str = ""
    """File of vectors, a row an item, as `rft-train genrec embed` writes it: .npy or .safetensors; empty = the only one
    in the catalogue, `NAME.emb-ENCODER.npy`."""
    item_meta_path: str = ""
    """File of items (`.item.json`); empty = the one in the catalogue."""
    new_items: str = ""
    """File of items (`.item.json`) that are added to the catalogue; `embeddings` are theirs, and the IDs of the items
    that are there stay as they are."""
    zero_vectors: Literal["refuse", "keep"] = "refuse"
    """What to do with several items whose vector is 0; keep = they share their codes, until collisions are resolved."""


@dataclass(frozen=True, kw_only=True)
class QuantiserSettings:
    """The quantiser that turns vectors into codes."""

    method: Method = "rqkmeans"
    """rqkmeans: k-means on what each level leaves; rqkmeans_balanced: the same with equally many items a code; rqvae: a
    network around the codes; rqkmeans_plus: the same, from codes of rqkmeans_balanced and a network that begins with
    the vectors themselves."""
    levels: int = field(default=3, metadata={"minimum": 1, "maximum": 25})
    """Codes of an ID."""
    codes: str = "256"
    """Codes that each level has to choose from: one number, or one for every level, joined by commas."""
    collisions: Collisions = "free"
    """Items with one ID. free: all but one take the nearest last code that is free under their prefix; sinkhorn: the
    last codes of each group are assigned anew by optimal transport, up to 20 times; extra: each takes one token more;
    keep: nothing."""
    sinkhorn_epsilon: float = field(default=0.003, metadata={"above": 0.0})
    """Smoothness of the optimal transport of `collisions` = sinkhorn."""
    kmeans_iterations: int = field(default=100, metadata={"minimum": 1})
    """Iterations of k-means at each level, at most."""
    codebooks: str = ""
    """File of codebooks (.safetensors or .npz): those that new items are given codes by, or that rqkmeans_plus starts
    from; empty = the ones in the catalogue for new items, those of rqkmeans_balanced for rqkmeans_plus."""
    device: Device = "auto"
    """Where codes are computed; auto = a CUDA GPU if there is one, else the CPU."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderSettings:
    """The networks of rqvae and rqkmeans_plus."""

    latent_dim: int = field(default=32, metadata={"minimum": 1})
    """Numbers of the vector that rqvae quantises; rqkmeans_plus keeps that of the embeddings."""
    hidden_dims: str = "512,256,128"
    """Widths of the layers between, joined by commas; the decoder has them in reverse."""
    vae_epochs: int = field(default=500, metadata={"minimum": 1})
    """Passes over all items."""
    vae_batch_size: int = field(default=1024, metadata={"minimum": 1})
    """Items of a step."""
    vae_learning_rate: float = field(default=0.0, metadata={"minimum": 0.0})
    """Learning rate of AdamW, constant after 50 epochs of warm-up; 0 = 0.001 for rqvae, 0.0001 for rqkmeans_plus."""
    commitment: float = field(default=0.25, metadata={"minimum": 0.0})
    """Weight of the pull of the vectors towards their codes."""
    straight_through: StraightThrough = "sum"
    """Where the gradient passes the codes: sum = once, at the sum of all levels; per_level = at every level, as
    published, where no level behind the first pulls the encoder."""
    revive_epochs: int = field(default=10, metadata={"minimum": 0})
    """Codes that no item took for so many epochs are set to vectors of badly coded items; 0 = never."""


@dataclass(frozen=True, kw_only=True)
class SidOutputSettings:
    """The files that are written, and the measures."""

    save_path: str = ""
    """Directory of a new catalogue with these IDs: items and samples are copied; empty = the IDs go into the catalogue
    itself."""
    overwrite: bool = False
    """Replace the IDs that the directory has."""
    held_out_share: float = field(default=0.1, metadata={"minimum": 0.0, "maximum": 0.5})
    """Share of the items that a first fit leaves out, to measure how well it reconstructs them; 0 = no such fit."""
    neighbours: int = field(default=10, metadata={"minimum": 1})
    """Nearest items of each item that the report asks whether they share its codes."""
    seed: int = 42
    """Seed of starts, draws and what is left out."""


@dataclass(frozen=True, kw_only=True)
class SidSettings:
    """Give every item of a catalogue a semantic ID: a few codes, from the coarsest to the finest."""

    vectors: VectorSettings
    quantiser: QuantiserSettings = field(default_factory=QuantiserSettings)
    autoencoder: AutoencoderSettings = field(default_factory=AutoencoderSettings)
    output: SidOutputSettings = field(default_factory=SidOutputSettings)
