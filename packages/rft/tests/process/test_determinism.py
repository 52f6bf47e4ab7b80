"""Operations that repeat to the bit on a CPU, without the price of filling memory that is written next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest
import torch

from rft.process.determinism import repeat_exactly


@pytest.fixture(autouse=True)
def as_it_was() -> Generator[None]:
    exact, fills = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(("device", "exact"), [("cpu", True), ("cuda:0", False)])
def test_only_a_cpu_pays_for_exactness(device: str, exact: bool) -> None:
    repeat_exactly(device)
    assert torch.are_deterministic_algorithms_enabled() is exact


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_read_before_it_is_written_is_seen_in_debug_mode_alone(debug: bool) -> None:
    repeat_exactly("cpu", debug=debug)
    torch.full((64, 1024), 3.0)  # memory that the next tensor may be given
    assert bool(torch.empty(64, 1024).isnan().all()) is debug


def test_the_compiler_is_not_loaded() -> None:
    code = (
        "import sys; from rft.process.determinism import repeat_exactly\n"
        "before = set(sys.modules); repeat_exactly('cpu')\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] in ('torch', 'sympy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
