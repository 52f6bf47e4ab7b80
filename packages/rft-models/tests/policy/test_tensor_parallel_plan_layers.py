"""Which layers of a decoder can be cut, case by case, and how ranks count their rows of the output matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError
from rft_models.policy import tensor_parallel_plan
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.tensor_parallel_plan import (
    TensorPlan,
    apply_tensor_parallel,
    shard_output_head,
    tensor_plan,
)

PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.norm": "replicated_with_grad_allreduce",
}


class Layer(nn.Module):
    """Two matrices, a norm of the heads, and a norm that the plan does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm, self.other = nn.LayerNorm(3), nn.LayerNorm(4)


class Decoder(nn.Module):
    """Eleven layers: numbers of two digits have patterns too."""

    def __init__(self, plan: dict[str, str] | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(11)])
        self.config = SimpleNamespace(base_model_tp_plan=plan)


class Model(nn.Module):
    """A decoder named `prefix`, with an output matrix."""

    def __init__(self, prefix: str, plan: dict[str, str] | None) -> None:
        super().__init__()
        self.lm_head: Any = nn.Linear(4, 8, bias=False)
        self.add_module(prefix, Decoder(plan))
        self.prefix = prefix
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 6}
        self.config = SimpleNamespace(get_text_config=self.text_config)
        self.sizes = SimpleNamespace(to_dict=lambda: sizes)

    def text_config(self, *, decoder: bool) -> Any:
        assert decoder
        return self.sizes

    def get_decoder(self) -> Decoder:
        return cast("Decoder", self.get_submodule(self.prefix))

    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().embed

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def policy_of(model: Model) -> CausalPolicy:
    return cast("CausalPolicy", SimpleNamespace(model=model, where="here"))


def planned(
    change: Callable[[Any], object] = lambda layer: None,
    plan: dict[str, str] | None = PLAN,
    prefix: str = "decoder",
    ranks: int = 2,
) -> TensorPlan:
    """The plan of a model whose last layer was changed."""
    model = Model(prefix, plan)
    change(model.get_decoder().layers[10])
    return tensor_plan(policy_of(model), ranks)


@pytest.mark.parametrize("prefix", ["decoder", "body"])
def test_layers_are_named_as_the_whole_model_names_them_in_its_order(prefix: str) -> None:
    found = planned(prefix=prefix)
    layers = [f"{prefix}.layers.{number}" for number in range(11)]
    assert found.by_outputs == tuple(f"{layer}.up" for layer in layers)
    assert found.by_inputs == tuple(f"{layer}.down" for layer in layers)
    assert found.of_heads == tuple(f"{layer}.norm.{own}" for layer in layers for own in ("weight", "bias"))
    assert found.vocabulary == (f"{prefix}.embed", "lm_head")


class Doubled(nn.Embedding):
    """An embedding that may do more."""


def test_a_vocabulary_that_is_no_plain_matrix_stays_whole() -> None:
    for change in (
        lambda model: setattr(model.get_decoder(), "embed", Doubled(8, 4)),
        lambda model: setattr(model, "lm_head", nn.Identity()),
    ):
        model = Model("decoder", PLAN)
        change(model)
        assert tensor_plan(policy_of(model), 2).vocabulary == ()


def drop_attention(share: object) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.attention_dropout = share

    return change


def extra(module: nn.Module) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.extra = module

    return change


def replace(name: str, module: nn.Module) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        setattr(layer, name, module)

    return change


