"""One thread a test process, and the runs that several tests of asynchronous rollouts share importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "async_rollouts"))
torch.set_num_threads(1)
