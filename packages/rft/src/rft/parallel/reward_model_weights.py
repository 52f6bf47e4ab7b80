"""Weights of a distributed reward model, as checkpoints save them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from rft.checkpoints.parts import CheckpointParts, FullWeights
from rft.parallel.parallelize import ParallelModel
from rft.parallel.policy_weights import full_sizes
from rft.parallel.shardable import WrappedRewardModel
from rft_dist.checkpoint_format.shards import assign_by_bytes
from rft_dist.collectives import Collectives
from rft_dist.strategies.protocols import ModelWeights
from rft_models.lora import files as adapter_files
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
    adapters: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The adapters of the last save by themselves, under their names of files."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank keeps."""
        yield from self.weights.local_shards()

    def local_weights(self) -> Mapping[str, Tensor]:
        """Return the full weights that this rank writes, about as many bytes on every rank; all ranks call it."""
        # the same on every rank without an exchange, because names and sizes are
        owners = assign_by_bytes(full_sizes(self.model.saved_parameters()), self.ranks.world_size)
        head = {name for name, _ in self.model.head_parameters()}
        self.adapters.clear()  # of the last save
        full: dict[str, Tensor] = {}
        for name, tensor in self.model.merged_parameters(self._full_tensors(head)):
            saved = name if name in head else self.model.saved_name(name)
            # every rank must draw the iterator to its end, as each tensor is gathered by all
            if owners[saved] == self.ranks.rank:
                # a copy, because training goes on while a thread writes it
                full[saved] = tensor.detach().clone()
        return full

    def _full_tensors(self, head: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor: of the decoder as it names them, of the head as files do; keep those of adapters."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        of_module = {name: names[id(parameter)] for name, parameter in self.module.named_parameters()}
        of_decoder = {self.model.saved_name(name): name for name, _ in self.model.model.named_parameters()}
        adapters = self.model.adapters
        for given, tensor in self.weights.full_tensors():
            # DeepSpeed names parameters as the module does, FSDP2 as the files do
            saved = given if given in of_decoder or given in head else of_module[given]
            name = of_decoder.get(saved, saved)
            if adapters is not None:
                self.adapters.update({n: part.clone() for n, part in adapters.tensors([(name, tensor)]).items()})
            yield name, tensor

    def directory_writer(self) -> Callable[[Path], None]:
        """Return the function that writes configuration, tokenizer, and the adapters as `local_weights` kept them."""
        # a copy of the dict: the next save clears it, perhaps while this one is still being written
        kept = dict(self.adapters)

        def write(directory: Path) -> None:
            self.model.save_description(directory)
            if self.model.adapters is not None:
                adapter_files.save(self.model.adapters, Path(directory) / adapter_files.FOLDER, kept)

        return write

    def snapshot(self, copy: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
        """Return `directory_writer()`: what it writes is a copy already."""
        del copy
        return self.directory_writer()
