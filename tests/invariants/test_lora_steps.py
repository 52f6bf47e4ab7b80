"""Adapters take the same steps however weights and moments lie on two ranks, and go on to the bit from what was saved.

One launch runs every case of `support/lora_ranks.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.compare import relative_distance
from support.lora_ranks import CASES
from torch import Tensor

from rft_dist.testing.ranks import run_ranks
from rft_models.tiny_models.text import build_character_model

PROGRAM = Path(__file__).parents[1] / "support" / "lora_ranks.py"
pytestmark = [pytest.mark.xdist_group("strategies"), pytest.mark.night]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return build_character_model(folder / "m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seed=0)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote."""
    out = tmp_path_factory.mktemp("lora")
    run_ranks(PROGRAM, 2, out, model, environment={"PYTHONPATH": str(PROGRAM.parents[1])}, seconds=500)
    return out


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"rank_{rank}.json").read_text())


def tensors(folder: Path, case: str, what: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{case.replace(' ', '_')}_{what}_{rank}.safetensors")


def reference_of(case: str) -> str:
    """The case of replicas with the same adapters and types."""
    return " ".join(["replicas", *(word for word in ("dora", "bf16") if word in case)])


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("replicas")])
def test_the_steps_are_those_of_replicas(folder: Path, model: Path, case: str) -> None:
    like, narrow = reference_of(case), "bf16" in case
    assert told(folder)[case]["norms"] == pytest.approx(told(folder)[like]["norms"], rel=1e-2 if narrow else 1e-5)
    found, expected = tensors(folder, case, "adapters"), tensors(folder, like, "adapters")
    assert found.keys() == expected.keys()
    for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector"):
        named = [name for name in sorted(expected) if part in name]
        assert bool(named) or part == ".lora_magnitude_vector"
        apart = relative_distance([found[n] for n in named], [expected[n] for n in named]) if named else 0.0
        assert apart < (0.05 if narrow else 1e-3), part
    base, whole, merged = (
        load_file(model / "model.safetensors"),
        tensors(folder, case, "served"),
        tensors(folder, like, "served"),
    )
    assert whole.keys() == merged.keys()
    for name, tensor in merged.items():
        changed = not torch.equal(whole[name], base[name].to(tensor.dtype))
        assert changed == name.endswith("_proj.weight"), name
        assert float((whole[name] - tensor).float().abs().max()) < (0.02 if narrow else 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_and_only_adapters_are_stepped_on(folder: Path, case: str) -> None:
    for what in ("adapters", "served"):
        one, other = tensors(folder, case, what), tensors(folder, case, what, 1)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for rank in range(2):
        found = told(folder, rank)[case]
        assert all(".lora_" in name for name in found["stepped"])
        assert found["dtypes"] == ["torch.float32"]
    assert set(told(folder)[case]["stepped"]) | set(told(folder, 1)[case]["stepped"]) == set(
        told(folder)["replicas dora" if "dora" in case else "replicas"]["stepped"]
    )


@pytest.mark.parametrize("case", CASES)
def test_a_step_from_saved_state_is_the_uninterrupted_one_to_the_bit(folder: Path, case: str) -> None:
    assert [told(folder, rank)[case]["resumed"] for rank in range(2)] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_model_that_was_loaded(folder: Path, case: str) -> None:
    narrow = "bf16" in case
    expected = told(folder)["loaded bf16" if narrow else "loaded"]
    for rank in range(2):
        assert told(folder, rank)[case]["reference"] == pytest.approx(expected, abs=1e-6)
