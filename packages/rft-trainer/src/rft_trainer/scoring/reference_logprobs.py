"""Log-probs of the reference policy, computed once before training and kept in a file beside the run.

The file holds one float32 a response token and the lengths of the responses, as safetensors; its metadata hold the key
of what they were computed from (token ids, model) and the hash of the numbers. A file of another key, or a damaged one,
is not used: the numbers are computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rft_core.durable_files import replace_bytes, storage_errors
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import TrainingSample

_LOG = logging.getLogger(__name__)

Score = Callable[[Sequence[TrainingSample]], Sequence[Sequence[float]]]
"""One row of log-probs a sample, one number a response token; the same on every rank, and called on every rank."""


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Rows of log-probs, in nats, one number a response token."""

    values_N: Tensor
    """[N] float32, row after row."""
    ends: tuple[int, ...]
    """Where each row ends in `values_N`."""

    @classmethod
    def of(cls, values_N: Tensor, lengths: Sequence[int]) -> LogprobTable:
        """Make the table of rows that have these lengths."""
        ends = torch.tensor([0, *lengths]).cumsum(0)[1:].tolist()
        return cls(values_N, tuple(ends))

    def row(self, index: int) -> tuple[float, ...]:
        """Return the log-probs of one sample."""
        start = self.ends[index - 1] if index else 0
        return tuple(self.values_N[start : self.ends[index]].tolist())


@dataclass(frozen=True, slots=True)
class ReferenceLogprobs:
    """The reference's log-probs of all samples of a run: from the file of the run, or computed and written there."""

    file: Path
    score: Score
    collectives: Collectives
    model: Mapping[str, str]
    """Hashes of what the reference policy is made of."""

    def __call__(self, samples: Sequence[TrainingSample]) -> LogprobTable:
        """Return the log-probs of `samples`; every rank calls it with the same ones.

        Raises:
            StorageError: the file cannot be written.
        """
        key, lengths = samples_key(samples, self.model), _lengths(samples)
        found = self._agreed(key, sum(lengths))
        if found is not None:
            return LogprobTable.of(found, lengths)
        rows = self.score(samples)
        values_N = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
        if self.collectives.rank == 0:
            write_table(self.file, values_N, lengths, key)
        return LogprobTable.of(values_N, lengths)

    def _agreed(self, key: str, size: int) -> Tensor | None:
        """Return the numbers of the file that rank 0 has; None on every rank where it cannot be used."""
        own = b""
        if self.collectives.rank == 0:
            values_N = read_table(self.file, key)
            own = b"" if values_N is None or len(values_N) != size else values_N.numpy().tobytes()
        found = own if self.collectives.world_size == 1 else self.collectives.gather_bytes(own)[0]
        return torch.frombuffer(bytearray(found), dtype=torch.float32) if found else None


def samples_key(samples: Sequence[TrainingSample], model: Mapping[str, str]) -> str:
    """Compute the SHA-256 of the samples' tokens and images, and of the model's hashes."""
    digest = hashlib.sha256(json.dumps(dict(sorted(model.items()))).encode())
    for sample in samples:
        images = [image.digest for image in getattr(sample.media, "images", ())]
        record = [sample.sample_id, sample.prompt_length, list(sample.token_ids), images]
        digest.update(json.dumps(record).encode() + b"\n")
    return digest.hexdigest()


def write_table(file: Path, values_N: Tensor, lengths: Sequence[int], key: str) -> None:
    """Write log-probs with their key; the file is replaced at once or not at all."""
    with storage_errors("make", file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"logprobs": values_N, "lengths": torch.tensor(lengths, dtype=torch.int64)}
    replace_bytes(file, save(tensors, metadata={"key": key, "sha256": _digest(values_N)}))


def read_table(file: Path, key: str) -> Tensor | None:
    """Read the log-probs of a file that was written with this key; None where there is none, or it is damaged."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            metadata, values_N = opened.metadata() or {}, opened.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        _LOG.warning("%s cannot be read (%s): the reference's log-probs are computed again", file, error)
        return None
    if metadata.get("key") != key:
        _LOG.warning("%s is of other rows or of another model: the reference's log-probs are computed again", file)
        return None
    if values_N.dtype != torch.float32 or metadata.get("sha256") != _digest(values_N):
        _LOG.warning("%s is damaged: the reference's log-probs are computed again", file)
        return None
    return values_N


def _digest(values_N: Tensor) -> str:
    return hashlib.sha256(values_N.numpy().tobytes()).hexdigest()


def _lengths(samples: Sequence[TrainingSample]) -> list[int]:
    return [sample.num_tokens - sample.prompt_length for sample in samples]
