"""Holders of the memory at the moment at which it runs out: owners, largest tensors, and torch's own account of it.

    weights          parameters and buffers of every module of the process
    gradients        of these parameters
    optimizer        what the optimizer refers to beside them: moments, copies, sums
    activations      on a GPU all else that is allocated: what backward passes need, and whatever tensors code keeps
    other tensors    on a CPU those that Python refers to; what backward passes keep is not seen from there
    unused           on a GPU reserved and not allocated: holes between the others

No tensor is made and nothing is copied: there is no memory left for it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

_MIB = 2**20
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = (
    re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)"),
    re.compile(r"you tried to allocate (\d+) (bytes)"),
)
"""What the allocators of CUDA and of the CPU say."""
_LEAVES = (nn.Module, str, bytes, int, float, type, FunctionType, MethodType, BuiltinFunctionType)
"""In which no state of an optimizer is looked for."""
_LARGEST = 20
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that takes much memory."""

    owner: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device at the moment of the error; None where the device does not say."""

    device: str
    asked: int | None
    """That the allocation asked for."""
    owners: Mapping[str, int]
    """The largest first."""
    largest: Sequence[LiveTensor]
    free: int | None = None
    total: int | None = None
    reserved: int | None = None
    """By torch, allocated or not."""
    segments: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Torch's account of a GPU: segments and the blocks in them, with the lines that made them where these are kept."""

    def __str__(self) -> str:
        """Say what was asked for and who holds how much, in MiB."""
        parts = [f"asked for {_mib(self.asked)}"] if self.asked is not None else []
        parts += [f"{_mib(self.free)} of {_mib(self.total or 0)} are free"] if self.free is not None else []
        holders = ", ".join(f"{owner} {_mib(size)}" for owner, size in self.owners.items() if size)
        return "; ".join([*parts, f"held: {holders}"] if holders else parts)

    def as_record(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


def memory_use(error: BaseException, optimizer: object, device: str) -> MemoryUse:
    """Return what holds the memory of a device; called while the error still holds what the forward made.

    Args:
        error: of the allocation that failed.
        optimizer: of the model that is trained.
        device: where memory ran out: cpu, or cuda with or without a number.
    """
    kind = torch.device(device).type
    owners, largest = _owned(optimizer, kind)
    asked = _asked(str(error))
    if kind != "cuda":
        return MemoryUse(device, asked, _ordered(owners), largest)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    # what a backward pass keeps is held by torch itself, where Python does not see it
    owners["activations"] = max(allocated - sum(size for name, size in owners.items() if name != "other tensors"), 0)
    owners.pop("other tensors", None)
    owners["unused"] = reserved - allocated
    return MemoryUse(device, asked, _ordered(owners), largest, free, total, reserved, _segments())


def _asked(text: str) -> int | None:
    for pattern in _ASKED:
        if found := pattern.search(text):
            return int(float(found[1]) * _UNITS[found[2]])
    return None


def _ordered(owners: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(owners.items(), key=lambda item: -item[1]))


def _mib(size: int | None) -> str:
    return f"{(size or 0) / _MIB:,.1f} MiB"


def _owned(optimizer: object, kind: str) -> tuple[dict[str, int], list[LiveTensor]]:
    """Return the bytes of each owner, every storage once, and the largest tensors."""
    modules, tensors = _alive()
    seen: set[int] = set()
    owners: dict[str, int] = {}
    found: list[LiveTensor] = []

    def take(owner: str, many: Iterator[Tensor] | Sequence[Tensor]) -> None:
        for tensor in many:
            local = getattr(tensor, "_local_tensor", tensor)  # of a tensor that ranks share
            if local.device.type != kind or (place := _storage(local)) is None or place[0] in seen:
                continue
            seen.add(place[0])
            owners[owner] = owners.get(owner, 0) + place[1]
            found.append(LiveTensor(owner, tuple(local.shape), str(local.dtype).removeprefix("torch."), place[1]))

    weights = [tensor for module in modules for tensor in _of_module(module)]
    take("weights", weights)
    take("gradients", [grad for tensor in weights if (grad := _gradient(tensor)) is not None])
    take("optimizer", _reachable(optimizer))
    take("other tensors", tensors)
    found.sort(key=lambda tensor: -tensor.num_bytes)
    return owners, found[:_LARGEST]


def _alive() -> tuple[list[nn.Module], list[Tensor]]:
    """Return the modules and tensors of the process that Python knows."""
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    for each in gc.get_objects():
        # the type itself: an object that stands for another one may answer `isinstance` by loading it
        kind = type(each)
        if issubclass(kind, nn.Module):
            modules.append(each)
        elif issubclass(kind, Tensor):
            tensors.append(each)
    return modules, tensors


def _of_module(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself; one that is being made has none yet."""
    own = module.__dict__
    tensors = [*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values()]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _storage(tensor: Tensor) -> tuple[int, int] | None:
    """Return where the storage of a tensor lies and its bytes; None of one that has none."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        return None


def _reachable(owner: object) -> list[Tensor]:
    """Return the tensors to which an object refers, through fields, records, mappings and sequences."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST:
            return
        seen.add(id(value))
        if issubclass(type(value), Tensor):
            found.append(cast("Tensor", value))
            return
        if isinstance(value, _LEAVES):
            return
        for inner in _inside(value):
            walk(inner, depth + 1)

    walk(owner, 0)
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots if hasattr(value, name))]


def _segments() -> list[Mapping[str, Any]]:
    """Return the segments of the GPU's allocator as plain JSON: torch's own form of it is a pickle."""
    return [
        {
            "address": segment["address"],
            "total_size": segment["total_size"],
            "allocated_size": segment["allocated_size"],
            "stream": segment["stream"],
            "segment_type": segment["segment_type"],
            "blocks": [
                {
                    "size": block["size"],
                    "requested_size": block.get("requested_size"),
                    "state": block["state"],
                    "frames": [f"{frame['filename']}:{frame['line']} ({frame['name']})" for frame in _frames(block)],
                }
                for block in segment["blocks"]
            ],
        }
        for segment in torch.cuda.memory._snapshot()["segments"]
    ]


def _frames(block: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return block.get("frames") or ()
