"""Test doubles of replicas: a worker process on a table model, with failures that a test can order.

`python -m rft_engine.testing.replica_worker READ_FD WRITE_FD`; the model settings say how it misbehaves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_engine.replicas.worker import ReplicaModel, serve_replica
from rft_engine.testing.table_model import FakeCache, FakeDecodableModel
from rft_engine.weight_sync.shared_images import PlainMedia

STATES, VOCAB, CARRY = 11, 7, 3
COMMAND = (sys.executable, "-m", "rft_engine.testing.replica_worker")


def table_of(seed: int) -> Tensor:
    """Return logits of the table model, [states, V]."""
    return torch.randn((STATES, VOCAB), generator=torch.Generator().manual_seed(seed))


class TroubledModel(FakeDecodableModel):
    """Table model that exits, hangs or stops at a step while a marker file is absent; sleeps `pause` seconds a step."""

    def misbehave(self, settings: dict[str, Any]) -> None:
        """Set the misbehaviour: pause, step and kind of the trouble."""
        self._settings, self._steps = settings, 0

    def step(self, cache: FakeCache, token_ids_B: Tensor) -> Tensor:
        self._steps += 1
        time.sleep(self._settings.get("pause", 0.0))
        if self._steps == self._settings.get("trouble_at"):
            marker = Path(self._settings["marker"])
            if not marker.exists() or self._settings.get("always"):
                # first: the process that is started in this one's place finds the marker, and works
                marker.touch()
                if self._settings["trouble"] == "die":
                    os._exit(9)
                if self._settings["trouble"] == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600.0)
        return super().step(cache, token_ids_B)


@dataclass(frozen=True, slots=True)
class FakeImage:
    """An image that is a number."""

    number: int
    grid: tuple[int, int, int] | None = (1, 1, 2)
    num_tokens: int = 1

    @property
    def pixel_values(self) -> Tensor:
        """Pixel values of the image: [2] float32."""
        return torch.tensor([0.5 * self.number, 0.5 * self.number])

    @property
    def digest(self) -> str:
        """Digest of the image's number."""
        return f"digest-{self.number}"


@dataclass(frozen=True, slots=True)
class FakeMedia:
    """Images of a prompt; together they are the state in which the table model reads it."""

    images: tuple[FakeImage, ...]
    image_token_id: int = 6

    @classmethod
    def of(cls, *numbers: int) -> FakeMedia:
        """Make media of images with these numbers."""
        return cls(tuple(FakeImage(number) for number in numbers))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(first token, number of tokens) of each image: one placeholder each."""
        return tuple((index, 1) for index in range(len(self.images)))

    @property
    def number(self) -> int:
        """Sum of the images' numbers, which the table model takes in their place."""
        return sum(image.number for image in self.images)


def number_of(plain: PlainMedia, pixel_values: Sequence[Tensor]) -> int:
    """A `MakeMedia`: the number that `FakeMedia.number` gives."""
    assert [image["grid"] for image in plain["images"]] == [[1, 1, 2]] * len(pixel_values)
    assert len(plain["spans"]) == len(pixel_values)
    return int(sum(float(values.sum()) for values in pixel_values))


def make_model(settings: dict[str, Any]) -> ReplicaModel:
    """The table model, at first without values."""
    torch.set_num_threads(1)
    model = TroubledModel(torch.full((STATES, VOCAB), torch.nan), carry=CARRY)
    model.misbehave(settings)
    return ReplicaModel(model, {"table": model.log_SV}, "float32", "cpu", number_of)


if __name__ == "__main__":
    serve_replica(int(sys.argv[1]), int(sys.argv[2]), make_model)
