"""Codebooks and, of methods that have them, networks: what turns a vector into codes, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from rft_algos.quantisation.residual import reconstruct, residual_codes
from rft_core.durable_files import replace_bytes
from rft_core.errors import DataError


@dataclass(frozen=True)
class Quantiser:
    """Vectors to codes: an encoder, if there is one, and a codebook a level.

    Example: without networks `Quantiser("rqkmeans", (a, b))` gives a vector its nearest row of `a`, then the nearest
    row of `b` to what is left.
    """

    method: str
    codebooks: tuple[Tensor, ...]
    encoder: tuple[tuple[Tensor, Tensor], ...] = ()
    """(weight, bias) of each linear layer, ReLU between; empty = the vector itself is quantised."""
    decoder: tuple[tuple[Tensor, Tensor], ...] = ()
    adds_input: bool = False
    """Whether the encoder's result is added to the vector: Z = X + MLP(X)."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        """Return the numbers of a vector that is encoded."""
        return (self.encoder[0][0] if self.encoder else self.codebooks[0]).shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of codes of each level."""
        return tuple(len(codebook_KD) for codebook_KD in self.codebooks)

    def latents(self, points_ND: Tensor) -> Tensor:
        """Return what is quantised: [N, d]."""
        if not self.encoder:
            return points_ND
        encoded_Nd = layers_output(points_ND, self.encoder)
        return points_ND + encoded_Nd if self.adds_input else encoded_Nd

    def codes(self, points_ND: Tensor) -> Tensor:
        """Return [N, L] int64."""
        return residual_codes(self.latents(points_ND), self.codebooks)

    def reconstruct(self, codes_NL: Tensor) -> Tensor:
        """Return the vectors that codes stand for: [N, D]."""
        sums_Nd = reconstruct(codes_NL, self.codebooks)
        return layers_output(sums_Nd, self.decoder) if self.decoder else sums_Nd

    def save(self, file: Path) -> None:
        """Write tensors, method and facts."""
        tensors = {f"codebook_{level}": codebook_KD for level, codebook_KD in enumerate(self.codebooks)}
        for part, layers in (("encoder", self.encoder), ("decoder", self.decoder)):
            for number, (weight, bias) in enumerate(layers):
                tensors |= {f"{part}.{number}.weight": weight, f"{part}.{number}.bias": bias}
        metadata = {"method": self.method, "adds_input": json.dumps(self.adds_input), "facts": json.dumps(self.facts)}
        replace_bytes(file, save({name: value.cpu().contiguous() for name, value in tensors.items()}, metadata))


def load_quantiser(file: Path) -> Quantiser:
    """Read what `Quantiser.save` wrote.

    Raises:
        DataError: the file is absent, damaged, or lacks a level.
    """
    try:
        with safe_open(str(file), framework="pt") as tensors:
            found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 not a dict
            metadata = tensors.metadata() or {}
            facts, adds_input = json.loads(metadata.get("facts", "{}")), metadata.get("adds_input") == "true"
    except (OSError, ValueError, SafetensorError) as error:
        raise refused_codebooks(file, f"it cannot be read: {error}", "a .safetensors file of codebooks") from error
    codebooks = checked_levels(file, found)
    layers = {part: _layers(file, part, found) for part in ("encoder", "decoder")}
    return Quantiser(
        metadata.get("method", "rqkmeans"), codebooks, layers["encoder"], layers["decoder"], adds_input, facts
    )


def checked_levels(file: Path, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return `codebook_0`, `codebook_1`, ... of a file, each [K, d] with one d.

    Raises:
        DataError: none, a gap, another shape, or a value that is not finite.
    """
    wanted = [name for name in tensors if name.startswith("codebook_")]
    names = [f"codebook_{level}" for level in range(len(wanted))]
    if not wanted or set(wanted) != set(names):
        shown = ", ".join(sorted(tensors)[:6]) or "nothing"
        what = f"it holds {shown}"
        raise refused_codebooks(file, what, "one array a level is needed: codebook_0, codebook_1, ... without gaps")
    codebooks = tuple(tensors[name].float() for name in names)
    for name, codebook_KD in zip(names, codebooks, strict=True):
        if codebook_KD.ndim != 2 or codebook_KD.shape[1] != codebooks[0].shape[-1]:
            shapes = ", ".join(f"{one} {tuple(tensors[one].shape)}" for one in names)
            raise refused_codebooks(file, shapes, "every level is codes x numbers, with equally many numbers")
        if not codebook_KD.isfinite().all():
            raise refused_codebooks(file, f"{name} holds NaN or infinity", "distances to a code need finite numbers")
    return codebooks


def refused_codebooks(file: Path, what: str, why: str, do: str = "") -> DataError:
    """Return the error of a file of codebooks."""
    return DataError(
        code="genrec.codebooks",
        what=f"{file.name}: {what}",
        where=str(file),
        why=why,
        do=do or "make it anew with rft-train genrec sid",
    )


def layers_output(rows_ND: Tensor, layers: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """Return what linear layers with ReLU between them make of rows."""
    for number, (weight, bias) in enumerate(layers):
        rows_ND = F.linear(rows_ND if number == 0 else rows_ND.relu(), weight, bias)
    return rows_ND


def layers_of(network: nn.Sequential) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return weight and bias of the linear layers of a network."""
    return tuple((m.weight.detach(), m.bias.detach()) for m in network if isinstance(m, nn.Linear))


def _layers(file: Path, part: str, tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    number = sum(name.startswith(f"{part}.") and name.endswith(".weight") for name in tensors)
    try:
        return tuple((tensors[f"{part}.{n}.weight"], tensors[f"{part}.{n}.bias"]) for n in range(number))
    except KeyError as error:
        raise refused_codebooks(file, f"{error} is missing", "a network has a weight and a bias a layer") from error
