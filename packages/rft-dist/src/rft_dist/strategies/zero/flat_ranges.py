"""Partition of each tensor over the ranks under ZeRO, as ranges of flattened tensors.

DeepSpeed lays the trained parameters of a group (of one rate and decay) one after another in a flat
float32 tensor and gives every rank a range of it (stages 1 and 2), or cuts each parameter into one
range a rank and lays a rank's ranges one after another (stage 3). In both cases a rank holds of each
tensor at most one range of its elements in row-major order, and of its moments the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rft_dist.optim.adamw import fresh_state, rows_name


@dataclass(frozen=True, slots=True)
class Part:
    """Range of one trained parameter that this rank steps on."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: int
    """Where the range begins among the elements of the parameter."""
    numel: int
    flat: Tensor
    """The float32 tensor that the optimizer steps on."""
    start: int
    """Where the range begins in `flat`."""

    def of(self, flat: Tensor) -> Tensor:
        """The range in a tensor of the layout of `flat`; shares its memory."""
        return flat.detach().narrow(0, self.start, self.numel)


def rows_of(part: Part, first: int) -> Part | None:
    """Return the elements of a part in rows from `first` on, as a part of a tensor of these rows; None = none."""
    width = math.prod(part.shape[1:])
    before = max(first * width - part.offset, 0)
    if before >= part.numel:
        return None
    return Part(
        rows_name(part.name, first),
        (part.shape[0] - first, *part.shape[1:]),
        part.offset + before - first * width,
        part.numel - before,
        part.flat,
        part.start + before,
    )


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full parameter, also where it is partitioned (stage 3)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def stepped_parts(optimizer: Any, parameters: Mapping[str, nn.Parameter], rank: int) -> list[Part]:
    """The ranges that this rank steps on, by name; a rank may hold nothing of a parameter."""
    find = _part_of_stage_3 if hasattr(optimizer, "fp32_partitioned_groups_flat") else _part_of_stages_1_2
    parts = (find(optimizer, name, parameter, rank) for name, parameter in parameters.items())
    return [part for part in parts if part is not None and part.numel]


def _part_of_stage_3(optimizer: Any, name: str, parameter: nn.Parameter, rank: int) -> Part | None:
    group, offset_in_flat, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    offset, numel = own_range(parameter, rank)
    return Part(name, shape_of(parameter), offset, numel, optimizer.fp32_partitioned_groups_flat[group], offset_in_flat)


def _part_of_stages_1_2(optimizer: Any, name: str, parameter: nn.Parameter, rank: int) -> Part | None:
    mapping: Any = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    in_flat, in_parameter = mapping.hp_fragment_address, mapping.lp_fragment_address
    (flat,) = optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
    return Part(name, shape_of(parameter), in_parameter.start, in_parameter.numel, flat, in_flat.start)


def own_range(parameter: nn.Parameter, rank: int) -> tuple[int, int]:
    """(first element, number) that this rank holds of a parameter that is spread (stage 3); the last may hold less."""
    partitioned: Any = parameter
    size, total = partitioned.ds_tensor.ds_numel, partitioned.ds_numel
    # DeepSpeed gives every rank equally many elements: what lies beyond `total` is padding
    offset = min(rank * size, total)
    return offset, min(size, total - offset)


def own_weights(parameter: nn.Parameter, rank: int) -> tuple[int, Tensor]:
    """(first element, flat weights) that this rank holds: a range of a spread parameter, else all; shares memory."""
    if hasattr(parameter, "ds_tensor"):
        offset, numel = own_range(parameter, rank)
        partitioned: Any = parameter
        return offset, partitioned.ds_tensor.detach().view(-1).narrow(0, 0, numel)
    return 0, parameter.detach().view(-1)


def flat_states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(tensor that is stepped on, AdamW's state of it); a state is made where there has been no step."""
    partitioned = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    groups = optimizer.optimizer.param_groups
    flats = [group["params"][0] for group in groups] if partitioned is None else partitioned
    for flat in flats:
        state = optimizer.optimizer.state[flat]
        if not state:
            # AdamW itself makes its state in the first step only
            state.update(fresh_state(flat.detach()))
        yield flat, state


def clear_kept_gradients(optimizer: Any) -> None:
    """Zero what DeepSpeed keeps of a step's gradients until the next (0.19.8).

    It writes over the gradients of a parameter when new ones come, and adds to them from the second micro-batch
    on: a parameter that no micro-batch touched, or not the first, would step on those of the step before. With
    offload, stages 1 and 2 also keep the sums of a refused step, after which every step would be refused.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        for buffer in getattr(optimizer, "accumulated_grads_in_cpu", {}).values():
            buffer.zero_()
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)  # stage 3
    if buffer is not None:
        buffer.zero_()
    for flat, _ in flat_states(optimizer):
        if flat.grad is not None:
            flat.grad.zero_()
