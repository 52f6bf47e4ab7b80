"""Fingerprints that verify a weight update: which tensors are expected, and which values the engine received.

A fingerprint holds one digest a tensor, over up to 64 of its elements in the engine's own dtype. An
optimizer step moves practically every element, so a tensor that was left out, came late or was
overwritten has another digest. It costs a few microseconds a tensor on each side.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rft_core.errors import OptionsError, ServiceError
from rft_engine.typed_lists import to_floats
from rft_engine.weight_sync.weight_errors import first_names, incomplete_error, parity_error
from rft_engine.weight_sync.weight_file import read_header

WeightProvider: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Called for every update: the policy's present tensors, whole, under their checkpoint names."""

Fingerprint: TypeAlias = dict[str, str]
"""Name of a tensor -> digest of some of its elements."""

_MOST_ELEMENTS = 64
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def element_digest(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> str:
    """16 hexadecimal digits over the shape and up to 64 elements, evenly spaced, the last one among them."""
    flat = tensor.detach().reshape(-1)
    num = min(flat.numel(), _MOST_ELEMENTS)
    # float64: float32 does not have every index above 2**24
    indices = torch.linspace(0, flat.numel() - 1, num, dtype=torch.float64).round().to(torch.int64)
    # chosen on the device and then rounded as the engine holds them: 64 numbers cross to the host, not the tensor
    values = to_floats(flat[indices.to(flat.device)].to(dtype).float())
    content = repr(tuple(shape)).encode() + struct.pack(f"<{num}f", *values)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Fingerprint:
    """One digest a tensor, of its elements as `dtype`."""
    return {name: element_digest(tensor, tensor.shape, dtype) for name, tensor in tensors}


class WeightSource:
    """The provider's tensors for one model directory, complete and with tied names resolved.

    A model whose output matrix is its embedding needs that one tensor under the embedding's name.
    A provider that has it as `lm_head.weight` only is understood; one that has both sends it once.
    """

    def __init__(self, provider: WeightProvider, model_dir: str | Path) -> None:
        self._provider = provider
        self._required = required_names(Path(model_dir))
        self._is_tied = is_tied(Path(model_dir))
        self._embedding = next((name for name in self._required if name.endswith(_EMBEDDING)), "model." + _EMBEDDING)
        self._num_bytes = sum(path.stat().st_size for path in Path(model_dir).glob("*.safetensors"))
        self.sent: Fingerprint = {}
        self.shapes: dict[str, list[int]] = {}

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, as `dtype`; `sent` and `shapes` describe them when the last has gone.

        Raises:
            ServiceError: tensors that the model directory has are missing, or one came twice.
        """
        self.sent, self.shapes = {}, {}
        tied_sent = False
        for given_name, tensor in self._provider():
            is_tied_tensor = self._is_tied and given_name.endswith((_EMBEDDING, _HEAD))
            name = self._embedding if is_tied_tensor else given_name
            # a provider that has both names of the tied tensor sends it once
            if is_tied_tensor and tied_sent:
                continue
            tied_sent = tied_sent or is_tied_tensor
            if name in self.sent:
                raise _incomplete([f"{name} twice"], "every tensor is sent once")
            value = tensor.detach()
            value = value.to(dtype) if value.is_floating_point() else value
            self.sent[name] = element_digest(value, value.shape, dtype)
            self.shapes[name] = list(value.shape)
            yield name, value
        # known only now, when the engine has the others: its owner lets it refuse until a load succeeds
        missing = sorted(self._required - self.sent.keys())
        if missing:
            raise _incomplete(missing, "the engine would serve old values in their place")

    @property
    def num_tensors(self) -> int:
        """Number of tensors in the directory's files."""
        return len(self._required)

    @property
    def num_bytes(self) -> int:
        """Bytes of the directory's files: about what is sent."""
        return self._num_bytes


def required_names(model_dir: Path) -> frozenset[str]:
    """Names of all tensors in the directory's safetensors files, without the second name of a tied one."""
    names = {name for path in sorted(model_dir.glob("*.safetensors")) for name in read_header(path)}
    tied = is_tied(model_dir)
    return frozenset(name for name in names if not (tied and name.endswith(_HEAD)))


def is_tied(model_dir: Path) -> bool:
    """Return True when the output matrix is the embedding (tied weights)."""
    path = model_dir / "config.json"
    if not path.exists():
        raise OptionsError(
            code="engine.model_dir",
            what=f"{path} does not exist",
            where="engine with a copy of the weights (model_dir)",
            why="the engine builds its model from a Hugging Face directory: config.json and safetensors",
            state="nothing was started",
            do="save the policy and its tokenizer to a directory, and pass that directory",
        )
    config: dict[str, Any] = json.loads(path.read_text())
    text: dict[str, Any] = config.get("text_config", {})
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def compare(sent: Fingerprint, received: Fingerprint, version: int, served: int, side: str) -> None:
    """Raise `ServiceError` with versions and names unless every digest of `received` is the one that was sent."""
    differing = sorted(name for name, digest in received.items() if sent.get(name) != digest)
    if not differing:
        return
    raise parity_error(
        f"{len(differing)} of {len(received)} tensors {side} are not those of version {version}: "
        f"{first_names(differing)}",
        where=f"engine served version {served}, the trainer is at version {version}",
        state="the engine refuses to generate until a load succeeds; no sample was drawn",
        do=f"load_weights({version})",
    )


def _incomplete(names: Sequence[str], why: str) -> ServiceError:
    return incomplete_error(
        names,
        model="the model",
        where="the engine's weight provider",
        why=why,
        state="the engine refuses to generate until a load succeeds",
        do="yield every tensor of the checkpoint once, under its checkpoint name",
    )
