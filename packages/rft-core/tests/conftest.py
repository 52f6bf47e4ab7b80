"""One torch thread, and hypothesis without deadlines or files: results do not depend on the machine's load."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("rft", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("rft")
