"""Images on one rank and none on the other: weights in blocks, and rows that ranks share, give the same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.image_ranks import FAMILIES, MODES, alone
from torch import Tensor

from rft_dist.testing.ranks import run_ranks
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model

PROGRAM = Path(__file__).parents[1] / "support" / "image_ranks.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image_models")
    sizes = VisionSizes(hidden=32, ffn=48, vision_hidden=32)
    for family in FAMILIES:
        tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
        build_vision_model(path / family, tokenizer, model_type=family, sizes=sizes, seed=4, init_std=0.2)
    return path


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for tensor, value in expected.items():
        error = float((found[tensor] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        assert error < 1e-5, f"{name} {tensor}: {error:.2e}"


def test_ranks_with_and_without_images_agree(models: Path, tmp_path: Path) -> None:
    run_ranks(PROGRAM, 2, tmp_path, models, environment={"PYTHONPATH": str(PROGRAM.parents[1])}, seconds=200)
    for family in FAMILIES:
        # the second pass has the text rows on both ranks
        expected = alone(models / family, text_weight=3.0)
        for rank in range(2):
            assert_same(load_file(tmp_path / f"fsdp_{family}_{rank}.safetensors"), expected, f"fsdp {family} {rank}")
        for mode in MODES:
            shares = [load_file(tmp_path / f"{mode}_{family}_{rank}.safetensors") for rank in range(2)]
            summed = {name: sum((share[name] for share in shares[1:]), shares[0][name]) for name in shares[0]}
            assert_same(summed, alone(models / family, text_weight=0.0), f"{mode} {family}")
