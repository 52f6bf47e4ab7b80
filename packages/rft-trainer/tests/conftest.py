"""One thread a test process: the tensors are small, and several suites share the machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
