"""ZeRO 1, 2 and 3 by DeepSpeed: moments, then gradients, then weights partitioned over the ranks.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
Bytes of a rank for P parameters in bfloat16 over S ranks, float32 master copies and moments:

    stage 1    2 P + 4 P + 12 P / S     (weights, sums of gradients, master copies and moments)
    stage 2    2 P + 16 P / S
    stage 3    18 P / S and the layer that computes

The steps are those of `DataParallelOptimizer`: gradients are sums over ranks and micro-batches of losses
that carry their denominators, clipped by the norm of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_dist.checkpoint_format.shards import Shard, ShardRequest, StoredComponent
from rft_dist.collectives import Collectives
from rft_dist.optim.adamw import StepOutcome, nothing_to_train
from rft_dist.optim.parameter_groups import ParameterGroups, adamw, set_learning_rate
from rft_dist.optim.placement import require_on_host
from rft_dist.strategies.data_parallel import share_sequences
from rft_dist.strategies.ema_swap import swap_in_ema_zero
from rft_dist.strategies.optimizer import restore_shards
from rft_dist.strategies.protocols import DistributedModel, ShardableModel, StrategyContext
from rft_dist.strategies.zero.deepspeed_engine import (
    ZeroOptions,
    engine_config,
    load_deepspeed,
    local_rank,
    start_engine,
    verify_float16,
    verify_options,
)
from rft_dist.strategies.zero.flat_ranges import clear_kept_gradients
from rft_dist.strategies.zero.norm_limit import SeenNorm, refuse_above
from rft_dist.strategies.zero.state import Read, ZeroState, ZeroWeights

SwapInEma = Callable[[], AbstractContextManager[None]]


def parallelize(model: ShardableModel, context: StrategyContext) -> DistributedModel:
    """Partition a model's training state over the ranks by DeepSpeed."""
    assert context.adam is not None, "DeepSpeed partitions weights that are trained"
    first_rows = model.release_trained_rows()
    settings, data = context.settings, share_sequences(model, context)
    zero = ZeroModel(
        model.module,
        model.layers,
        context.collectives,
        device=context.device,
        stage=settings.zero_stage,
        betas=context.adam.adam_betas,
        epsilon=context.adam.adam_epsilon,
        weight_decay=context.adam.l2,
        groups=context.parameter_groups(model),
        max_norm=context.adam.max_norm,
        cpu_offload=settings.adam_offload,
        hpz_size=settings.zpg,
        overlap_comm=settings.overlap_comm,
        ema_decay=settings.ema_decay if settings.enable_ema else None,
        readers=model.cross_module_reads(),
        first_rows=first_rows,
    )
    model.wrap_forward(zero.compute)
    return DistributedModel(data=data, weights=zero, optimizer=zero.optimizer)


