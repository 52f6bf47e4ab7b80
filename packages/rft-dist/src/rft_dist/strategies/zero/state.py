"""ZeRO's weights and moments as named tensors, block by block: exact with as many ranks, and from any other strategy.

Names are those of `LocalAdamW`: "exp_avg/<name>", "exp_avg_sq/<name>", "step/<name>", "master/<name>" where a
float32 copy is stepped on, "ema/<name>" where an average is kept; weights go by their own names. A loss scale of
float16 is "loss_scale".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import CheckpointError
from rft_dist.checkpoint_format.shards import (
    Shard,
    ShardRequest,
    assign_by_bytes,
    flat_offset,
    flat_requests,
    flat_shards,
    full_shard,
)
from rft_dist.collectives import Collectives
from rft_dist.optim import ema
from rft_dist.optim.adamw import compare_states, other_state, rows_name
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.strategies.zero.flat_ranges import flat_states, own_weights, rows_of, shape_of, stepped_parts

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = "loss_scale"
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
Read = Callable[[str], Tensor | None]
"""The whole tensor of a name, or None where there is none."""


class ZeroWeights:
    """The weights of a model under ZeRO, saved and loaded in blocks (`ShardSink`)."""

    def __init__(self, model: nn.Module, optimizer: Any, collectives: Collectives) -> None:
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._rank = collectives.rank
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._parts = {part.name: part for part in stepped_parts(optimizer, trained, self._rank)}
        # frozen weights that every rank has whole: one rank saves each of them
        sizes = {n: p.numel() for n, p in self._parameters.items() if not (hasattr(p, "ds_tensor") or p.requires_grad)}
        self._owners = assign_by_bytes(sizes, collectives.world_size)

    def num_local(self) -> int:
        """Elements of weights that this rank keeps between two computations."""
        return sum(own_weights(parameter, self._rank)[1].numel() for parameter in self._parameters.values())

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole weight that is trained, by name."""
        return {name: shape_of(each) for name, each in self._parameters.items() if each.requires_grad}

    def shards(self, names: Collection[str] | None = None) -> list[Shard]:
        """This rank's blocks; of weights that every rank has, those that it steps on, and a share of the frozen.

        `names`: of these weights alone; None = of all.
        """
        blocks: list[Shard] = []
        chosen = self._parameters if names is None else {name: self._parameters[name] for name in names}
        for name, parameter in chosen.items():
            offset, flat = own_weights(parameter, self._rank)
            if not hasattr(parameter, "ds_tensor") and parameter.requires_grad:
                part = self._parts.get(name)
                offset, flat = (part.offset, flat[part.offset : part.offset + part.numel]) if part else (0, flat[:0])
            elif self._owners.get(name, self._rank) != self._rank:
                continue
            if flat.numel():
                blocks += flat_shards(name, shape_of(parameter), offset, flat)
        return blocks

    def blocks(self) -> list[Shard]:
        """Return the weights of this rank, sharing memory: a range of each at stage 3, else all of them."""
        blocks: list[Shard] = []
        for name, parameter in self._parameters.items():
            offset, flat = own_weights(parameter, self._rank)
            blocks += flat_shards(name, shape_of(parameter), offset, flat) if flat.numel() else []
        return blocks

    def shard_requests(self) -> list[ShardRequest]:
        """Return requests for the weights of this rank: a range of each at stage 3, else all of them."""
        blocks: list[ShardRequest] = []
        for name, parameter in self._parameters.items():
            offset, flat = own_weights(parameter, self._rank)
            blocks += flat_requests(name, shape_of(parameter), parameter.dtype, offset, flat.numel())
        return blocks

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Take a block, also into the float32 copy that is stepped on."""
        parameter = self._parameters[name]
        offset, flat = own_weights(parameter, self._rank)
        begin = flat_offset(shape_of(parameter), start)
        _copy_overlap(tensor.reshape(-1), begin, flat, offset)
        # without this the next step would round the old float32 copy back over the new weights
        if name in self._parts:
            part = self._parts[name]
            _copy_overlap(tensor.reshape(-1), begin, part.of(part.flat), part.offset)
        _forget_gathered(parameter)

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take all weights from whole tensors, of which one is there at a time; of any floating-point type."""
        for name, parameter in self._parameters.items():
            full = read(name)
            assert tuple(full.shape) == shape_of(parameter), f"{name}: {list(full.shape)}"
            self.write(name, (0,) * full.ndim, full)


