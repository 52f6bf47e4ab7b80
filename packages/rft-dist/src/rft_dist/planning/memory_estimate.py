"""Bytes of one rank, by formula: weights, gradients, moments, activations, logits, keys and values.

Numbers in, numbers out: nothing is loaded and no torch is imported. With replicated ranks every rank holds the
whole; what a strategy shards is divided by the number of ranks that share it (`rft_dist.planning.run_layout`; ZeRO,
Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rft_dist.planning.run_layout import RunLayout

BUCKET_BYTES = 64 * 2**20
"""Float32 buffer in which replicated gradients are summed, and as much for its parts."""
GIB = 2**30
Phase = Literal["always", "passes", "step"]
"""In the passes of micro-batches, in the optimizer's step, or in both."""
_WEIGHTS = {"parameters", "adapters"}
_STATE = {"Adam moments", "Muon momenta", "master copy", "moving average"}


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Widths of a decoder-only transformer with gated feed-forward layers."""

    vocab: int
    hidden: int
    layers: int
    query_width: int
    """Heads x head size."""
    kv_width: int
    """Heads of keys x head size."""
    ffn: int
    """Of one expert, where there are experts."""
    tied: bool
    """Whether the embedding is the head too."""
    num_experts: int = 0
    """0 = dense."""
    experts_per_token: int = 0
    shared_ffn: int = 0
    """Of the experts that every token takes, all together."""
    attention_bias: bool = False
    """Of queries, keys and values."""
    output_bias: bool = False
    """Of the attention's output."""
    ffn_bias: bool = False
    head_norm: int = 0
    """Size of a head, where queries and keys are normalised; else 0."""
    shared_gate: bool = False
    """Whether one number a token weighs the shared experts."""

    @property
    def parameters(self) -> int:
        """V h (2 V h untied) + L (attention + feed-forward + 2 h) + h."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (self._attention + self._feed_forward + 2 * self.hidden) + self.hidden

    def rank_parameters(self, expert_ranks: int) -> int:
        """Return the parameters that a rank holds where so many divide the experts."""
        if not self.num_experts:
            return self.parameters
        return self.parameters - self.layers * self._expert * (self.num_experts - self.num_experts // expert_ranks)

    @property
    def active_ffn(self) -> int:
        """Feed-forward columns that one token passes through."""
        return (self.experts_per_token if self.num_experts else 1) * self.ffn + self.shared_ffn

    @property
    def layer_matrices(self) -> int:
        """L (h q + 2 h k + q h + feed-forward): weights in matrices of the layers, without biases, norms and gates."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        experts = max(self.num_experts, 1)
        feed_forward = self.hidden * (3 * experts * self.ffn + self.num_experts + 3 * self.shared_ffn)
        return self.layers * (attention + feed_forward)

    @property
    def _attention(self) -> int:
        """h q + 2 h k + q h, with biases and norms of heads."""
        weights = 2 * self.hidden * self.query_width + 2 * self.hidden * self.kv_width
        biases = (self.query_width + 2 * self.kv_width) * self.attention_bias + self.hidden * self.output_bias
        return weights + biases + 2 * self.head_norm

    @property
    def _expert(self) -> int:
        """3 h f, of one expert or of the dense part; biases where the model has them."""
        return 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden) * self.ffn_bias

    @property
    def _feed_forward(self) -> int:
        """`_expert` of each expert, with the router's h E."""
        one = self._expert
        if not self.num_experts:
            return one
        shared = 3 * self.hidden * self.shared_ffn + self.hidden * self.shared_gate
        return self.num_experts * one + self.hidden * self.num_experts + shared


