"""One torch thread, and the doubles of other programs importable by name: `fake_vllm`, `fake_sglang`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "doubles"))
torch.set_num_threads(1)
