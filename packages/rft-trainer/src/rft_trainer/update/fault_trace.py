"""Search for where a refused step stopped being finite, or which rows made it jump: unit by unit, with hooks.

It runs after a step was refused and before the next, so its time does not count: every module's output is read on
the host. Nothing is applied; the gradients that it makes are dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rft_trainer.batches.packing import assign_to_ranks, pack
from rft_trainer.batches.units import Unit, unit_lengths, units_of
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Collectives, Optimizer
from rft_trainer.update.numeric_guard import Diagnosis, RowFault, RowNorm, largest_norms
from rft_trainer.update.optimizer_step import MicroBatchLoss, RefusedStep


class FaultTracer:
    """Tracer of one model's steps.

    Example::

        tracer = FaultTracer(policy, device="cpu")
        tracer(RefusedStep(samples, counts), loss, optimizer, ranks).faults[0].stage    # "output of layers.0.mlp"
    """

    def __init__(self, module: nn.Module, *, device: str = "cpu", collective_forward: bool = False) -> None:
        """Store the model; `collective_forward` as of `Updater`: all ranks then trace as many units."""
        self._module = module
        self._device = device
        self._collective_forward = collective_forward

    def __call__(self, step: RefusedStep, loss: MicroBatchLoss, optimizer: Optimizer, ranks: Collectives) -> Diagnosis:
        """Run the step again, unit by unit; every rank calls it."""
        bad = [name for name, weight in self._module.named_parameters() if not _is_finite(weight.detach())]
        if names := sorted({name for one in _gather(ranks, bad) for name in one}):
            return Diagnosis(weights=tuple(names))
        units = units_of(step.samples)
        # DeepSpeed and FSDP hand gradients over summed: of a unit that is alone in them the sum is its own
        if math.isfinite(step.largest_norm) and optimizer.own_norm() is None:
            return self._one_by_one(units, step, loss, optimizer, ranks)
        shares = assign_to_ranks(unit_lengths(units), ranks.world_size)
        own = [units[index] for index in shares[ranks.rank]]
        # where forwards are exchanges, the rank with the most units sets how many all of them run
        turns = max(map(len, shares)) if self._collective_forward else len(own)
        idle = [pack(min(units, key=len), self._device)] * (turns - len(own))
        if loss.prepass:
            loss.begin([pack(unit, self._device) for unit in own], idle)
        found = [self._of_unit(unit, step, loss, optimizer, ranks.rank) for unit in own]
        for batch in idle:
            optimizer.backward(loss.filler(batch) * 0.0, last=False)
            optimizer.discard()
        everyones = _gather(
            ranks,
            [
                {"samples": _names(unit), "norm": norm, "fault": None if fault is None else asdict(fault)}
                for unit, (fault, norm) in zip(own, found, strict=True)
            ],
        )
        faults = [one["fault"] for part in everyones for one in part if one["fault"] is not None]
        norms = [RowNorm(tuple(one["samples"]), one["norm"]) for part in everyones for one in part]
        return Diagnosis(
            tuple(RowFault(**{**one, "sample_ids": tuple(one["sample_ids"])}) for one in faults),
            largest_norms(norms) if math.isfinite(step.largest_norm) else (),
        )

    def _one_by_one(
        self, units: Sequence[Unit], step: RefusedStep, loss: MicroBatchLoss, optimizer: Optimizer, ranks: Collectives
    ) -> Diagnosis:
        """Find the gradient norm of each unit where they arrive summed: the other ranks add nothing to it."""
        owner = {
            index: rank
            for rank, share in enumerate(assign_to_ranks(unit_lengths(units), ranks.world_size))
            for index in share
        }
        idle = pack(min(units, key=len), self._device)
        own = {index: pack(unit, self._device) for index, unit in enumerate(units) if owner[index] == ranks.rank}
        if loss.prepass:
            loss.begin(list(own.values()), [idle] * (len(units) - len(own)))
        faults: list[RowFault] = []
        norms: list[RowNorm] = []
        for index, unit in enumerate(units):
            if index in own:
                optimizer.backward(loss(own[index], step.counts, MetricTotals()).loss, last=True)
            else:
                optimizer.backward(loss.filler(idle) * 0.0, last=True)
            # no norm is below 0: the step says it, and is refused
            norm = optimizer.step(0.0, largest_norm=-1.0).gradient_norm
            norms.append(RowNorm(_names(unit), norm))
            if stage := _wrong_norm(norm, step.largest_norm):
                faults.append(RowFault(_names(unit), stage, owner[index]))
        return Diagnosis(tuple(faults), largest_norms(norms))

    def _of_unit(
        self, unit: Unit, step: RefusedStep, loss: MicroBatchLoss, optimizer: Optimizer, rank: int
    ) -> tuple[RowFault | None, float]:
        """Run one unit forward and backward; return the first thing that is wrong with it, and its gradient norm."""
        batch = pack(unit, self._device)
        first = _First(f"input {batch.not_finite}" if batch.not_finite else "")
        with _watched(self._module, first):
            output = loss(batch, step.counts, MetricTotals())
            first.see("loss", output.loss, ())
            optimizer.backward(output.loss, last=True)
        # known before ranks exchange gradients; None where they arrive summed, and rows cannot be distinguished
        norm = optimizer.own_norm()
        optimizer.discard()
        if norm is not None and (stage := _wrong_norm(norm, step.largest_norm)):
            first.note(stage)
        known = math.nan if norm is None else norm
        if not first.stage:
            return None, known
        return RowFault(_names(unit), first.stage, rank, first.low, first.high), known


def _names(unit: Unit) -> tuple[str, ...]:
    return tuple(sample.sample_id for sample in unit)


def _wrong_norm(norm: float, largest: float) -> str:
    """Say what is wrong with the gradient norm of a unit; empty where nothing is."""
    if not math.isfinite(norm):
        return "gradient of the weights"
    return f"gradient of norm {norm:.4g}, above {largest:.4g}" if norm > largest else ""


@dataclass(slots=True)
class _First:
    """The first stage that was seen to be wrong, and what went into it."""

    stage: str
    low: float | None = None
    high: float | None = None

    def note(self, stage: str) -> None:
        self.stage = self.stage or stage

    def see(self, stage: str, values: object, inputs: object) -> None:
        """Note the stage where its values are not finite and nothing was wrong before."""
        if self.stage or all(map(_is_finite, _tensors(values))):
            return
        self.stage = stage
        finite = [tensor.detach()[tensor.isfinite()].float() for tensor in _tensors(inputs)]
        finite = [tensor for tensor in finite if tensor.numel()]
        if finite:
            self.low = min(float(tensor.min()) for tensor in finite)
            self.high = max(float(tensor.max()) for tensor in finite)


@contextmanager
def _watched(module: nn.Module, first: _First) -> Iterator[None]:
    """Show `first` the output of every module in the forward's order, and the outputs' gradients in the backward's."""
    handles: list[RemovableHandle] = []

    def after(name: str, inner: nn.Module, inputs: Any, output: Any) -> None:
        # inner modules end before the ones around them, so the first to be wrong is the innermost
        known = first.stage
        first.see(f"output of {name}", output, inputs)
        if first.stage != known:
            first.stage += _experts_at_fault(inner, inputs, output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_see_gradient, first, name))

    for name, inner in module.named_modules():
        handles.append(inner.register_forward_hook(partial(after, name or type(inner).__name__)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _experts_at_fault(module: nn.Module, inputs: Any, output: Any) -> str:
    """Return ", expert 5" where a module that holds all experts of a layer has an output that is not finite.

    Such a module takes hidden states [T, H], the experts of each token [T, K] and their weights [T, K], and computes
    the products of all experts at once. The first token at fault is given to its experts one by one. Empty for any
    other module, and where each of them alone gives finite values.
    """
    if not _is_routed(inputs) or not isinstance(output, Tensor) or output.shape != inputs[0].shape:
        return ""
    states_TH, experts_TK, weights_TK = inputs[:3]
    token = int((~output.isfinite()).flatten(1).any(1).nonzero()[0])
    row = slice(token, token + 1)
    found: list[int] = []
    for choice in range(experts_TK.shape[1]):
        one = slice(choice, choice + 1)
        # not the module itself, whose hooks would see these calls as part of the step
        if not _is_finite(module.forward(states_TH[row], experts_TK[row, one], weights_TK[row, one])):
            found.append(int(experts_TK[token, choice]))
    if not found:
        return ""
    return f", expert{'s' if len(found) > 1 else ''} {' and '.join(map(str, found))}"


def _is_routed(inputs: Any) -> bool:
    """Return whether a module was given tokens with their experts and the weights of these."""
    if len(inputs) < 3 or not all(isinstance(each, Tensor) and each.dim() == 2 for each in inputs[:3]):
        return False
    states_TH, experts_TK, weights_TK = inputs[:3]
    is_choice = not experts_TK.is_floating_point() and weights_TK.is_floating_point()
    return is_choice and experts_TK.shape == weights_TK.shape and len(experts_TK) == len(states_TH)


def _see_gradient(first: _First, name: str, gradient: Tensor) -> None:
    first.see(f"gradient at the output of {name}", gradient, ())


def _tensors(value: object) -> list[Tensor]:
    """Return the floating-point tensors in the output of a module."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    local = getattr(tensor, "to_local", None)  # a shard: every rank looks at its own
    return bool((tensor if local is None else local()).isfinite().all())


def _gather(ranks: Collectives, own: list[Any]) -> list[list[Any]]:
    if ranks.world_size == 1:
        return [own]
    return [json.loads(part) for part in ranks.gather_bytes(json.dumps(own).encode())]