@dataclass(frozen=True, slots=True)
class TrainingMemoryConfig:
    """Training settings that determine the memory of a run."""

    layout: RunLayout = field(default_factory=RunLayout)
    weight_bytes: int = 4
    """Of an element: 4 in float32, 2 in bfloat16."""
    master_copy: bool = False
    """Float32 copies of the weights, and float32 moments, beside weights of two bytes."""
    narrow_compute: bool = False
    """Whether float32 blocks are rounded to two bytes where they are gathered (FSDP)."""
    autocast: bool = False
    """Whether products are computed in two bytes beside float32 weights, of which a step has copies (`--amp`)."""
    muon: bool = False
    """Whether matrices of the layers have one momentum in the place of two moments."""
    average: bool = False
    """Whether a float32 moving average of the weights is kept."""
    host_moments: bool = False
    """Moments, master copies and averages in host memory, which is another one than the device's."""
    host_weights: bool = False
    """Weights and gradients too."""
    micro_tokens: int = 0
    """Tokens of one forward and backward pass, at most."""
    unit_tokens: int = 0
    """Tokens of the longest sample, or of the samples that are never divided."""
    head_rows: int | None = None
    """Rows of the head computed at once; None = all of the micro-batch."""
    recomputes: bool = False
    """Whether the inputs of blocks alone are kept for the backward pass."""
    recompute_every: int = 1
    adapter_weights: int = 0
    """Weights of float32 adapters that are trained in place of the model's; 0 = the model's own are."""
    reference: bool = False
    critic: bool = False
    cache_rows: int = 0
    """Sequences that an engine in this process decodes at once; 0 = no such engine."""
    cache_tokens: int = 0
    """Tokens of the longest of them."""
    cache_stays: bool = False
    """Whether they are kept while the policy trains."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the forward and backward pass."""
        return 2 if self.narrow_compute else self.weight_bytes


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One part of a rank's memory."""

    name: str
    num_bytes: int
    formula: str
    """With its numbers."""
    in_training: bool = True
    in_rollout: bool = True
    on_host: bool = False
    """In the memory of the host, where the device has one of its own."""
    phase: Phase = "always"
    """Part of a training step that it is alive in."""
    at_peak: int | None = None
    """Bytes of it at the peak of a micro-batch's passes; None = all of them."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes at the peak of a micro-batch's forward and backward pass, from a trace of it (`rft.planning.traced`)."""

    activations: int
    logits: int
    gradients: int
    formula: str
    """How they were traced."""


def estimate(sizes: DecoderSizes, run: TrainingMemoryConfig, step: StepBytes | None = None) -> list[MemoryTerm]:
    """Every part of one rank's memory: of a traced step as it would be, else at most."""
    terms = [*_weights(sizes, run), *_exchange(sizes, run)]
    if run.critic:
        host_moments = run.host_moments and run.layout.critic.optimizer
        own = replace(run, layout=run.layout.of_critic(), host_moments=host_moments)
        # a critic is stepped on in its own type, whatever the policy does
        own = replace(own, master_copy=False, narrow_compute=False, autocast=False, average=False)
        terms += [replace(term, name=f"critic {term.name}") for term in _weights(sizes, own)]
    if run.reference:
        shared, count = run.layout.reference.weights, sizes.rank_parameters(run.layout.reference.expert_ranks)
        terms.append(_shared_out("reference model", count, run.weight_bytes, run, shared, True, run.host_weights))
    terms += [_activations(sizes, run), _logits(sizes, run)]
    if run.autocast and step is None:  # a trace has them among its activations
        terms.append(_autocast_copies(sizes, run))
    if step is not None:
        terms = [_as_traced(term, step, run) for term in terms]
    return terms + ([_cache(sizes, run)] if run.cache_rows else [])


def checkpoint_copy(terms: Sequence[MemoryTerm], *, with_optimizer: bool) -> MemoryTerm:
    """Return the copy of weights, moments, master copies and averages in host memory, from which files are written.

    Its memory is kept for the next checkpoint. `with_optimizer`: not of the weights alone.
    """
    saved = _WEIGHTS | _STATE if with_optimizer else _WEIGHTS
    copied = [term for term in terms if term.name.removeprefix("critic ") in saved]
    names = " + ".join(term.name for term in copied)
    return MemoryTerm("checkpoint copy", sum(term.num_bytes for term in copied), names, on_host=True)


def peak_bytes(terms: Sequence[MemoryTerm]) -> tuple[int, int]:
    """(bytes while training, bytes while generating): not everything is alive at once.

    While training it is the larger one of two moments: in the passes of a micro-batch, and in the optimizer's step.
    """
    training = [term for term in terms if term.in_training and not term.on_host]
    passes = sum(term.num_bytes if term.at_peak is None else term.at_peak for term in training if term.phase != "step")
    return (
        max(passes, sum(term.num_bytes for term in training if term.phase != "passes")),
        sum(term.num_bytes for term in terms if term.in_rollout and not term.on_host),
    )


def host_peak(terms: Sequence[MemoryTerm]) -> int:
    """Bytes in host memory of what is kept there beside a device."""
    return sum(term.num_bytes for term in terms if term.on_host)


