"""Weights of a distributed policy, as engines load them and as checkpoints save them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rft.checkpoints.parts import CheckpointParts, FullWeights
from rft.parallel.parallelize import ParallelModel
from rft_dist.checkpoint_format.shards import assign_by_bytes
from rft_dist.collectives import Collectives
from rft_dist.strategies.protocols import ModelWeights
from rft_models.files.checkpoint_names import saved_buffers, to_checkpoint_names
from rft_models.lora import files as adapter_files
from rft_models.policy.causal_policy import CausalPolicy

FullTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields (name, full tensor) one after another; an exchange of all ranks."""


def engine_weights(parallel: ParallelModel[CausalPolicy]) -> FullTensors | None:
    """Return where an engine gets full weights, adapters merged; None = the parameters are full and may be shared."""
    if not parallel.shards_weights:
        return None
    return lambda: parallel.model.merged_parameters(parallel.weights.full_tensors())


def engine_adapters(parallel: ParallelModel[CausalPolicy]) -> FullTensors | None:
    """Return where an engine gets the adapters by themselves; None = they are full, or there are none."""
    if not parallel.shards_weights or parallel.model.adapters is None:
        return None
    return partial(parallel.weights.full_tensors, trained=True)


def fused_policy(parallel: ParallelModel[CausalPolicy]) -> CausalPolicy | None:
    """Return the policy where its head may make gradients in the forward pass: float16 has to be scaled before that."""
    return None if parallel.compute_dtype == torch.float16 else parallel.model


def checkpoint_parts(parallel: ParallelModel[CausalPolicy], ranks: Collectives) -> CheckpointParts:
    """Return the policy's part of a checkpoint: written by all ranks together where each keeps a part of its state."""
    if parallel.shards_weights or parallel.collective_forward:
        return ShardedPolicyWeights(parallel.model, parallel.weights, ranks)
    return FullWeights(parallel.model)


@dataclass(frozen=True, slots=True)
class ShardedPolicyWeights:
    """The weights of a policy that all ranks save together (`CheckpointParts`)."""

    policy: CausalPolicy
    weights: ModelWeights
    ranks: Collectives
    adapters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank keeps."""
        yield from self.weights.local_shards()

    def local_weights(self) -> Mapping[str, Tensor]:
        """Return the full weights that this rank writes, about as many bytes on every rank; all ranks call it."""
        # the same on every rank without an exchange, because names and sizes are
        owners = assign_by_bytes(full_sizes(self.policy.base_parameters()), self.ranks.world_size)
        full: dict[str, Tensor] = {}
        self.adapters.clear()  # of the last save
        for name, tensor in self.policy.merged_parameters(self._keeping_adapters()):
            # every rank must draw the iterator to its end, as each tensor is gathered by all
            if owners[name] == self.ranks.rank:
                # a copy, because training goes on while a thread writes it
                full[name] = tensor.detach().clone()
        if self.ranks.rank == 0:  # whole on every rank, and small
            full |= {name: buffer.detach().clone() for name, buffer in saved_buffers(self.policy.model)}
        return dict(to_checkpoint_names(self.policy.model, full.items)())

    def _keeping_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors; those of adapters are small, and kept for `directory_writer`."""
        adapters = self.policy.adapters
        for name, tensor in self.weights.full_tensors():
            if adapters is not None:
                self.adapters.update({n: part.clone() for n, part in adapters.tensors([(name, tensor)]).items()})
            yield name, tensor

    def directory_writer(self) -> Callable[[Path], None]:
        """Return the function that writes configuration, tokenizer, and the adapters as `local_weights` kept them."""
        # a copy of the dict: the next save clears it, perhaps while this one is still being written
        kept = dict(self.adapters)

        def write(directory: Path) -> None:
            self.policy.save_description(directory)
            if self.policy.adapters is not None:
                adapter_files.save(self.policy.adapters, Path(directory) / adapter_files.FOLDER, kept)

        return write

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """Return `directory_writer()`: what it writes is a copy already."""
        del copy
        return self.directory_writer()


def full_sizes(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Return name -> elements of the full parameter; DeepSpeed keeps an empty tensor in the place of one in parts."""
    return {name: int(getattr(parameter, "ds_numel", parameter.numel())) for name, parameter in named}