GOOD: dict[str, Callable[[Any], None]] = {
    "an uneven side that is not cut": replace("up", nn.Linear(5, 6)),
    "another uneven side that is not cut": replace("down", nn.Linear(6, 5)),
    "dropout of nothing": extra(nn.Dropout(0.0)),
    "attention without dropout": drop_attention(0.0),
    "something else of this name": drop_attention(nn.Identity()),
    "a vector": extra(nn.LayerNorm(5)),
    "an embedding": extra(nn.Embedding(5, 5)),
}
BAD: dict[str, Callable[[Any], None]] = {
    "outputs that do not divide": replace("up", nn.Linear(4, 7)),
    "inputs that do not divide": replace("down", nn.Linear(7, 4)),
    "a layer that is not linear": replace("up", nn.Conv1d(4, 6, 1)),
    "another that is not linear": replace("down", nn.Bilinear(2, 2, 2)),
    "dropout": extra(nn.Dropout(0.1)),
    "attention with dropout": drop_attention(0.1),
    "a matrix beside the plan": extra(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_not_cut_may_be_anything_that_is_no_matrix(name: str) -> None:
    assert planned(GOOD[name]).by_outputs == planned().by_outputs


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    with pytest.raises(PreflightError) as caught:
        planned(BAD[name])
    assert caught.value.problem.code == "tensor.architecture"
    assert caught.value.problem.where == "here"


@pytest.mark.parametrize("plan", [None, {}, {"nothing.*": "colwise"}, PLAN | {"layers.*.other": "elsewhere"}])
def test_a_plan_that_is_absent_or_has_another_cut_is_refused(plan: dict[str, str] | None) -> None:
    with pytest.raises(PreflightError) as caught:
        planned(plan=plan)
    assert caught.value.problem.code == "tensor.architecture"


def test_heads_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(OptionsError) as caught:
        planned(ranks=4)
    assert (caught.value.problem.code, caught.value.problem.where) == ("tensor.uneven", "here")


@dataclass(frozen=True)
class Head:
    """An output layer of which each rank has its rows."""

    layer: Any
    shard: Any = None


class Ranks:
    """The sums of three ranks of which the others have 5 and 2 rows."""

    world_size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.others = {0: [0, 5, 2], 1: [5, 0, 2], 2: [5, 2, 0]}[rank]

    def sum(self, tensor: Tensor) -> Tensor:
        assert (tensor.dtype, int(tensor[self.rank])) == (torch.int64, 3)
        return tensor + torch.tensor(self.others)

    max = sum


def policy_with_head(rows: int) -> Any:
    weight = SimpleNamespace(to_local=lambda: torch.zeros(rows, 4), device=torch.device("cpu"))
    return SimpleNamespace(head=Head(SimpleNamespace(weight=weight)))


@pytest.mark.parametrize(("rank", "offset"), [(0, 0), (1, 5), (2, 7)])
def test_a_rank_has_the_rows_behind_those_of_the_ranks_before_it(rank: int, offset: int) -> None:
    policy, ranks = policy_with_head(3), Ranks(rank)
    shard_output_head(policy, ranks)
    assert policy.head.shard.offset == offset
    assert policy.head.shard.collectives is ranks


@pytest.mark.parametrize("shares_head", [False, True])
def test_a_model_is_tried_before_and_after_it_is_cut(shares_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    training: list[bool] = []
    policy = policy_with_head(3)
    policy.model, policy.where = Model("decoder", PLAN).train(), "here"
    policy.model.sizes.vocab_size = 8
    policy.device, policy.dtype = torch.device("cpu"), torch.bfloat16

    def token_logprobs(tokens: Any) -> tuple[Tensor, None]:
        done.append("computed")
        training.append(policy.model.training or torch.is_grad_enabled())
        assert int(tokens.token_ids_T.max()) < 8
        return torch.full((3,), float(len(done))), None

    def compare(expected: Tensor, actual: Tensor, **given: Any) -> None:
        done.append("compared")
        assert (expected.tolist(), actual.tolist()) == ([1.0] * 3, [3.0] * 3)
        assert (given["dtype"], given["where"]) == (torch.bfloat16, "here")

    policy.token_logprobs = token_logprobs
    monkeypatch.setattr(tensor_parallel_plan, "require_equal_logits", compare)
    apply_tensor_parallel(policy, lambda: done.append("cut"), Ranks(1), shares_head=shares_head)
    assert done == ["computed", "cut", "computed", "compared"]
    assert training == [False, False]
    assert policy.model.training, "as it was"
    assert (policy.head.shard is not None) == shares_head
