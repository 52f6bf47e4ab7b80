"""An objective that is a function: log-probs of a micro-batch and the denominators of the step, to a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_algos.objectives import LossOutput
from rft_core.errors import OptionsError
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample

LossFunction = Callable[..., Any]
"""(logprobs_T, batch, counts) or (logprobs_T, batch, counts, entropy) -> loss [] or (loss [], metrics).

`logprobs_T` [T] are log-probs of the policy, in nats, 0 where `batch.loss_mask_T` is false; the gradient flows
through them, and through `entropy` [T] where the function has a parameter of that name. The loss is the share that
this micro-batch carries of the loss of the whole batch: sums, divided by `counts.num_loss_tokens`,
`counts.num_sequences` or `counts.num_units`, never a mean over the micro-batch. Metrics are name -> (total, count).
"""

ENTROPY = "entropy"
"""The parameter by which a function asks for entropies."""


@dataclass(frozen=True, slots=True)
class FunctionObjective:
    """The objective of a `LossFunction`, as the loss of a policy takes it (`policy_loss.Objective`)."""

    function: LossFunction
    needs_entropy: bool

    @classmethod
    def of(cls, function: LossFunction) -> FunctionObjective:
        """Make the objective of a function; its signature says whether it takes entropies."""
        if not callable(function):
            is_name = isinstance(function, str)
            raise _refused(
                "loss.not_callable",
                f"{function!r} is no function" if is_name else f"{type(function).__name__} is no function",
                "a loss takes (logprobs, batch, counts)",
                f"rft.objective({function!r})" if is_name else "def loss(logprobs, batch, counts): ...",
            )
        return cls(function, ENTROPY in inspect.signature(function).parameters)

    @property
    def logs_entropy(self) -> bool:
        """Return False: entropies are computed where the function takes them."""
        return False

    @property
    def by_token(self) -> bool:
        """Return False: what the function does with its tokens is not known."""
        return False

    def check(self, samples: Sequence[TrainingSample]) -> None:
        """Take any samples: what the function needs is not known."""

    def token_losses(self, batch: TokenBatch, counts: Counts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return nothing that may be called: it is asked of objectives of single tokens alone."""
        assert self.by_token, "the loss of a function is not computed token by token"
        return lambda logprobs_N, entropy_N, tokens_N: logprobs_N

    def __call__(self, batch: TokenBatch, logprobs_T: Tensor, entropy_T: Tensor | None, counts: Counts) -> LossOutput:
        """Compute the share of a micro-batch.

        Raises:
            OptionsError: what the function returns is no number with a gradient, or its metrics are no pairs.
        """
        more = {ENTROPY: entropy_T} if self.needs_entropy else {}
        loss, metrics = _parts(self.function(logprobs_T, batch, counts, **more))
        _check_loss(loss)
        # counts that add up to 1 over the batch, so that the mean of the metric is the loss of the batch
        share = batch.loss_mask_T.sum().double() / max(counts.num_loss_tokens, 1)
        return LossOutput(loss, {"policy/loss": (loss.detach(), share), **_pairs(metrics)})


def _parts(returned: object) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return returned[0], returned[1]
    return returned, {}


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise _refused(
            "loss.no_tensor",
            f"it returned {type(loss).__name__}",
            "a loss is a tensor of one number, or a pair of that and metrics by name",
            "return total / counts.num_loss_tokens",
        )
    if loss.shape != ():
        raise _refused(
            "loss.shape",
            f"it returned a tensor of shape {tuple(loss.shape)}",
            "a loss is one number: the share of this micro-batch in the loss of the whole batch",
            "return values.sum() / counts.num_loss_tokens",
        )
    if not loss.requires_grad:
        raise _refused(
            "loss.no_gradient",
            "it returned a number without a gradient",
            "the gradient reaches the weights through the log-probs that the function is given",
            "compute the loss from logprobs, without detach() or torch.no_grad()",
        )


def _pairs(metrics: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, value in metrics.items():
        if not isinstance(value, tuple) or len(value) != 2:
            raise _refused(
                "loss.metric",
                f"metric {name!r} is {type(value).__name__}",
                "a metric is (total, count), so that adding micro-batches and ranks is exact",
                f'{{"{name}": (values.sum(), len(values))}}',
            )
        total, number = (torch.as_tensor(part) for part in value)
        pairs[name] = total.detach(), number.detach().to(total.device)
    return pairs


def _refused(code: str, what: str, why: str, do: str) -> OptionsError:
    return OptionsError(
        code=code, what=what, where="the loss of forward_backward", why=why, state="no weight was changed", do=do
    )
