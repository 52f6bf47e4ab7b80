from __future__ import annotations
from collections.abc import Sequence
import hashlib
import numpy as np
from rft_trainer.records.rollouts import TrainingSample

class TokenWindows(Sequence):
    def __init__(self, name, ids, window, num_bytes):
        self.name, self.ids, self.window, self.num_bytes = name, ids, window, num_bytes
        self.num_tokens = len(ids)
        self.data_hash = hashlib.sha256(ids.tobytes()).hexdigest()
    def __len__(self):
        return -(-(self.num_tokens - 1) // (self.window - 1))
    def __getitem__(self, index):
        if not 0 <= index < len(self): raise IndexError
        a = index * (self.window - 1)
        ids = tuple(self.ids[a : a + self.window].tolist())
        return (TrainingSample(f"{self.name}:{a}", ids, 0, 0.0),)
