"""Protocols of the training loops' collaborators; `rft_cli` connects the implementations.

Three-line fakes that satisfy these are in `rft_trainer.testing.bigram`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.packed_tokens import PackedTokens


class SampledCompletion(Protocol):
    """One completion of the engine; the three sequences have one entry a token."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def log_kept_mass(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def weight_version(self) -> int: ...


class Engine(Protocol):
    """Inference engine: samples completions from the policy of one weight version."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> Sequence[Sequence[SampledCompletion]]:
        """Sample completions: one list a prompt, one completion a key.

        `budgets` are the tokens that each sample may have at most, where they differ from `max_new_tokens`;
        `constraint` is the set of allowed completions; `media` are the images of each prompt, None where it has none.
        """
        ...

    def load_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Release memory until `wake` is called."""
        ...

    def wake(self) -> None: ...


class RefreshableEngine(Engine, Protocol):
    """An engine that can serve other weights under the version that it has, such as moving averages."""

    def refresh(self) -> None:
        """Serve the policy's present weights under the present version."""
        ...


class Policy(Protocol):
    """Log-probabilities of packed tokens; the gradient follows torch's grad mode."""

    def token_logprobs(
        self,
        tokens: PackedTokens,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...


class FusedLoss(Protocol):
    """A loss with the log-probs and entropies [T] that it was computed from, those without gradient."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def logprobs(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...


class FusedPolicy(Policy, Protocol):
    """A policy that evaluates the objective in its output head, where a token's logits are computed only once."""

    def prefers_fused_loss(self, num_rows: int) -> bool:
        """Return whether the fused loss is cheaper for so many loss tokens."""
        ...

    def fused_loss(
        self,
        tokens: PackedTokens,
        objective: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        temperature: float = 1.0,
    ) -> FusedLoss:
        """Compute the sum of `objective(logprobs [N], entropies [N], tokens [N])` over the targets."""
        ...


class RoutedNumbers(Protocol):
    """Loads and sizes of logits of a forward's routers, in the rows that predict targets."""

    @property
    def log_normaliser_LR(self) -> Tensor:
        """[L, R] log sum_i exp(router logits_i) of each row in each layer; with gradient in a `BalanceShare`."""
        ...

    @property
    def loads_LE(self) -> Tensor:
        """[L, E] float64: rows that go to each expert of each layer."""
        ...

    @property
    def max_logit(self) -> Tensor:
        """The largest size of a router's logit in these rows."""
        ...


class BalanceShare(RoutedNumbers, Protocol):
    """A micro-batch's share of the load-balancing loss of a step, with the numbers of its rows."""

    @property
    def share(self) -> Tensor:
        """Scalar with gradient; the shares of all micro-batches and ranks add up to the loss."""
        ...

    @property
    def max_load(self) -> Tensor:
        """Rows of the busiest expert over those of an even distribution, in the whole step."""
        ...


class RoutedPolicy(Policy, Protocol):
    """A policy with a mixture of experts."""

    @property
    def num_experts(self) -> int: ...

    @property
    def num_routers(self) -> int: ...

    @property
    def router_biases(self) -> list[Tensor]:
        """The [E] bias of each layer's router, which may be changed in place; empty where routers have none."""
        ...

    def expert_counts(self, tokens: PackedTokens) -> Tensor:
        """Count [E] float64: how often each expert is chosen for the rows that predict targets. No gradient."""
        ...

    def token_logprobs_and_balance(
        self,
        tokens: PackedTokens,
        *,
        expert_counts_E: Tensor | None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None, BalanceShare]:
        """Compute `token_logprobs`, and the share under the whole step's counts (None: this batch is the step)."""
        ...

    def watching_routers(self) -> AbstractContextManager[Sequence[RoutedNumbers]]:
        """Return a context that keeps what the routers say of each forward of log-probs within it."""
        ...


class SavablePolicy(Protocol):
    """The weights that a checkpoint writer saves; what else a writer needs of them is its own protocol."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


PolicyT_contra = TypeVar("PolicyT_contra", bound=SavablePolicy, contravariant=True)


class Critic(Protocol):
    """Estimates of the return from packed tokens; the gradient follows torch's grad mode."""

    def values(self, tokens: PackedTokens) -> Tensor:
        """Return [T]: the estimate before token t is sampled, aligned with its log-prob; any number if no target."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


class ScoringModel(Protocol):
    """Scores of packed texts by a reward model; the gradient follows torch's grad mode."""

    def score_matrix(self, tokens: PackedTokens) -> Tensor:
        """Return [S, K]: the score of each segment under each head."""
        ...

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, where they differ."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


class StepScoringModel(Protocol):
    """Scores of the steps of packed texts by a step reward model; the gradient follows torch's grad mode."""

    def step_scores(self, tokens: PackedTokens) -> Tensor:
        """Return [N]: the logit of each target, which is the last token of a step, in their order."""
        ...

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, where they differ."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


class StepOutcome(Protocol):
    """Result of one optimizer step."""

    @property
    def gradient_norm(self) -> float: ...
    @property
    def applied(self) -> bool: ...
    @property
    def loss_scale(self) -> float | None:
        """Factor on the losses before `backward`; None = no loss scaling."""
        ...


class Optimizer(Protocol):
    """Optimizer that sums gradients over ranks, clips them, refuses non-finite ones, and applies the rest."""

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Accumulate the gradient of a micro-batch; `last`: the last one before `step`."""
        ...

    def step(self, learning_rate: float, *, largest_norm: float = math.inf) -> StepOutcome:
        """Sum, clip and apply the gradients; a norm above `largest_norm` is refused as one that is not finite is."""
        ...

    def discard(self) -> None:
        """Drop the gradients accumulated since the last step; every rank calls it."""
        ...

    def own_norm(self) -> float | None:
        """Return the L2 norm of the gradients that this rank accumulated; None where they arrive summed over ranks."""
        ...

    def checkpoint_tensors(self) -> object:
        """Return what this rank saves of the state, in a form that the checkpoint writer takes."""
        ...


class BestWeights(Protocol):
    """A copy of the weights of the best evaluation so far, so that a run can end with them."""

    def keep(self) -> None:
        """Copy the weights as they are now."""
        ...

    def put_back(self) -> None:
        """Give the model the kept weights again; it stays as it is where none were kept."""
        ...


class Collectives(Protocol):
    """Sums and exchanges over ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def sum(self, tensor: Tensor) -> Tensor: ...
    def max(self, tensor: Tensor) -> Tensor: ...
    def gather_bytes(self, data: bytes) -> list[bytes]: ...


class ResponseDecoder(Protocol):
    """Decoder of response token ids to text, without special tokens."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...


class CheckpointWriter(Protocol[PolicyT_contra]):
    """Atomic checkpoint writer: a kill at any instant leaves the old or the new checkpoint; called on every rank."""

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, object],
        records: Mapping[str, object],
        policy: PolicyT_contra,
        metadata: Mapping[str, object],
    ) -> None:
        """Save the state as it is now; it may be written after the call returns."""
        ...

    def keep(self, step: int) -> None:
        """Keep the checkpoint of `step` from retention, in place of the one that was kept before."""
        ...

    @property
    def failed(self) -> bool:
        """Return whether a save could not be written."""
        ...

    def wait(self) -> None:
        """Wait until the last save is written and verified; raise the error of a failed save."""
        ...