class ZeroModel:
    """A module whose training state is partitioned over the ranks by DeepSpeed, in place.

    Example::

        zero = ZeroModel(model, model.layers, ranks, device=torch.device("cpu"), stage=3, betas=(0.9, 0.95),
                         epsilon=1e-8, weight_decay=0.1, max_norm=1.0)
        loss = zero.compute(lambda tokens: model(tokens).sum(), tokens)       # in place of calling it
        zero.optimizer.backward(loss, last=True)
        zero.optimizer.step(learning_rate=1e-5)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        collectives: Collectives,
        *,
        device: torch.device,
        stage: int,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        max_norm: float,
        groups: ParameterGroups | None = None,
        cpu_offload: bool = False,
        hpz_size: int = 1,
        overlap_comm: bool = False,
        persistent_numel: int = 100_000,
        initial_scale_power: int = 16,
        ema_decay: float | None = None,
        readers: Iterable[tuple[nn.Module, Sequence[nn.Parameter]]] = (),
        first_rows: Mapping[str, int] | None = None,
    ) -> None:
        """Partition the training state of `model` over the ranks, in place.

        Args:
            model: float32, or bfloat16 or float16 with float32 copies to step on; the weights of rank 0 are taken.
                Where what is trained is float32, frozen weights may be of another type.
            layers: modules that are gathered one at a time (stage 3); the other weights are, for a whole `compute`.
            collectives: the ranks.
            device: where it computes.
            stage: 1, 2 or 3.
            betas, epsilon, weight_decay, max_norm, groups: as in `DataParallelOptimizer`.
            cpu_offload: master copies and moments in host memory, and AdamW there; on a CPU they are there already.
            hpz_size: neighbouring ranks that keep a second copy of the weights between forward and backward (stage 3).
            overlap_comm: exchange gradients, and gather weights ahead, while it computes; of use on GPUs.
            persistent_numel: weights of at most so many elements stay gathered between their uses (stage 3).
            initial_scale_power: the loss scale of float16 begins at 2 to this power and adapts.
            ema_decay: keep a moving average of the weights that are stepped on; None = none.
            readers: modules inside the layers that read parameters of other modules, which are gathered for them too.
            first_rows: first row that is trained, by name, of matrices whose rows before it keep their bits; these are
                then all that is trained.

        Raises:
            PreflightError: DeepSpeed is not installed.
            OptionsError: nothing to train, or a combination that DeepSpeed cannot do.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise nothing_to_train(sum(1 for _ in model.parameters()))
        options = ZeroOptions(
            stage=stage,
            max_norm=max_norm,
            cpu_offload=cpu_offload,
            hpz_size=hpz_size,
            overlap_comm=overlap_comm,
            persistent_numel=persistent_numel,
            initial_scale_power=initial_scale_power,
        )
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        # refusals come before `start_engine`, after which the model is no longer what it was
        dtype = verify_options(trained, options, collectives.world_size, frozen)
        self._deepspeed = load_deepspeed(device)
        if dtype == torch.float16:
            verify_float16(self._deepspeed)
        root, chosen = _Root(model), groups or ParameterGroups()
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        # DeepSpeed decays whole matrices: where rows of them are trained, `ZeroState.decay` does it instead
        decay = 0.0 if first_rows else weight_decay
        stepping = adamw(named, chosen, betas=betas, epsilon=epsilon, weight_decay=decay)
        # before `start_engine`, whose own hooks take the gradients away
        _mask_gradients(model, first_rows or {})
        config = engine_config(dtype, options, device, sum(parameter.numel() for parameter in trained))
        engine = start_engine(self._deepspeed, root, stepping, config, device)
        self.model = model
        self._engine = engine
        self._is_partitioned = stage == 3
        if self._is_partitioned:
            _gather_with(root, layers, self._deepspeed)
            for module, parameters in readers:
                for parameter in parameters:
                    self._deepspeed.zero.register_external_parameter(module, parameter)
        self.weights = ZeroWeights(model, engine.optimizer, collectives)
        state = ZeroState(model, engine.optimizer, collectives, ema_decay=ema_decay, first_rows=first_rows)
        if first_rows:
            stepping.register_step_pre_hook(state.decay(chosen, weight_decay))
        swap = partial(swap_in_ema_zero, named, self.weights, state, collectives)
        self.optimizer = ZeroOptimizer(engine, state, swap, offload=cpu_offload)

    def compute(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that uses the model, with the weights outside of its layers gathered.

        Every rank must call as often as the others, forward and backward, and use the same parameters. The
        results are a tensor or a tuple; what goes backward is among them.
        """
        with local_rank(self._engine.device):
            return self._engine(function, *arguments, **options)

    def full_tensors(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter) one after another, so that one whole parameter is there at a time.

        Every rank must go through all of them in the same order: each is put together by an exchange (stage 3).
        `trained`: those alone that require a gradient.
        """
        for name, parameter in self.model.named_parameters():
            if trained and not parameter.requires_grad:
                continue
            if not self._is_partitioned:
                yield name, parameter.detach()
                continue
            with local_rank(self._engine.device), self._deepspeed.zero.GatheredParameters([parameter]):
                # a copy: the gathered values are freed when the context ends
                gathered = parameter.detach().clone()
            yield name, gathered

    def local_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, shard) of the weights that this rank steps on or saves, without an exchange."""
        return ((shard.name, shard.data) for shard in self.weights.shards())

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the shards of `local_shards` by name, those of one parameter as one flat tensor."""
        flat: dict[str, list[Tensor]] = {}
        for name, tensor in self.local_shards():
            flat.setdefault(name, []).append(tensor.reshape(-1))
        return {name: torch.cat(tensors) for name, tensors in flat.items()}

    def checkpoint_tensors(self) -> list[Shard]:
        """Return this rank's shards of the weights, see `ZeroWeights.shards`."""
        return self.weights.shards()

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole weight that is trained, by name."""
        return self.weights.trained_shapes()

    def own_blocks(self, names: Collection[str]) -> list[Shard]:
        """Return the blocks of these weights that this rank steps on, sharing memory."""
        return self.weights.shards(names)

    def blocks(self) -> list[Shard]:
        """Return this rank's weights as blocks, see `ZeroWeights.blocks`."""
        return self.weights.blocks()

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Replace one of the blocks, also in the float32 copy that is stepped on."""
        self.weights.write(name, start, tensor)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the model."""
        self._engine.destroy()


