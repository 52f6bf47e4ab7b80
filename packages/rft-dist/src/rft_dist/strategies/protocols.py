"""Interface of a strategy: the model and the context that it takes, the distributed model that it hands out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rft_dist.checkpoint_format.shards import Shard
from rft_dist.collectives import Collectives
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.optim.muon import hidden_matrices
from rft_dist.optim.parameter_groups import ParameterGroups, groups_of_model
from rft_dist.settings import AdamSettings, SequenceMode, StrategySettings

if TYPE_CHECKING:
    from rft_dist.strategies.optimizer import AdamWOptions, StrategyOptimizer
    from rft_dist.strategies.process_groups import ExpertGroup, TensorGroup
    from rft_dist.strategies.sequence_parallel import SequenceGroup

ReadBlock = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Name, index of the first element, shape -> that block of a full tensor."""


class ComputeWrapper(Protocol):
    """Runs a function that uses the model's weights, with the exchanges that make them available."""

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any: ...


class TensorPlan(Protocol):
    """Tensor-parallel plan: which layers are cut, by their names in the model."""

    @property
    def by_outputs(self) -> Sequence[str]:
        """Linear layers of which each rank computes a part of the outputs."""
        ...

    @property
    def by_inputs(self) -> Sequence[str]:
        """Linear layers that take such parts; their outputs are summed."""
        ...

    @property
    def of_heads(self) -> Sequence[str]:
        """Parameters that are whole on every rank and see its heads alone."""
        ...

    @property
    def vocabulary(self) -> Sequence[str]:
        """The embedding, and the output layer where that is another matrix; none: they stay whole."""
        ...


class ShardableModel(Protocol):
    """A model that strategies distribute over ranks, in place."""

    @property
    def module(self) -> nn.Module:
        """The module that has every parameter of the model."""
        ...

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Modules that are gathered one at a time, in the order of the forward; the rest is one group."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The decoder's layers, without a head that `layers` may have beside them."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters, by their names in checkpoints."""
        ...

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that an optimizer steps on."""
        ...

    def release_trained_rows(self) -> Mapping[str, int]:
        """Train whole matrices in place of single rows; return the first row that is to be trained of each, by name.

        Called before the weights are sharded: from here on `trainable_parameters` yields these matrices, and the
        optimizer leaves the rows before as they are.
        """
        ...

    def cross_module_reads(self) -> Iterable[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """Yield modules inside the layers that read parameters of other modules, with those parameters."""
        ...

    def wrap_forward(self, wrapper: ComputeWrapper) -> None:
        """Run every forward of the model inside `wrapper`, the same number of times on all ranks."""
        ...

    def load_pending(
        self, load_shards: Callable[[ReadBlock], None], device: torch.device, compute_dtype: torch.dtype | None
    ) -> None:
        """Give memory and values to parameters that have none yet; nothing where all have them.

        `load_shards` fills this rank's shards from a reader of blocks; the forward computes on `device` in
        `compute_dtype`, None = in the type of the weights.
        """
        ...

    def enable_sequence_parallel(self, group: SequenceGroup, mode: SequenceMode) -> None:
        """Compute every sequence together with the ranks of the group."""
        ...

    def enable_tensor_parallel(self, group: TensorGroup, shard: Callable[[TensorPlan], None]) -> TensorPlan:
        """Compute every matrix together with the ranks of the group; `shard` cuts the module's matrices by the plan."""
        ...

    def enable_expert_parallel(self, group: ExpertGroup, divide: Callable[[Sequence[str]], None]) -> None:
        """Run every expert on the rank of the group that holds it.

        `divide` leaves this rank its share of the named parameters of the module, whose first dimension counts experts.
        """
        ...


class DataRanks(Protocol):
    """The ranks as batches are divided among them: a group that computes a sample together is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def sum(self, tensor: Tensor) -> Tensor: ...
    def max(self, tensor: Tensor) -> Tensor: ...
    def gather_bytes(self, data: bytes) -> list[bytes]: ...


class ModelWeights(Protocol):
    """The weights of a distributed model, in full and as this rank keeps them."""

    def full_tensors(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full parameter), one in memory at a time; an exchange of all ranks where weights are sharded.

        `trained`: those that require a gradient alone.
        """
        ...

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, what this rank keeps of the parameter), without an exchange."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """Return what this rank keeps, by name."""
        ...

    def checkpoint_tensors(self) -> list[Shard]:
        """Return the shards that this rank saves; with those of all ranks every parameter is covered exactly once."""
        ...

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole parameter that requires a gradient, by name; the same on every rank."""
        ...

    def own_blocks(self, names: Collection[str]) -> list[Shard]:
        """Return blocks of these parameters, sharing memory; with those of all ranks each is covered exactly once."""
        ...

    def blocks(self) -> list[Shard]:
        """Return all that this rank keeps, with its places and sharing its memory, also what other ranks keep too."""
        ...

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Replace one of the blocks, of any device and floating-point type, also in copies that are stepped on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyContext:
    """The settings, the ranks and the device that a model is distributed with."""

    settings: StrategySettings
    collectives: Collectives
    device: torch.device
    adam: AdamSettings | None
    """The weight update; None = the weights are not trained."""

    def parameter_groups(self, model: ShardableModel) -> ParameterGroups:
        """Return the rates and decays of a model's parameters by name."""
        assert self.adam is not None, "these weights are not trained"
        groups = groups_of_model(self.adam, model.module, model.named_parameters())
        if self.adam.optimizer == "adamw":
            return groups
        return replace(groups, matrices=hidden_matrices(model.blocks, model.trainable_parameters()))

    def adamw_options(
        self, model: ShardableModel, *, master: bool = False, first_rows: Mapping[str, int] | None = None
    ) -> AdamWOptions:
        """Return the options of an optimizer that steps on this rank's tensors.

        `master` as of `LocalAdamW`; `first_rows` as of `AdamWOptions`, None = all rows are trained.
        """
        assert self.adam is not None, "these weights are not trained"
        return {
            "betas": self.adam.adam_betas,
            "epsilon": self.adam.adam_epsilon,
            "weight_decay": self.adam.l2,
            "groups": self.parameter_groups(model),
            "max_norm": self.adam.max_norm,
            "ema_decay": self.settings.ema_decay if self.settings.enable_ema else None,
            "master": master,
            "offload": self.settings.adam_offload,
            "host_weights": self.settings.fsdp_cpu_offload,
            "scaler": LossScaler() if _is_float16(self.settings) else None,
            "first_rows": first_rows or {},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedModel:
    """A model on the ranks: where its weights are, and what trains it."""

    data: DataRanks
    weights: ModelWeights
    optimizer: StrategyOptimizer | None
    """None = the weights are not trained."""


def _is_float16(settings: StrategySettings) -> bool:
    return settings.fp16 or (settings.amp and settings.amp_dtype == "fp16")


def narrow_dtype(settings: StrategySettings) -> torch.dtype | None:
    """Return the type of the forward beside float32 weights to step on; None = the weights' own type for both."""
    if settings.fp16:
        return torch.float16
    return torch.bfloat16 if settings.use_mp_opt else None