def _as_traced(term: MemoryTerm, step: StepBytes, run: TrainingMemoryConfig) -> MemoryTerm:
    """Return a term with the bytes of the traced step, where it is one of those that were traced."""
    if term.name in ("activations", "logits"):
        return replace(term, num_bytes=getattr(step, term.name), formula=step.formula)
    # where ranks share them out they come and go in other pieces than on the one rank that is traced
    if term.name == "gradients" and not run.layout.policy.gradients:
        return replace(term, at_peak=step.gradients)
    return term


def _weights(sizes: DecoderSizes, run: TrainingMemoryConfig) -> list[MemoryTerm]:
    """P w of weights, P g of gradients, 2 P m of moments, 4 P each of master copies and of an average.

    With Muon on M of them: M m of momenta, and 2 (P - M) m of moments. With master copies, moments and sums of
    gradients are float32 (m = g = 4), else as the weights (w). With adapters of A weights: P w, and 4 A of adapters,
    4 A of gradients, 8 A of moments.
    """
    if run.adapter_weights:
        return _adapters(sizes, run)
    moment_bytes = 4 if run.master_copy else run.weight_bytes
    gradient_bytes = 4 if run.master_copy else run.weight_bytes
    sharded = run.layout.policy
    every = sizes.rank_parameters(sharded.expert_ranks)
    # what other ranks hold of the experts are matrices
    matrices = sizes.layer_matrices - (sizes.parameters - every) if run.muon else 0
    rows = [
        ("parameters", every, run.weight_bytes, sharded.weights, True, run.host_weights),
        ("gradients", every, gradient_bytes, sharded.gradients, False, run.host_weights),
        ("Adam moments", every - matrices, 2 * moment_bytes, sharded.optimizer, True, run.host_moments),
    ]
    if matrices:
        rows.append(("Muon momenta", matrices, moment_bytes, sharded.optimizer, True, run.host_moments))
    if run.master_copy:
        rows.append(("master copy", every, 4, sharded.optimizer, True, run.host_moments))
    if run.average:
        rows.append(("moving average", every, 4, sharded.optimizer, True, run.host_moments))
    terms = [
        _shared_out(name, count, size, run, shared, stays, host) for name, count, size, shared, stays, host in rows
    ]
    return [*terms, _gathered(sizes, run)] if sharded.weights else terms


def _adapters(sizes: DecoderSizes, run: TrainingMemoryConfig) -> list[MemoryTerm]:
    sharded = run.layout.policy
    base = _shared_out("parameters", sizes.parameters, run.weight_bytes, run, sharded.weights, True, run.host_weights)
    rows = [
        ("adapters", 4, sharded.weights, True, False),
        ("gradients", 4, sharded.gradients, False, False),
        ("Adam moments", 8, sharded.optimizer, True, run.host_moments),
    ]
    if run.average:
        rows.append(("moving average", 4, sharded.optimizer, True, run.host_moments))
    terms = [
        _shared_out(name, run.adapter_weights, size, run, shared, stays, host)
        for name, size, shared, stays, host in rows
    ]
    return [base, *terms, *([_gathered(sizes, run)] if sharded.weights else [])]


def _gathered(sizes: DecoderSizes, run: TrainingMemoryConfig) -> MemoryTerm:
    """The embeddings and the two layers (one computes, the next comes) that are whole at a moment."""
    size = run.compute_bytes
    outside = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2) + sizes.hidden
    layer = (sizes.parameters - outside) // sizes.layers
    count = outside + min(2, sizes.layers) * layer
    num_bytes = count * size // run.layout.dims.tp_size
    formula = f"{count:,} x {size} bytes"
    return MemoryTerm("gathered weights", num_bytes, formula, in_rollout=False, phase="passes")


