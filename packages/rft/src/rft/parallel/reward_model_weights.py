"""Weights of a distributed reward model, as checkpoints save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from rft.checkpoints.parts import CheckpointParts, FullWeights
from rft.parallel.parallelize import ParallelModel
from rft.parallel.policy_weights import full_sizes
from rft.parallel.shardable import WrappedRewardModel
from rft_dist.checkpoint_format.shards import assign_by_bytes
from rft_dist.collectives import Collectives
from rft_dist.strategies.protocols import ModelWeights
from rft_models.reward_model.model import RewardModel


def reward_checkpoint_parts(parallel: ParallelModel[WrappedRewardModel], ranks: Collectives) -> CheckpointParts:
    """Return the model's part of a checkpoint: written by all ranks together where each keeps a part of its state."""
    model = parallel.model.reward_model
    if parallel.shards_weights or parallel.collective_forward:
        return ShardedRewardWeights(model, parallel.module, parallel.weights, ranks)
    return FullWeights(model)


@dataclass(frozen=True, slots=True)
class ShardedRewardWeights:
    """The weights of a reward model that all ranks save together (`CheckpointParts`)."""

    model: RewardModel
    module: nn.Module
    """Decoder and heads as the strategy sees them."""
    weights: ModelWeights
    ranks: Collectives

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank keeps."""
        yield from self.weights.local_shards()

    def local_weights(self) -> Mapping[str, Tensor]:
        """Return the full weights that this rank writes, about as many bytes on every rank; all ranks call it."""
        # the same on every rank without an exchange, because names and sizes are
        owners = assign_by_bytes(full_sizes(self.model.named_parameters()), self.ranks.world_size)
        saved_names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        names = {name: saved_names[id(parameter)] for name, parameter in self.module.named_parameters()}
        full: dict[str, Tensor] = {}
        for name, tensor in self.weights.full_tensors():
            # DeepSpeed names parameters as the module does, FSDP2 as the files do
            saved = name if name in owners else names[name]
            # every rank must draw the iterator to its end, as each tensor is gathered by all
            if owners[saved] == self.ranks.rank:
                # a copy, because training goes on while a thread writes it
                full[saved] = tensor.detach().clone()
        return full

    def directory_writer(self) -> Callable[[Path], None]:
        """Return the function that writes configuration and tokenizer."""
        return self.model.save_description

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """Return `directory_writer()`: nothing that it writes changes."""
        del copy
        return self.directory_writer()
