"""Monitor of the training-inference mismatch: the log-prob gap at the first update of a step.

Before its first update a step's policy has the very weights that the samples were drawn with, so

    gap = mean over loss tokens of |log p_trainer(token) - log p_engine(token)|   [nats a token]

is arithmetic alone (kernels, precision) or a fault (stale weights, another temperature, a broken
kernel). It costs nothing: both numbers are computed anyway. Above the limit the run stops before a weight
changes, because importance ratios e^gap away from 1 train on noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rft_core.errors import ServiceError
from rft_core.exact_records import exact_bytes, exact_value
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import TokenBatch, TrainingSample


@dataclass(frozen=True, slots=True)
class _Worst:
    """The token of a micro-batch with the largest gap; tensors stay on the device until they are read."""

    samples: Sequence[TrainingSample]
    gap: Tensor
    position: Tensor
    segment_ids_T: Tensor
    positions_T: Tensor
    token_ids_T: Tensor
    logprobs_T: Tensor
    behaviour_T: Tensor

    def to_json(self) -> dict[str, object]:
        index = int(self.position)
        sample = self.samples[int(self.segment_ids_T[index])]
        return {
            "sample": sample.sample_id,
            "token": int(self.token_ids_T[index]),
            "position": int(self.positions_T[index]) - sample.prompt_length,
            "trainer": float(self.logprobs_T[index]),
            "engine": float(self.behaviour_T[index]),
        }


@dataclass(slots=True, kw_only=True)
class MismatchMonitor:
    """Measurement of the log-prob gap over one update; the module docstring defines the gap."""

    collectives: Collectives
    limit: float | None
    """Largest mean gap in nats a token; None = measured only."""
    skips_first_token: bool = False
    """Leave each response's first token out: it was drawn at a temperature of its own."""
    remedy: Callable[[float], str] = "--max_logprob_gap {:.2g}".format
    """What to do about a mean gap."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`engine/logprob_gap`, the mean, and `engine/logprob_gap_max` of the last update judged, in nats; the same on
    every rank, empty where no token was measured."""
    _during: str = ""
    _state: str = ""
    _sums: list[Tensor] = field(default_factory=list)
    _worst: list[_Worst] = field(default_factory=list)

    def begin(self, during: str, state: str) -> None:
        """Start an update; `during` and `state` describe it and what is kept, for the error if it is refused."""
        self._during, self._state, self.metrics = during, state, {}
        self.restart()

    def restart(self) -> None:
        """Forget the tokens measured so far, where the update is taken again."""
        self._sums, self._worst = [], []

    def add(self, samples: Sequence[TrainingSample], batch: TokenBatch, outputs_T: Tensor) -> None:
        """Add the tokens of one packed micro-batch of `samples`, without synchronizing with the device.

        `outputs_T` are the policy's log-probs.
        """
        if batch.behaviour_logprobs_T is None:
            return
        mask_T = batch.loss_mask_T
        if self.skips_first_token:
            mask_T = mask_T & torch.roll(mask_T, 1)  # a segment begins with its prompt, whose mask is false
        trainer_T, drawn_T = outputs_T.detach(), batch.behaviour_logprobs_T
        gaps_T = torch.where(mask_T, (trainer_T - drawn_T).abs().double(), 0.0)
        # kept as tensors: reading a number here would wait for the device at every micro-batch
        self._sums.append(torch.stack([gaps_T.sum(), mask_T.sum().double()]))
        gap, index = gaps_T.max(0)
        self._worst.append(
            _Worst(samples, gap, index, batch.segment_ids_T, batch.positions_T, batch.token_ids_T, trainer_T, drawn_T)
        )

    def judge(self) -> None:
        """Combine the gaps of all ranks, after the last micro-batch and before a weight changes.

        Raises:
            ServiceError: the mean is above the limit; on every rank.
        """
        # every rank judges the same sums, so all stop or all go on; a rank without tokens sends zeros
        shares = [exact_value(part) for part in self.collectives.gather_bytes(exact_bytes(self._share()))]
        count = sum(share["count"] for share in shares)
        if not count:
            return
        # the limit is on the mean: the largest gap grows with the number of tokens
        mean, worst = sum(share["sum"] for share in shares) / count, max(shares, key=lambda share: share["max"])
        if self.limit is not None and mean > self.limit:
            raise self._error(mean, worst)
        self.metrics = {"engine/logprob_gap": mean, "engine/logprob_gap_max": worst["max"]}

    def _share(self) -> dict[str, object]:
        if not self._sums:
            # below every gap, so that a rank without tokens never names the worst
            return {"sum": 0.0, "count": 0, "max": -1.0}
        # the first time that numbers leave the device: one wait for all micro-batches
        total, count = torch.stack(self._sums).sum(0).tolist()
        gaps = torch.stack([one.gap for one in self._worst]).tolist()
        worst = self._worst[max(range(len(gaps)), key=gaps.__getitem__)]
        return {"sum": total, "count": int(count), "max": float(worst.gap), "where": worst.to_json()}

    def _error(self, mean: float, worst: Mapping[str, object]) -> ServiceError:
        token = worst["where"]
        assert isinstance(token, dict)
        return ServiceError(
            code="engine.logprob_gap",
            what=f"engine and trainer are {mean:.3g} nats a token apart, at most {worst['max']:.3g}; "
            f"allowed: {self.limit:g} (--max_logprob_gap)",
            where=f"{self._during}; worst: sample {token['sample']}, response token {token['position']} (id "
            f"{token['token']}): trainer {token['trainer']:.4g}, engine {token['engine']:.4g}",
            why="they should have the same weights before the first update of a step, so the samples are of another "
            "policy: stale or rounded weights, another temperature, or a kernel that differs",
            state=self._state,
            do=self.remedy(mean),
        )
