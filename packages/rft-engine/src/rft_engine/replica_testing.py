"""Test doubles of replicas: a worker process on a table model, and what a test may make it do.

`python -m rft_engine.replica_testing READ_FD WRITE_FD`; the model settings say how it misbehaves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_engine.replica_worker import ReplicaModel, serve_replica
from rft_engine.testing import FakeCache, FakeDecodableModel

STATES, VOCAB, CARRY = 11, 7, 3
COMMAND = (sys.executable, "-m", "rft_engine.replica_testing")


def table_of(seed: int) -> Tensor:
    """[states, V] logits."""
    return torch.randn((STATES, VOCAB), generator=torch.Generator().manual_seed(seed))


class TroubledModel(FakeDecodableModel):
    """Dies or hangs at a step, the first time that a file is not there yet; slow where told so."""

    def misbehave(self, settings: dict[str, Any]) -> None:
        """Remember how."""
        self._settings, self._steps = settings, 0

    def step(self, cache: FakeCache, token_ids_B: Tensor) -> Tensor:
        self._steps += 1
        time.sleep(self._settings.get("pause", 0.0))
        if self._steps == self._settings.get("trouble_at"):
            marker = Path(self._settings["marker"])
            if not marker.exists() or self._settings.get("always"):
                marker.touch()
                if self._settings["trouble"] == "die":
                    os._exit(9)
                time.sleep(600.0)
        return super().step(cache, token_ids_B)


def make_model(settings: dict[str, Any]) -> ReplicaModel:
    """The table model, at first without values."""
    torch.set_num_threads(1)
    model = TroubledModel(torch.full((STATES, VOCAB), torch.nan), carry=CARRY)
    model.misbehave(settings)
    return ReplicaModel(model, {"table": model.log_SV}, "float32", "cpu")


if __name__ == "__main__":
    serve_replica(int(sys.argv[1]), int(sys.argv[2]), make_model)
