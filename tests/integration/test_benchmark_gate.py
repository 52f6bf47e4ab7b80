"""The benchmark beside TRL may time only what agrees: its equality gate, on the smallest case.

Part of the long matrix, and of environments that hold the dependency group `bench`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.night

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "grpo_vs_trl.py"
SMALLEST = "1024/64/2/p32"

if importlib.util.find_spec("trl") is not None:

    def test_loss_and_gradients_of_a_grpo_step_equal_those_of_trl() -> None:
        command = [sys.executable, str(BENCHMARK), "--gate_only", "--cases", SMALLEST]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{SMALLEST}: loss " in done.stdout
