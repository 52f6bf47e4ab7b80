from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_kernels import ops, reference, triton_rows

CASE = (torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), 1.0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the implementations that were called."""
    calls: list[str] = []
    for name, module in (("triton", triton_rows), ("reference", reference)):
        monkeypatch.setattr(module, "selected_logprob_and_entropy", lambda *_, name=name: calls.append(name))
    return calls


def test_a_cpu_takes_the_reference(chosen: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ops.selected_logprob_and_entropy(*CASE)
    assert chosen == ["reference"]


def test_the_interpreter_takes_the_kernel(chosen: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops.selected_logprob_and_entropy(*CASE)
    assert chosen == ["triton"]


def test_float64_takes_the_reference_everywhere(chosen: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops.selected_logprob_and_entropy(CASE[0].double(), *CASE[1:])
    assert chosen == ["reference"]


def test_without_triton_the_reference_is_taken(chosen: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(ops, "_triton_is_installed", lambda: False)
    ops.selected_logprob_and_entropy(*CASE)
    assert chosen == ["reference"]


@pytest.mark.gpu
def test_a_gpu_takes_the_kernel(chosen: list[str]):
    ops.selected_logprob_and_entropy(CASE[0].cuda(), CASE[1].cuda(), 1.0)
    assert chosen == ["triton"]


def test_the_entry_gives_the_same_results_as_the_reference(device: str):
    logits, targets, temperature = CASE
    found = ops.selected_logprob_and_entropy(logits.to(device), targets.to(device), temperature)
    for f, e in zip(found, reference.selected_logprob_and_entropy(logits, targets, temperature), strict=True):
        torch.testing.assert_close(f.cpu(), e)


def test_importing_the_entry_does_not_import_triton():
    # torch itself may look Triton up, so what counts is what the entry adds
    check = "sys.exit(not had and 'triton' in sys.modules)"
    code = f"import torch, sys; had = 'triton' in sys.modules; import rft_kernels.ops; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_of_the_readme_runs():
    readme = Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert len(examples) == 1
    scope: dict[str, torch.Tensor] = {}
    exec(compile(examples[0], str(readme), "exec"), scope)
    assert scope["logits"].grad is not None
