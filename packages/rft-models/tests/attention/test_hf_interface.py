"""The attention that transformers calls: dense masks against the written-out formula, and what a layout is handed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_models.attention import hf_interface as module
from rft_models.attention.hf_interface import (
    IMPLEMENTATION,
    attention_function,
    native_attention_mode,
    no_mask,
    register,
    switched,
)

HEADS, GROUPS, WIDTH = 4, 2, 6


def tensors(num_queries: int, num_keys: int, groups: int = GROUPS) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, Lq, D] queries, [B, G, Lk, D] keys and values."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, HEADS, num_queries, WIDTH), *[(2, groups, num_keys, WIDTH)] * 2)
    query, key, value = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return query, key, value


def written_out(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, cap: float | None) -> Tensor:
    """softmax(softcap(scaling q k^T)) v where `seen`, [B, Lq, H, D]."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = scaling * torch.einsum("bhqd,bhkd->bhqk", query, key)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(3, 3), (2, 4), (1, 4), (1, 1), (2, 2), (3, 7)])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_without_a_mask_the_last_query_sees_all_keys(
    num_queries: int, num_keys: int, softcap: float | None, groups: int
) -> None:
    query, key, value = tensors(num_queries, num_keys, groups)
    behind = num_keys - num_queries
    seen = torch.arange(num_keys)[None, :] <= torch.arange(num_queries)[:, None] + behind
    for scaling, scale in ((0.3, 0.3), (None, WIDTH**-0.5)):
        found, weights = attention_function(nn.Identity(), query, key, value, None, scaling=scaling, softcap=softcap)
        torch.testing.assert_close(found, written_out(query, key, value, seen, scale, softcap), atol=1e-12, rtol=0)
        assert found.is_contiguous()
        assert weights is None


@pytest.mark.parametrize("num_keys", [3, 5])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_a_mask_alone_says_what_is_seen(num_keys: int, softcap: float | None) -> None:
    query, key, value = tensors(3, num_keys)
    seen = torch.ones(2, 1, 3, num_keys, dtype=torch.bool)
    seen[0, 0, 0, 1] = seen[1, 0, 2, :2] = False
    found, _ = attention_function(nn.Identity(), query, key, value, seen, scaling=0.3, softcap=softcap)
    torch.testing.assert_close(found, written_out(query, key, value, seen, 0.3, softcap), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["softcapped_attention", "scaled_dot_product_attention"])
def test_dropout_is_off_unless_it_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    holder: Any = module if name == "softcapped_attention" else torch.nn.functional
    original: Callable[..., Tensor] = getattr(holder, name)

    def noted(*words: Any, **options: Any) -> Tensor:
        asked.append(options["dropout" if holder is module else "dropout_p"])
        return original(*words, **options)

    monkeypatch.setattr(holder, name, noted)
    softcap = 0.8 if holder is module else None
    given: list[dict[str, Any]] = [{}, {"dropout": 0.25}]
    for options in given:
        attention_function(nn.Identity(), *tensors(3, 3), None, softcap=softcap, **options)
    assert asked == [0.0, 0.25]


class Layout:
    """A layout that keeps what it is asked for."""

    def attend(self, *words: Tensor, **settings: Any) -> Tensor:
        self.words, self.settings = words, settings
        return words[0]


@pytest.mark.parametrize(
    ("given", "of_module", "window"),
    [({}, None, None), ({"sliding_window": 4}, None, 4), ({}, 5, 5), ({"sliding_window": None}, 5, None)],
)
def test_a_layout_is_handed_the_row_and_every_setting(
    given: dict[str, Any], of_module: int | None, window: int | None
) -> None:
    layer: Any = nn.Identity()
    if of_module is not None:
        layer.sliding_window = of_module
    layout = Layout()
    query, key, value = tensors(3, 3)
    words = (query[:1], key[:1], value[:1], no_mask("cpu"))
    settings: dict[str, Any] = {"dropout": 0.1, "scaling": 0.3, "softcap": 2.0, "packed_layout": layout}
    found, _ = attention_function(layer, *words, **settings, **given)
    assert torch.equal(found, query[:1].transpose(1, 2))
    for ours, theirs in zip(layout.words, (query, key, value), strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))
    assert layout.settings == {"scaling": 0.3, "sliding_window": window, "softcap": 2.0, "dropout": 0.1}
    attention_function(layer, *words, packed_layout=settings["packed_layout"])
    assert layout.settings["scaling"] == WIDTH**-0.5
    assert (layout.settings["softcap"], layout.settings["dropout"]) == (None, 0.0)


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "sinks"])
def test_arguments_that_would_change_the_scores_are_refused_unless_they_are_none(name: str) -> None:
    attention_function(nn.Identity(), *tensors(2, 2), None, **{name: None})
    with pytest.raises(OptionsError) as caught:
        attention_function(nn.Identity(), *tensors(2, 2), None, **{name: torch.zeros(1)})
    assert caught.value.problem.code == "models.attention_argument"


def test_transformers_is_told_the_function_and_the_form_of_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.masking_utils import sdpa_mask

    told: list[tuple[str, object]] = []
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "register", lambda name, function: told.append((name, function)))
    register()
    assert told == [(IMPLEMENTATION, attention_function), (IMPLEMENTATION, sdpa_mask)]


def test_the_placeholder_of_a_mask_has_four_dimensions_and_hides_nothing() -> None:
    mask = no_mask("cpu")
    assert (mask.dtype, mask.tolist()) == (torch.bool, [[[[True]]]])


class Switched:
    """A model that keeps the names of the attentions it was switched to."""

    def __init__(self, model_type: str) -> None:
        self.config = SimpleNamespace(model_type=model_type)
        self.attentions: list[str] = []

    def set_attn_implementation(self, name: str) -> None:
        self.attentions.append(name)


def test_the_models_own_attention_is_used_for_a_while_and_gone_from_also_after_an_error() -> None:
    model = Switched("qwen2")
    with native_attention_mode(model, packed=True):
        assert model.attentions == ["eager"]
    assert model.attentions == ["eager", IMPLEMENTATION]
    with pytest.raises(KeyError), native_attention_mode(model, packed=True):
        raise KeyError
    assert model.attentions == ["eager", IMPLEMENTATION] * 2
    with native_attention_mode(model, packed=False):
        pass
    assert len(model.attentions) == 4


def test_of_a_vision_language_model_the_decoder_is_switched() -> None:
    text, vision, decoder = Switched("qwen2"), Switched("llava"), Switched("qwen2")
    vision.get_decoder = lambda: decoder  # type: ignore[attr-defined]
    assert switched(text) is text
    assert switched(vision) is decoder
