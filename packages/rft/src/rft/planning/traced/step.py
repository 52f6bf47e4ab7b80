"""Bytes that one optimizer step would hold at its peak, from a trace of its forward and backward passes.

The code of the run itself is traced, on tensors without values, from config.json alone. A deep decoder is traced with
a few of its layers: what a layer adds is the same in each of them, so the rest follows by a straight line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft.build.lora import adapt
from rft.planning.traced.stages import MicroBatchShape, TracedStage
from rft_dist.planning.traced_bytes import ACTIVATIONS, GRADIENTS, LOGITS, TracedBytes
from rft_models.logprobs.planned_device import planned_for
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load_for_training import checkpointing_of, freezing_of, head_chunk_size
from rft_models.policy.without_weights import policy_without_weights
from rft_trainer.batches.packing import count, pack
from rft_trainer.metrics.totals import MetricTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToTrace:
    """The optimizer step of one rank."""

    stage: TracedStage
    settings: Any
    """Of the stage."""
    values: Mapping[str, Any]
    """The settings by their flat names."""
    shape: MicroBatchShape
    dtype: torch.dtype
    """Type of the weights in the forward."""
    autocast: torch.dtype | None = None
    """Type of the products, where that is another one."""
    device_type: str
    """ "cuda" or "cpu": by its limits the head is computed."""
    num_layers: int
    several: bool
    """Whether the step has more than one micro-batch, so that gradients are there while one is computed."""
    has_token_head: bool
    """Whether the model has an output matrix."""
    sums_in_float32: bool
    """Whether gradients of a narrower type are added up in float32, one parameter's at a time."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Bytes at the peak of a rank's forward and backward passes, beside its weights."""

    activations: int
    logits: int
    """Logits and what is computed of them."""
    gradients: int
    """At that moment: where there is one micro-batch, they come as activations go."""
    all_gradients: int
    """When the backward pass has ended."""
    layers: tuple[int, ...]
    """Numbers of layers that were traced."""

    @property
    def peak(self) -> int:
        """Bytes of all of them together."""
        return self.activations + self.logits + self.gradients


def trace_step(step: StepToTrace) -> TracedStep:
    """Trace the forward and backward passes of a step.

    Raises:
        Exception: whatever an operation without a form for tensors without values raises.
    """
    first, second = traced_layers(step.values)
    if step.num_layers <= second:
        return _trace(step)
    few, more = (_trace(replace(step, num_layers=number)) for number in (first, second))
    return _line(few, more, step.num_layers)


def traced_layers(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the two numbers of layers that deeper decoders are traced with, both with whole periods of layers."""
    # kinds of attention may alternate, and every N-th layer alone may be computed again
    every = int(values["gradient_checkpointing_every"])
    period = every if every % 2 == 0 else 2 * every
    return period, 2 * period


def _line(few: TracedStep, more: TracedStep, num_layers: int) -> TracedStep:
    """Return the step of so many layers on the straight line through two others."""
    (first,), (second,) = few.layers, more.layers

    def at(name: str) -> int:
        low, high = getattr(few, name), getattr(more, name)
        return high + (high - low) * (num_layers - second) // (second - first)

    names = ("activations", "logits", "gradients", "all_gradients")
    found = TracedStep(*map(at, names), layers=(first, second))
    if found.peak >= found.all_gradients:
        return found
    # in a deep decoder on few tokens gradients come faster than activations go
    return replace(found, activations=0, logits=0, gradients=found.all_gradients)