class ZeroState:
    """The moments, step counts and float32 copies of a model under ZeRO (`ShardSink`)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        collectives: Collectives,
        *,
        ema_decay: float | None = None,
        first_rows: Mapping[str, int] | None = None,
    ) -> None:
        """Set up the state, and averages where asked for.

        Args:
            model, optimizer, collectives: of `ZeroModel`.
            ema_decay: keep a moving average of what is stepped on, beside the moments; None = none.
            first_rows: as of `AdamWOptions`; the moments of the rows before are 0 and no part of the state.
        """
        self._optimizer = optimizer
        self._rank = collectives.rank
        self._ema_decay = ema_decay
        self._kinds = _MOMENTS if ema_decay is None else (*_MOMENTS, ema.KIND)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        first = first_rows or {}
        parts = stepped_parts(optimizer, trained, self._rank)
        cut = (rows_of(part, first[part.name]) if part.name in first else part for part in parts)
        self._parts = {part.name: part for part in cut if part is not None}
        self._shapes = {rows_name(n, first.get(n)): _less_rows(shape_of(p), first.get(n)) for n, p in trained.items()}
        self._has_master = next(iter(trained.values())).dtype != torch.float32
        self._scaler = optimizer.loss_scaler if next(iter(trained.values())).dtype == torch.float16 else None
        self._steps: dict[bool, tuple[str, float]] = {}
        if ema_decay is not None:
            # beside the moments and in their layout, so that the same ranges serve all of them
            for flat, state in flat_states(optimizer):
                state[ema.KIND] = ema.init(flat)

    def decay(self, groups: ParameterGroups, l2: float) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        """Return a hook before AdamW's step: w <- (1 - rate_p decay_p) w, of all that belongs to the state."""

        def decay(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
            del arguments, keywords
            # DeepSpeed steps on its flat tensors one after another: those of this call are in the groups
            rates = {id(flat): group["lr"] for group in optimizer.param_groups for flat in group["params"]}
            for part in self._parts.values():
                if id(part.flat) in rates:
                    decay = l2 * groups.decay_factor(part.name, len(part.shape))
                    part.of(part.flat).mul_(1 - rates[id(part.flat)] * decay)

        return decay

    def average(self) -> None:
        """Move the averages, after a step that was applied; nothing where there are none."""
        if self._ema_decay is not None:
            for flat, state in flat_states(self._optimizer):
                ema.update(state[ema.KIND], flat, self._ema_decay)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's ranges, flat, under the names of what they are ranges of; live, not copies."""
        # by identity: `==` compares the elements of tensors
        states = {id(flat): state for flat, state in flat_states(self._optimizer)}
        tensors: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            state = states[id(part.flat)]
            tensors |= {f"{kind}/{name}": part.of(state[kind]) for kind in self._kinds}
            tensors[f"step/{name}"] = state["step"].detach()
            if self._has_master:
                tensors[f"master/{name}"] = part.of(part.flat)
        if self._scaler is not None:
            values = [float(getattr(self._scaler, field)) for field in _SCALER_FIELDS]
            tensors[_SCALER] = torch.tensor(values, dtype=torch.float64)
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave on this rank, bit for bit.

        Raises:
            CheckpointError: missing or unexpected names, another shape or another dtype; nothing has changed then.
        """
        current = self.tensors()
        compare_states(current, tensors)
        for name, tensor in current.items():
            if name == _SCALER:
                self._set_scaler(tensors[name])
            else:
                tensor.copy_(tensors[name])

    def shards(self) -> list[Shard]:
        """This rank's blocks; the count of steps of a parameter comes from the rank of its first element."""
        blocks: list[Shard] = []
        for name, tensor in self.tensors().items():
            kind, _, parameter = name.partition("/")
            if kind == _SCALER:
                blocks += [full_shard(name, tensor)] if self._rank == 0 else []
                continue
            part = self._parts[parameter]
            if kind != "step":
                blocks += flat_shards(name, part.shape, part.offset, tensor)
            elif part.offset == 0:
                blocks.append(full_shard(name, tensor))
        return blocks

    def shard_requests(self) -> list[ShardRequest]:
        """The blocks of the ranges that this rank steps on, and all counts of steps."""
        self._steps = {}
        return list(self._requests())

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Copy one block of the state into the range that this rank holds.

        Raises:
            CheckpointError: parameters that are stepped together have taken different numbers of steps.
        """
        kind, _, parameter = name.partition("/")
        if kind == _SCALER:
            self._set_scaler(tensor)
            return
        if kind == "step":
            self._compare_steps(parameter, float(tensor))
        if parameter not in self._parts:
            return
        part = self._parts[parameter]
        state = next(state for flat, state in flat_states(self._optimizer) if flat is part.flat)
        if kind == "step":
            state["step"].copy_(tensor)
            return
        target = part.of(part.flat if kind == "master" else state[kind])
        _copy_overlap(tensor.reshape(-1), flat_offset(part.shape, start), target, part.offset)

    def load(self, read: Read) -> None:
        """Take the state from whole tensors of any strategy, of which one is there at a time.

        Where it has no float32 copies, those stay what the weights that were loaded before have made them.

        Raises:
            CheckpointError: a moment or a count is missing, or of another shape.
        """
        self._steps = {}
        names = {f"{kind}/{n}": shape for n, shape in self._shapes.items() for kind in (*self._kinds, "step", "master")}
        for name, full_shape in names.items():
            kind = name.partition("/")[0]
            if kind == "master" and not self._has_master:
                continue
            tensor = read(name)
            if tensor is None and kind == "master":
                continue
            shape = () if kind == "step" else full_shape
            if tensor is None or tuple(tensor.shape) != shape:
                raise _not_found(name, shape, tensor)
            self.write(name, (0,) * tensor.ndim, tensor)
        if self._scaler is not None and (tensor := read(_SCALER)) is not None:
            self._set_scaler(tensor)

    def _requests(self) -> Iterator[ShardRequest]:
        kinds = (*self._kinds, "master") if self._has_master else self._kinds
        for name, part in self._parts.items():
            for kind in kinds:
                yield from flat_requests(f"{kind}/{name}", part.shape, torch.float32, part.offset, part.numel)
        for name in self._shapes:  # also those of which this rank holds nothing
            yield ShardRequest(f"step/{name}", (), torch.float32, (), ())
        if self._scaler is not None:
            yield ShardRequest(_SCALER, (len(_SCALER_FIELDS),), torch.float64, (0,), (len(_SCALER_FIELDS),))

    def _compare_steps(self, name: str, step: float) -> None:
        """Every rank compares all counts, so that all of them refuse or none."""
        first, known = self._steps.setdefault(len(self._shapes[name]) >= 2, (name, step))
        if known != step:
            raise CheckpointError(
                code="zero.steps_differ",
                what=f"{first} has taken {known:g} steps, {name} {step:g}",
                where="the optimizer state that is loaded",
                why="DeepSpeed updates many parameters as one tensor with one step count",
                state="the optimizer state is only partly loaded and must not be used for training",
                do="resume with the strategy of the run that saved it (--zero_stage 0)",
            )

    def _set_scaler(self, values: Tensor) -> None:
        scaler: Any = self._scaler
        for field, value in zip(_SCALER_FIELDS, values.tolist(), strict=True):
            setattr(scaler, field, value if field == "cur_scale" else int(value))


def _less_rows(shape: tuple[int, ...], first: int | None) -> tuple[int, ...]:
    return shape if first is None else (shape[0] - first, *shape[1:])


def _copy_overlap(source: Tensor, source_offset: int, target: Tensor, target_offset: int) -> None:
    """Copy what two ranges of one flattened tensor have in common."""
    begin = max(source_offset, target_offset)
    size = min(source_offset + source.numel(), target_offset + target.numel()) - begin
    if size > 0:
        target.narrow(0, begin - target_offset, size).copy_(source.narrow(0, begin - source_offset, size))


def _forget_gathered(parameter: nn.Parameter) -> None:
    """Drop the gathered copy of a partitioned parameter, so that its next use gathers it anew."""
    partitioned: Any = parameter
    if hasattr(parameter, "ds_tensor"):
        partitioned.partition()
        partitioned.ds_secondary_tensor = None


def _not_found(name: str, shape: tuple[int, ...], tensor: Tensor | None) -> CheckpointError:
    return other_state(
        f"{name} {list(shape)} is needed, found {'nothing' if tensor is None else list(tensor.shape)}",
        where="the optimizer state that is loaded",
        state="the optimizer state is only partly loaded and must not be used for training",
    )
