"""The value head: found in files, drawn from a seed, or refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.critic.value_head import checked_prefix, initial_head, stored_head, value_head


@pytest.mark.parametrize("prefix", ["score", "_v", "a.b_1.c", "V9"])
def test_a_prefix_names_a_tensor(prefix: str) -> None:
    assert checked_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["", "a.", ".a", "9a", "a b", "a..b", "a-b"])
def test_another_is_refused(prefix: str) -> None:
    with pytest.raises(OptionsError) as caught:
        checked_prefix(prefix)
    assert caught.value.problem.code == "models.value_head_prefix"


def test_a_head_is_a_product_with_its_row() -> None:
    weight, state = torch.randn(1, 5), torch.get_rng_state()
    head = value_head(weight)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    assert (head.in_features, head.out_features, head.bias) == (5, 1, None)
    assert head.weight.requires_grad
    assert float(head(torch.ones(5))) == pytest.approx(float(weight.sum()), abs=1e-6)


def test_a_new_head_follows_from_the_seed() -> None:
    expected = keyed_normal((1, 8), derive_key(3, "value-head")) / math.sqrt(9)
    assert torch.equal(initial_head(8, seed=3), expected)


def test_a_head_is_read_where_it_is_and_fits(tmp_path: Path) -> None:
    weight = torch.arange(4.0).view(1, 4)
    tensors = {"score.weight": weight, "wide.weight": torch.ones(2, 4)}
    tensors |= {"biased.weight": weight + 1, "biased.bias": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = stored_head(tmp_path, "score", 4)
    assert found is not None
    assert torch.equal(found, weight)
    assert stored_head(tmp_path, "other", 4) is None
    for prefix, width, code in (
        ("score", 5, "models.value_head_shape"),
        ("wide", 4, "models.value_head_shape"),
        ("biased", 4, "models.value_head_bias"),
    ):
        with pytest.raises(DataError) as caught:
            stored_head(tmp_path, prefix, width)
        assert caught.value.problem.code == code
        assert caught.value.problem.where == str(tmp_path / "model.safetensors")
