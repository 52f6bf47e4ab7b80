"""SASRec as it is trained well: full soft-max, whole sequences, stopped early on held-out next items."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from rft_algos.evaluation.ranking import ndcg_at_k
from rft_core.durable_files import replace_record
from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, permutation
from rft_genrec.baselines.recommender import ScoredRanking, Scores
from rft_genrec.baselines.sasrec_model import SasRecNetwork, SasRecSizes

_SIZES, _WEIGHTS = "sasrec.json", "sasrec.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class SasRecTraining:
    """How it is trained."""

    epochs: int = 40
    patience: int = 4
    """Epochs without a better NDCG@10 of the held-out items after which it ends; the best epoch is kept."""
    batch_size: int = 64
    """Windows of one step."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    held_out_share: float = 0.1
    """Share of the people whose last item is held out."""


class SasRec(ScoredRanking):
    """A trained network as a recommender; its scores are probabilities of the next item."""

    def __init__(self, network: SasRecNetwork) -> None:
        self.network = network
        self.num_items = network.sizes.num_items

    @torch.no_grad()
    def scores(self, histories: Sequence[Sequence[int]]) -> Scores:
        """Return [H, N] probabilities; they sum to 1 in a row."""
        most = self.network.sizes.max_history
        cut = [list(history[-most:]) for history in histories]
        states_BTD = self.network.states(_padded(cut))
        last_BD = states_BTD[torch.arange(len(cut)), torch.tensor([len(history) for history in cut])]
        return self.network.logits(last_BD).double().softmax(-1).numpy().astype(np.float64)

    def save(self, directory: Path) -> None:
        """Write sizes and weights into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.network.state_dict().items()}, directory / _WEIGHTS)
        replace_record(directory / _SIZES, asdict(self.network.sizes))

    @classmethod
    def load(cls, directory: Path, *, num_items: int) -> SasRec:
        """Read what `save` wrote.

        Raises:
            DataError: no such files, or a model of another catalogue.
        """
        try:
            sizes = SasRecSizes(**json.loads((directory / _SIZES).read_text()))
            weights = load_file(directory / _WEIGHTS)
        except (OSError, ValueError, TypeError) as error:
            raise _unusable(directory, f"cannot be read: {error}", f"{_SIZES} and {_WEIGHTS} are needed") from error
        if sizes.num_items != num_items:
            what = f"is a model of {sizes.num_items} items"
            raise _unusable(directory, what, f"the catalogue has {num_items}")
        network = SasRecNetwork(sizes, seed=0)
        network.load_state_dict(weights)
        return cls(network)


def train_sasrec(
    sequences: Sequence[Sequence[int]],
    sizes: SasRecSizes,
    training: SasRecTraining | None = None,
    *,
    seed: int,
    report: Callable[[int, float, float], None] | None = None,
) -> SasRec:
    """Train on whole sequences, and keep the epoch whose held-out last items are ranked best.

    Args:
        sequences: items of each person in the order of time.
        sizes: of the network.
        training: how.
        seed: of the weights, the order, the masks and the people whose last item is held out.
        report: called after each epoch with its number, its mean loss and the held-out NDCG@10.

    Raises:
        OptionsError: no person has two items.
    """
    training = training or SasRecTraining()
    fitted, held = _held_out(sequences, training.held_out_share, seed)
    windows = [window for sequence in fitted for window in _windows(sequence, sizes.max_history + 1)]
    if not windows:
        raise OptionsError(
            code="genrec.no_sequences",
            what=f"none of {len(sequences)} sequences has two items",
            where="SASRec",
            why="it learns which item comes behind which",
            do="a split with histories, such as --fit_on train",
        )
    network = SasRecNetwork(sizes, seed)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=training.weight_decay
    )
    best, best_weights, since = -1.0, network.state_dict(), 0
    for epoch in range(training.epochs):
        loss = _epoch(network, optimizer, windows, training, derive_key(seed, "sasrec_epoch", epoch))
        found = held_out_ndcg(SasRec(network), held)
        if report is not None:
            report(epoch, loss, found)
        since += 1
        if found > best:
            best, since = found, 0
            best_weights = {name: value.clone() for name, value in network.state_dict().items()}
        if since >= training.patience:
            break
    network.load_state_dict(best_weights)
    return SasRec(network)


def held_out_ndcg(model: SasRec, held: Sequence[tuple[Sequence[int], int]]) -> float:
    """Return the NDCG@10 of (history, next item) pairs; 0 of none."""
    total = 0.0
    for start in range(0, len(held), 512):
        part = held[start : start + 512]
        scores_HN = model.scores([history for history, _ in part])
        targets = np.array([target for _, target in part])
        own = scores_HN[np.arange(len(part)), targets]
        total += sum(ndcg_at_k(int(rank), k=10) for rank in (scores_HN > own[:, None]).sum(1))
    return total / len(held) if held else 0.0


def _epoch(
    network: SasRecNetwork,
    optimizer: torch.optim.Optimizer,
    windows: Sequence[Sequence[int]],
    training: SasRecTraining,
    key: int,
) -> float:
    network.dropout.generator = torch.Generator().manual_seed(key & 0x7FFF_FFFF_FFFF_FFFF)
    order, losses = permutation(key, len(windows)).tolist(), list[float]()
    for start in range(0, len(order), training.batch_size):
        rows_BT = _padded([windows[place] for place in order[start : start + training.batch_size]])
        there_BT = rows_BT >= 0
        # place t predicts item t from those before it; the first from nothing, which learns popularity
        states = network.states(rows_BT[:, :-1])[there_BT]
        loss = functional.cross_entropy(network.logits(states), rows_BT[there_BT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    network.dropout.generator = None
    return math.fsum(losses) / len(losses)


def _held_out(
    sequences: Sequence[Sequence[int]], share: float, seed: int
) -> tuple[list[Sequence[int]], list[tuple[Sequence[int], int]]]:
    """Return the sequences that are fitted, and the last items of some people behind their histories."""
    num = max(1, round(share * len(sequences))) if share else 0
    chosen = set(permutation(derive_key(seed, "sasrec_held_out"), len(sequences))[:num].tolist())
    fitted: list[Sequence[int]] = []
    held: list[tuple[Sequence[int], int]] = []
    for number, sequence in enumerate(sequences):
        if number in chosen and len(sequence) > 1:
            fitted.append(sequence[:-1])
            held.append((sequence[:-1], sequence[-1]))
        else:
            fitted.append(sequence)
    return fitted, held


def _windows(sequence: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cut a sequence so that each item but the first is once the next of a window, newest items in whole windows."""
    if len(sequence) < 2:
        return []
    windows: list[Sequence[int]] = []
    end = len(sequence)
    while end > 1:
        windows.append(sequence[max(0, end - length) : end])
        end -= length - 1
    return windows


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] items, -1 behind the end of a row."""
    items_BT = torch.full((len(rows), max(map(len, rows), default=0)), -1, dtype=torch.int64)
    for row, items in zip(items_BT, rows, strict=True):
        row[: len(items)] = torch.tensor(items, dtype=torch.int64)
    return items_BT


def _unusable(directory: Path, what: str, why: str) -> DataError:
    return DataError(
        code="genrec.sasrec_files",
        what=f"{directory} {what}",
        where=str(directory),
        why=why,
        do="leave --sasrec out: it is then trained anew",
    )
