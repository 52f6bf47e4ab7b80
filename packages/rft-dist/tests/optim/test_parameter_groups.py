"""Rates and decays of parameters by name: the groups that AdamW is given, and the names that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft_core.errors import OptionsError
from rft_dist.optim.adamw import LocalAdamW
from rft_dist.optim.parameter_groups import (
    ParameterGroups,
    groups_of_model,
    matches,
    require_known_names,
    set_learning_rate,
)
from rft_dist.settings import AdamSettings, factors_of, factors_refusal


class Decoder(nn.Module):
    """An embedding, a layer, a norm and an output layer, which may be the embedding's matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def decayed(model: nn.Module, adam: AdamSettings) -> list[str]:
    groups = groups_of_model(adam, model, model.named_parameters())
    return [name for name, p in model.named_parameters() if groups.decay_factor(name, p.ndim) > 0]


def test_norms_biases_and_embeddings_are_not_decayed() -> None:
    assert decayed(Decoder(tied=False), AdamSettings()) == ["layer.weight", "lm_head.weight"]
    assert decayed(Decoder(tied=True), AdamSettings()) == ["layer.weight"], "the head is the embedding"


def test_a_factor_decays_what_is_not_and_spares_what_is() -> None:
    adam = AdamSettings(l2_factors="embed_tokens=1,norm.bias=0.5,layer=0")
    assert decayed(Decoder(tied=False), adam) == ["embed_tokens.weight", "norm.bias", "lm_head.weight"]


def test_rows_of_an_embedding_are_of_it() -> None:
    groups = ParameterGroups(embeddings=frozenset({"model.embed_tokens.weight"}), rates=(("model.embed_tokens", 3.0),))
    assert groups.decay_factor("model.embed_tokens.weight[7:]", 2) == 0
    assert groups.decay_factor("lm_head.weight[7:]", 2) == 1
    assert groups.rate_factor("model.embed_tokens.weight[7:]") == 3


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.1", "model.layers.1.mlp.weight", True),
        ("model.layers.1", "model.layers.10.mlp.weight", False),
        ("model.layers.1", "model.layers.1", True),
        ("*lora_B", "model.layers.1.q_proj.lora_B", True),
        ("*lora_B", "model.layers.1.q_proj.lora_B.more", False),
        ("model.layers.?.mlp*", "model.layers.3.mlp.weight", True),
        ("layers.1", "model.layers.1.mlp.weight", False),
    ],
)
def test_a_name_stands_for_itself_and_for_what_lies_below_it(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_of_two_factors_the_later_one_holds() -> None:
    groups = ParameterGroups(rates=factors_of("lr_factors", "model=0.5, model.layers.1=0.25"))
    assert [groups.rate_factor(f"model.layers.{n}.w") for n in (0, 1)] == [0.5, 0.25]
    assert groups.rate_factor("lm_head.weight") == 1


def test_groups_are_in_one_order_whatever_a_rank_holds() -> None:
    groups = ParameterGroups(rates=(("b", 0.5),))
    held = {name: torch.ones(2, 2) if name != "v" else torch.ones(2) for name in ("v", "a", "b")}
    found = groups.of(held, 0.1)
    assert [(g["weight_decay"], g["rate_factor"]) for g in found] == [(0.1, 1.0), (0.1, 0.5), (0.0, 1.0)]
    assert [[p is held[n] for p in g["params"]] for g, n in zip(found, "abv", strict=True)] == [[True]] * 3
    fewer = groups.of({name: held[name] for name in ("v", "b")}, 0.1)
    assert [(g["weight_decay"], g["rate_factor"]) for g in fewer] == [(0.1, 0.5), (0.0, 1.0)]
    set_learning_rate(found, 0.25)
    assert [g["lr"] for g in found] == [0.25, 0.125, 0.25]


def test_a_step_moves_by_the_rate_and_the_decay_of_each() -> None:
    """With a gradient of zero AdamW is decay alone: w <- w (1 - rate r_p l2 d_p)."""
    groups = ParameterGroups(
        rates=(("slow", 0.5),), decays=(("spared", 0.0), ("heavy", 2.0)), embeddings=frozenset({"table"})
    )
    held = {name: torch.ones(2, 2) for name in ("plain", "slow", "spared", "heavy", "table")}
    adamw = LocalAdamW(held, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.5, groups=groups)
    adamw.update({name: torch.zeros(2, 2) for name in held}, 0.25)
    assert {name: float(tensor[0, 0]) for name, tensor in held.items()} == {
        "plain": 1 - 0.25 * 0.5,
        "slow": 1 - 0.125 * 0.5,
        "spared": 1.0,
        "heavy": 1 - 0.25 * 1.0,
        "table": 1.0,
    }


@pytest.mark.parametrize("text", ["model", "model=", "=2", "model=-1", "model=nan", "model=inf", "model=1=2", "a=1,b"])
def test_an_entry_without_a_name_or_a_factor_is_refused(text: str) -> None:
    refusal = factors_refusal("lr_factors", text)
    assert refusal is not None
    assert (refusal.code, refusal.names) == ("optimizer.factor", ("lr_factors",))
    name, _, factor = refusal.do.removeprefix("--lr_factors ").partition("=")
    assert factors_of("lr_factors", f"{name}={factor}") == ((name, 0.1),), "the remedy can be read"
    with pytest.raises(OptionsError):
        factors_of("lr_factors", text)


def test_factors_with_which_no_weight_changes_are_refused() -> None:
    names = ["model.embed_tokens.weight", "score.weight"]
    require_known_names(AdamSettings(lr_factors="model=0"), names)
    require_known_names(AdamSettings(lr_factors="*=0,score=0.1"), names)
    for factors in ("*=0", "model=0,score=0", "*=1,*=0"):
        with pytest.raises(OptionsError) as caught:
            require_known_names(AdamSettings(lr_factors=factors), names)
        assert caught.value.problem.code == "optimizer.nothing_trained"
        assert "each of the 2 parameters" in caught.value.problem.what


def test_a_name_that_nothing_trained_has_is_refused_with_the_nearest() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "score.weight"]
    require_known_names(AdamSettings(lr_factors="model.layers=2, score=1,*mlp*=3", l2_factors="score.weight=0"), names)
    require_known_names(AdamSettings(), [])
    for setting in ("lr_factors", "l2_factors"):
        with pytest.raises(OptionsError) as caught:
            require_known_names(AdamSettings(**{setting: "model=1,model.embed_token=0.1"}), names)
        assert caught.value.problem.code == "optimizer.no_such_parameter"
        assert caught.value.problem.where == f"--{setting}"
        assert caught.value.problem.do == f"--{setting} model.embed_tokens=0.1"
        with pytest.raises(OptionsError, match=r"there are model, model\.embed_tokens"):
            require_known_names(AdamSettings(**{setting: "zzz=1"}), names)