class ZeroOptimizer:
    """AdamW over the ranges that DeepSpeed gave this rank; made by `ZeroModel`."""

    def __init__(self, engine: Any, state: ZeroState, swap_in_ema: SwapInEma, *, offload: bool = False) -> None:
        self.state = state
        self._is_checked = not offload
        self.swap_in_ema = swap_in_ema
        """Replaces the trained weights by their moving averages while its context is open; all ranks enter it."""
        self._engine = engine
        self._begun = False

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Add the gradients of one micro-batch, summed over the ranks; every rank must call it as often.

        Stages 2 and 3 exchange them at once, also before the `last`: what is kept between two of them is a part.
        Stage 1 exchanges once a step.
        """
        self._begun = True
        # times the number of ranks: DeepSpeed takes the mean over them, and a loss carries its global denominator
        with local_rank(self._engine.device):
            self._engine.backward(loss * self._engine.world_size, scale_wrt_gas=False)

    def own_norm(self) -> float | None:
        """Return None: DeepSpeed sums the gradients of all ranks."""
        return None

    def discard(self) -> None:
        """Drop the gradients since the last step; every rank must have called `backward` as often as the others."""
        if not self._begun:
            return
        self._begun = False
        optimizer = self._engine.optimizer
        # what is still in its buckets is exchanged first: they must be empty when the next step begins
        with local_rank(self._engine.device):
            optimizer.set_gradient_accumulation_boundary(True)
            buckets = getattr(optimizer, "ipg_buckets", None)  # of stages 1 and 2, gone from memory once exchanged
            waiting = buckets is None or any(bucket.elements for bucket in buckets.values())
            if self._engine.zero_optimization_partition_gradients() and waiting:
                optimizer.overlapping_partition_gradients_reduce_epilogue()
            optimizer.zero_grad()
        # stages 1 and 2 add the next backward to these, which only a step would have dropped
        kept = getattr(optimizer, "all_grad_tensors", {})
        kept.update(dict.fromkeys(kept))
        clear_kept_gradients(optimizer)

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """Clip by the norm over all ranks, update, clear the gradients; all ranks or none.

        DeepSpeed adds the norm up in float32: gradients whose squares overflow it are refused, as what is not finite.
        """
        assert 0 <= learning_rate < math.inf, f"learning rate {learning_rate}"
        if not self._begun:
            self._begin_without_gradients()
        self._begun = False
        set_learning_rate(self._engine.optimizer.param_groups, learning_rate)
        optimizer = self._engine.optimizer
        limit = nullcontext(SeenNorm()) if largest_norm == math.inf else refuse_above(optimizer, largest_norm)
        with local_rank(self._engine.device), limit as seen:
            self._engine.step()
        # before the next micro-batch: DeepSpeed adds to what it kept of this step's gradients
        clear_kept_gradients(self._engine.optimizer)
        applied = bool(self._engine.was_step_applied())
        if applied:
            self.state.average()
        if applied and not self._is_checked:
            # after the first update alone: before it DeepSpeed has no moments
            require_on_host(self.state.tensors(), "adam_offload")
            self._is_checked = True
        # DeepSpeed says infinity of every step that it refuses
        norm = seen.norm if seen.too_large else float(self._engine.get_global_grad_norm())
        return StepOutcome(norm, applied)

    def state_tensors(self) -> dict[str, Tensor]:
        """This rank's ranges of "exp_avg/<name>", "step/<name>" and so on, see `ZeroState.tensors`."""
        return self.state.tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back ranges that `state_tensors` gave on this rank, of as many ranks."""
        self.state.load_tensors(tensors)

    def checkpoint_tensors(self) -> list[Shard]:
        """Return the state of `state_tensors` as blocks with offsets; those of all ranks cover every tensor once."""
        return self.state.shards()

    def shard_requests(self) -> list[ShardRequest]:
        """Return requests for the blocks of the state that this rank steps on, and for all counts of steps."""
        return self.state.shard_requests()

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        """Copy one block of the state into the range that this rank holds, see `ZeroState.write`."""
        self.state.write(name, start, tensor)

    def restore(self, stored: StoredComponent) -> None:
        """Read this rank's blocks of the state; averages that were not saved stay as they begin."""
        restore_shards(self, stored)

    def load_state(self, read: Read) -> None:
        """Take the state from whole tensors, of any number of ranks and any strategy, see `ZeroState.load`."""
        self.state.load(read)

    def _begin_without_gradients(self) -> None:
        """Set up what a backward pass sets up: a step with no micro-batch on any rank has gradients of zero."""
        optimizer = self._engine.optimizer
        optimizer.set_gradient_accumulation_boundary(False)
        if hasattr(optimizer, "setup_buckets"):
            optimizer.setup_buckets()
        if self._engine.zero_optimization_partition_gradients():
            optimizer.overlapping_partition_gradients_reduce_epilogue()


def _mask_gradients(model: nn.Module, first_rows: Mapping[str, int]) -> None:
    """Zero the gradients of the rows before the first that is trained: then their moments stay 0, and their bits."""
    for name, first in first_rows.items():
        model.get_parameter(name).register_post_accumulate_grad_hook(partial(_zero_rows, first))


def _zero_rows(first: int, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad[:first].zero_()


class _Root(nn.Module):
    """A forward around any use of the model, so that DeepSpeed's hooks on forwards cover it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)


def _gather_with(root: nn.Module, layers: Sequence[nn.Module], deepspeed: Any) -> None:
    """Let every weight outside of the layers be gathered for the whole of a `compute`, wherever it is read."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for parameter in root.parameters():
        if id(parameter) not in inside:
            deepspeed.zero.register_external_parameter(root, parameter)
