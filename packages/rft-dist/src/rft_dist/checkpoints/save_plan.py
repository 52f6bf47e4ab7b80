"""Save plan: the shards that each rank announces before a byte is written, and the resulting files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rft_dist.checkpoint_format.layout import STATE
from rft_dist.checkpoint_format.resharding import key_of, rank_file
from rft_dist.checkpoint_format.safetensors_pieces import num_tensor_bytes
from rft_dist.checkpoint_format.shards import Shard

_HEADER_BYTES = 200  # of one tensor in a file and in the manifest, roughly


@dataclass(frozen=True, slots=True)
class RankShards:
    """Sizes of the shards that one rank will write."""

    step: int
    parts: Mapping[str, tuple[int, int, bool]]
    """Component -> (number of blocks, their bytes, whether each is a whole tensor)."""
    model: Mapping[str, int] | None
    """Tensors of the model directory that this rank writes, with their bytes; None: the model writer does."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, for `from_json`."""
        model = None if self.model is None else dict(self.model)
        return {"step": self.step, "parts": {name: list(part) for name, part in self.parts.items()}, "model": model}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankShards:
        """Restore from the JSON form of `to_json`."""
        parts = {name: (part[0], part[1], part[2]) for name, part in value["parts"].items()}
        return cls(value["step"], parts, value["model"])


def announce(
    step: int, shards: Mapping[str, Sequence[Shard]], model_tensors: Mapping[str, Tensor] | None
) -> RankShards:
    """Return the sizes of the shards that this rank will write."""
    parts = {
        name: (len(blocks), _num_bytes(block.data for block in blocks), all(block.is_whole for block in blocks))
        for name, blocks in shards.items()
    }
    for name, blocks in shards.items():
        keys = [key_of(block) for block in blocks]
        assert len(set(keys)) == len(keys), f"component {name} has a block twice"
    model = None if model_tensors is None else {name: num_tensor_bytes(value) for name, value in model_tensors.items()}
    return RankShards(step, parts, model)


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a checkpoint, the same on every rank."""

    announced: tuple[RankShards, ...]

    @property
    def components(self) -> set[str]:
        """Names of the tensor components of all ranks."""
        return {name for each in self.announced for name in each.parts}

    def is_sharded(self, component: str) -> bool:
        """Return whether a component has one file per rank; one that a single rank gives whole is one file."""
        parts = [each.parts[component] for each in self.announced if each.parts.get(component, (0,))[0]]
        return len(parts) > 1 or any(not is_whole for _, _, is_whole in parts)

    def state_file(self, component: str, rank: int) -> str | None:
        """The file that a rank writes for a component, None where it has nothing to write."""
        has_blocks = [rank for rank, each in enumerate(self.announced) if each.parts.get(component, (0,))[0]]
        if self.is_sharded(component):
            return rank_file(component, rank, len(self.announced)) if rank in has_blocks else None
        # a component without blocks is a file too, from rank 0: every listed component has one
        return f"{STATE}/{component}.safetensors" if rank == (has_blocks or [0])[0] else None

    @property
    def num_tensor_bytes(self) -> int:
        """Bytes of all components' tensors over all ranks, with what describes them."""
        parts = [part for each in self.announced for part in each.parts.values()]
        return sum(num_bytes + _HEADER_BYTES * count for count, num_bytes, _ in parts)

    @property
    def num_model_bytes(self) -> int | None:
        """Bytes of the model's weights, None where the model writer writes them."""
        models = [each.model for each in self.announced if each.model is not None]
        return sum(sum(model.values()) for model in models) if models else None

    def model_file(self, rank: int) -> str | None:
        """ "model-00001-of-00002.safetensors" for the first of the two ranks that write weights."""
        writers = [rank for rank, each in enumerate(self.announced) if each.model]
        if rank not in writers:
            return None
        return f"model-{writers.index(rank) + 1:05d}-of-{len(writers):05d}.safetensors"

    def model_index(self) -> dict[str, Any] | None:
        """The content of model.safetensors.index.json; None where the model writer writes the weights."""
        if self.num_model_bytes is None:
            return None
        names = {name: self.model_file(rank) for rank, each in enumerate(self.announced) for name in each.model or ()}
        return {"metadata": {"total_size": self.num_model_bytes}, "weight_map": dict(sorted(names.items()))}


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(num_tensor_bytes(tensor) for tensor in tensors)