def _shared_out(
    name: str, count: int, size: int, run: TrainingMemoryConfig, shared: bool, stays: bool, host: bool
) -> MemoryTerm:
    ranks = run.layout.ranks_of(sharded=shared)
    over = f" / {ranks} ranks" if ranks > 1 else ""
    divided = " (by division)" if shared else ""
    formula = f"{count:,} x {size} bytes{over}{divided}"
    return MemoryTerm(name, -(-count * size // ranks), formula, in_rollout=stays, on_host=host)


def _exchange(sizes: DecoderSizes, run: TrainingMemoryConfig) -> list[MemoryTerm]:
    """2 min(4 P, B): replicated gradients are summed in float32 buckets of at most B bytes, and parts of one."""
    if run.layout.dims.world_size == 1 or not run.layout.policy.sums_in_buckets:
        return []
    trained = run.adapter_weights or sizes.rank_parameters(run.layout.policy.expert_ranks)
    bucket = min(BUCKET_BYTES, -(-4 * trained // run.layout.dims.tp_size))
    formula = f"2 x {bucket:,} bytes"
    return [MemoryTerm("gradient exchange", 2 * bucket, formula, in_rollout=False, phase="step")]


def activation_bytes_of_block(sizes: DecoderSizes, weight_bytes: int, tp_size: int = 1) -> int:
    """Bytes a token that one block keeps for its backward pass, at most.

    w (6 h + 4 q + 5 k + 5 f) + 16 h: inputs and outputs of two norms and two sums, queries and keys before and
    after the rotation, values, the attention's output, gate, its activation, up, their product; the norms keep
    float32 copies of their input. f counts the columns that a token passes through. A tensor group shares out q, k and
    f, not h.
    """
    h, q, k, f = sizes.hidden, sizes.query_width, sizes.kv_width, sizes.active_ffn
    return weight_bytes * (6 * h + -(-(4 * q + 5 * k + 5 * f) // tp_size)) + 16 * h


def _autocast_bytes_of_block(sizes: DecoderSizes) -> int:
    """Bytes a token that one block keeps under autocast, at most.

    Those of two bytes an element, and 12 h more: inputs and outputs of norms and sums stay float32.
    """
    return activation_bytes_of_block(sizes, 2) + 12 * sizes.hidden


def _autocast_copies(sizes: DecoderSizes, run: TrainingMemoryConfig) -> MemoryTerm:
    """2 (M + V h): matrices rounded for a product are kept for its backward pass; recomputed, of some blocks alone."""
    layers = min(run.recompute_every, sizes.layers) if run.recomputes else sizes.layers
    count = sizes.layer_matrices // sizes.layers * layers + sizes.vocab * sizes.hidden
    return MemoryTerm("autocast copies", 2 * count, f"at most {count:,} x 2 bytes", in_rollout=False, phase="passes")


def cache_bytes_of_token(sizes: DecoderSizes, weight_bytes: int) -> int:
    """2 L k w: keys and values of one token in all blocks."""
    return 2 * sizes.layers * sizes.kv_width * weight_bytes


def _activations(sizes: DecoderSizes, run: TrainingMemoryConfig) -> MemoryTerm:
    """T L b of all blocks; recomputed: T h w of each kept block's input, and b of the blocks between two of them."""
    tokens = -(-run.micro_tokens // run.layout.dims.sp_size)
    block = activation_bytes_of_block(sizes, run.compute_bytes, run.layout.dims.tp_size)
    if run.autocast:
        block = _autocast_bytes_of_block(sizes)
    if not run.recomputes:
        formula = f"at most {tokens:,} tokens x {sizes.layers} blocks x {block:,} bytes"
        num_bytes = tokens * sizes.layers * block
        return MemoryTerm("activations", num_bytes, formula, in_rollout=False, phase="passes")
    kept = -(-sizes.layers // run.recompute_every)
    inputs = sizes.hidden * run.compute_bytes
    formula = f"at most {tokens:,} tokens x ({kept} x {inputs:,} + {run.recompute_every} x {block:,} bytes)"
    num_bytes = tokens * (kept * inputs + run.recompute_every * block)
    return MemoryTerm("activations", num_bytes, formula, in_rollout=False, phase="passes")


def _logits(sizes: DecoderSizes, run: TrainingMemoryConfig) -> MemoryTerm:
    """2 R V 4: the logits of R rows and their gradient, in float32."""
    tokens = -(-run.micro_tokens // run.layout.dims.sp_size)
    rows = min(tokens, run.head_rows) if run.head_rows else tokens
    vocab = -(-sizes.vocab // run.layout.dims.tp_size)
    formula = f"at most 2 x {rows:,} rows x {vocab:,} tokens x 4 bytes"
    return MemoryTerm("logits", 2 * rows * vocab * 4, formula, in_rollout=False, phase="passes")


def _cache(sizes: DecoderSizes, run: TrainingMemoryConfig) -> MemoryTerm:
    """Keys and values of each token of each sequence."""
    a_token = cache_bytes_of_token(sizes, run.compute_bytes)
    formula = f"at most {run.cache_rows:,} sequences x {run.cache_tokens:,} tokens x {a_token:,} bytes"
    return MemoryTerm("keys and values", run.cache_rows * run.cache_tokens * a_token, formula, run.cache_stays)