def _trace(step: StepToTrace) -> TracedStep:
    traced = TracedBytes()
    policy = _policy(step, traced)
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    sums: dict[int, Tensor] = {}
    if step.sums_in_float32:
        for parameter in parameters:
            hooked: Any = parameter  # torch leaves the type of a hook open
            hooked.register_post_accumulate_grad_hook(partial(_sum_in_float32, traced, sums))
    else:
        traced.watch(parameters)
    # a float16 loss is scaled before the head, which cannot make gradients in the forward then
    loss = step.stage.loss(step.settings, policy, None if torch.float16 in (step.dtype, step.autocast) else policy)
    samples = step.stage.samples(step.settings, step.values, step.shape)
    counts = count(samples)
    with planned_for(step.device_type), traced:
        if step.several:
            _gradients_before(step, traced, parameters, sums)
        output = loss(pack(samples), counts, MetricTotals())
        torch.autograd.backward(output.loss)
        del output
        at_peak: Counter[str] = traced.at_peak
        gradients = traced.of(GRADIENTS)
    layers = (step.num_layers,)
    return TracedStep(at_peak[ACTIVATIONS], at_peak[LOGITS], at_peak[GRADIENTS], gradients, layers)


def _gradients_before(
    step: StepToTrace, traced: TracedBytes, parameters: Sequence[nn.Parameter], sums: dict[int, Tensor]
) -> None:
    """Give every parameter the gradient of the micro-batches before."""
    with traced.labelled(GRADIENTS):
        for parameter in parameters:
            if step.sums_in_float32:
                sums[id(parameter)] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                parameter.grad = torch.zeros_like(parameter)


def _policy(step: StepToTrace, traced: TracedBytes) -> CausalPolicy:
    settings = step.settings
    # a reward model is trained without an output matrix, and none of its parts is frozen
    has_head = step.has_token_head
    policy = policy_without_weights(
        settings.model.pretrain,
        dtype=step.dtype,
        placed=traced.fake,
        num_layers=step.num_layers,
        adapted=lambda policy: adapt(policy, settings.adapter, None, base=policy.where, seed=settings.run.seed),
        gradient_checkpointing=checkpointing_of(settings.model),
        freeze=freezing_of(settings.model) if has_head else None,
        head_chunk_size=head_chunk_size(settings.model) if has_head else None,
    )
    policy.backbone.autocast = step.autocast
    policy.head = _LabelledHead(policy.head, traced)  # pyright: ignore[reportAttributeAccessIssue]  # the same methods
    return policy


def _sum_in_float32(traced: TracedBytes, sums: dict[int, Tensor], parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if id(parameter) in sums:
        sums[id(parameter)].add_(gradient)
        return
    sums[id(parameter)] = gradient.float()
    traced.relabel(sums[id(parameter)], GRADIENTS)


class _LabelledHead:
    """An output head of which the memory counts as logits, in the backward pass too."""

    def __init__(self, head: Any, traced: TracedBytes) -> None:
        self._head = head
        self._traced = traced
        size = head.weight.numel()
        # the gradient of the matrix may be summed in float32
        self._gradients = frozenset((size * head.weight.element_size(), size * 4))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._head, name)
        return partial(self._labelled, name, found) if name in ("logprobs", "loss", "vocabulary_terms") else found

    def _labelled(self, name: str, function: Any, *arguments: Any, **named: Any) -> Any:
        with self._traced.labelled(LOGITS, self._gradients):
            outputs = function(*arguments, **named)
        node: Any = (outputs.loss if name == "loss" else outputs[0]).grad_fn
        of_head = next((each for each in _nodes(node) if _is_head(each)), None)
        if of_head is not None:
            of_head.register_prehook(self._begin)
            of_head.register_hook(self._end)
        return outputs

    def _begin(self, _: object) -> None:
        self._traced.begin(LOGITS, self._gradients)

    def _end(self, *_: object) -> None:
        self._traced.end()


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a node of the backward graph and those behind it, along its first edges."""
    while node is not None:
        yield node
        edges: tuple[tuple[Any, int], ...] = node.next_functions
        node = next((edge[0] for edge in edges if edge[0] is not None), None)


def _is_head(node: Any) -> bool:
    return type(node).__name__.startswith(("_SlabLogprobs", "_FusedLoss"))
