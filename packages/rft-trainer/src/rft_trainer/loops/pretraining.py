"""Pre-training: the likelihood of every token of a text, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from rft_core.fault_points import declare
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.training_batch import TrainingBatch
from rft_trainer.loops.sft import mean_loss
from rft_trainer.loops.supervised_loop import HeldOutResult, SupervisedLoop
from rft_trainer.protocols import Collectives, Policy
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import StopSignals

POINT_LOGGED = declare("pretrain.logged", "the row of a step is written, its checkpoint is not")

Window = tuple[TrainingSample, ...]
"""The pieces of documents in one window of the token stream; tokens of one do not see those of another."""


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """The windows that measure the model, each whole."""

    windows: Sequence[Window]
    num_bytes: int
    """UTF-8 bytes of the text that is predicted in them."""


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> float:
    """Compute the bits a byte of text: loss x tokens / (ln 2 x bytes), `loss` the mean over the tokens in nats.

    Unlike the loss a token, it compares models of different tokenizers (Gao et al. 2020, "The Pile", arXiv 2101.00027,
    section 3.1).
    """
    return loss * num_tokens / (math.log(2.0) * num_bytes) if num_bytes else math.nan


@dataclass(slots=True, kw_only=True)
class PretrainLoop(SupervisedLoop[Sequence[TrainingSample]]):
    """The pre-training loop of a run, with its collaborators as fields; an entry of the ledger is a window."""

    windows: Sequence[Window]
    held_out: HeldOutText | None
    policy: Policy
    eval_max_sequences: int
    eval_max_tokens: int
    device: str = "cpu"
    data_ranks: Collectives | None = None
    """The ranks over which samples are sharded; None = `collectives`."""
    collective_forward: bool = False
    """Whether every forward is a collective operation, so that all ranks must run equally many."""
    continue_texts: Callable[[int], None] | None = None
    """Called once on the first rank, with the last step, when nothing is left to train and its checkpoint is there."""

    def run(self, signals: StopSignals) -> None:
        """Train until the epochs, `max_steps` or patience end; then let the model continue some texts."""
        self.steps(signals)
        if self.continue_texts is not None:
            self.saver.wait()
            if self.collectives.rank == 0:
                self.continue_texts(self.progress.step)

    @property
    def logged_point(self) -> str:
        """The fault point of pre-training runs."""
        return POINT_LOGGED

    def _data(self, entries: Sequence[LedgerEntry]) -> Sequence[TrainingSample]:
        return list(chain.from_iterable(self.windows[entry.prompt_index] for entry in entries))

    def _samples(self, data: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        return data

    def _counts(self, data: Sequence[TrainingSample], batch: TrainingBatch) -> dict[str, object]:
        del batch
        return {"data/samples": len(data)}

    def _measure(self) -> HeldOutResult | None:
        """Compute the mean loss of the held-out windows in nats a token, and in bits a byte."""
        if self.held_out is None:
            return None
        loss, num_tokens = loss_of_windows(
            self.policy,
            self.held_out.windows,
            self.data_ranks or self.collectives,
            max_sequences=self.eval_max_sequences,
            max_tokens=self.eval_max_tokens,
            device=self.device,
            collective_forward=self.collective_forward,
        )
        bits = bits_per_byte(loss, num_tokens, self.held_out.num_bytes)
        return HeldOutResult(loss, {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/bits_per_byte": bits})


def loss_of_windows(
    policy: Policy,
    windows: Sequence[Window],
    collectives: Collectives,
    *,
    max_sequences: int,
    max_tokens: int,
    device: str = "cpu",
    collective_forward: bool = False,
) -> tuple[float, int]:
    """Compute (mean negative log-likelihood a token in nats, tokens) of windows, a few in memory at a time.

    Arguments are those of `mean_loss`.
    """
    total, num_tokens = 0.0, 0
    for samples in _blocks(windows, max_sequences * collectives.world_size):
        count = sum(sample.num_loss_tokens for sample in samples)
        total += count * mean_loss(
            policy,
            samples,
            collectives,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            device=device,
            collective_forward=collective_forward,
        )
        num_tokens += count
    return total / num_tokens, num_tokens


_BLOCK = 64
"""Forward passes of held-out windows whose tokens are in memory at once."""


def _blocks(windows: Sequence[Window], num_sequences: int) -> Iterator[list[TrainingSample]]:
    """Yield the samples of the windows, so many forward passes of each rank at a time."""
    size = _BLOCK * num_sequences
    for start in range(0, len(windows), size):
        stop = min(start + size, len(windows))
        yield [sample for index in range(start, stop) for sample in windows[index]]


def perplexity(loss: float) -> float:
    """Return exp(loss); infinite where it is too large for a number."""
    return float(torch.tensor(loss, dtype=torch.float64).exp())
