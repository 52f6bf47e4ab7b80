from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_kernels import ops
from rft_kernels.reference import logprobs
from rft_kernels.reference import vocab_slabs as reference_slabs
from rft_kernels.triton import fused_logprobs, merge, row_kernels
from rft_kernels.triton import vocab_slabs as triton_slabs

CASE = (torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), 1.0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the implementations that were called."""
    calls: list[str] = []
    for name, module in (("triton", row_kernels), ("reference", logprobs)):
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


SLAB_CALLS = {
    "slab_sums": lambda x: ops.slab_sums(x, torch.tensor([1]), 0, temperature=1.0),
    "slab_gradients": lambda x: ops.slab_gradients(
        x.clone(), torch.tensor([1]), 0, *([x.new_zeros(1)] * 4), temperature=1.0
    ),
    "merge_sums": lambda x: ops.merge_sums([part_of(x)]),
    "join_sums": lambda x: ops.join_sums(part_of(x)),
    "fused_sums": lambda x: ops.fused_sums(x, x, torch.tensor([0]), temperature=1.0),
}


def part_of(numbers: torch.Tensor) -> ops.SlabSums:
    ones = torch.ones_like(numbers[:, 0])
    return ops.SlabSums(ones, ones, ones, ones, ones.long())


@pytest.mark.parametrize("name", list(SLAB_CALLS))
def test_each_slab_operation_goes_where_its_tensors_can(name: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    module = {"fused_sums": fused_logprobs, "merge_sums": merge, "join_sums": merge}.get(name, triton_slabs)
    monkeypatch.setattr(module, name, lambda *_, **__: calls.append("triton"))
    monkeypatch.setattr(reference_slabs, name, lambda *_, **__: calls.append("reference"))
    call, numbers = SLAB_CALLS[name], CASE[0]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call(numbers)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    call(numbers)
    call(numbers.double())
    monkeypatch.setattr(ops, "_triton_is_installed", lambda: False)
    call(numbers)
    assert calls == ["reference", "triton", "reference", "reference"]


@pytest.mark.gpu
def test_a_gpu_takes_the_kernel(chosen: list[str]):
    ops.selected_logprob_and_entropy(CASE[0].cuda(), CASE[1].cuda(), 1.0)
    assert chosen == ["triton"]


def test_the_entry_gives_the_same_results_as_the_reference(device: str):
    logits, targets, temperature = CASE
    found = ops.selected_logprob_and_entropy(logits.to(device), targets.to(device), temperature)
    for f, e in zip(found, logprobs.selected_logprob_and_entropy(logits, targets, temperature), strict=True):
        torch.testing.assert_close(f.cpu(), e)


def test_importing_the_entry_does_not_import_triton():
    # torch itself may look Triton up, so what counts is what the entry adds
    check = "sys.exit(not had and 'triton' in sys.modules)"
    code = f"import torch, sys; had = 'triton' in sys.modules; import rft_kernels.ops; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_examples_of_the_readme_run(device: str):
    assert device in ("cpu", "cuda")
    readme = Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    assert len(examples) == 2
    scope: dict[str, torch.Tensor] = {}
    exec(compile(examples[0], str(readme), "exec"), scope)
    assert scope["logits"].grad is not None
    slabs: dict[str, Any] = {}
    exec(compile(examples[1], str(readme), "exec"), slabs)
    leaf, kept = slabs["hidden"].clone().requires_grad_(), slabs["targets"] != ops.IGNORED
    log_probs = (leaf @ slabs["weight"].t() / 0.7).log_softmax(-1)
    own = log_probs.gather(1, slabs["targets"].clamp(min=0)[:, None])[:, 0] * kept
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    (-own - 0.01 * entropy * kept).sum().backward()
    torch.testing.assert_close(slabs["rows"].logprob, own.detach())
    torch.testing.assert_close(slabs["rows"].entropy, entropy.detach())
    torch.testing.assert_close(slabs["grad_hidden"], leaf.grad)
    torch.testing.assert_close(ops.merge_sums(slabs["fused"]).logprob, own.detach())
