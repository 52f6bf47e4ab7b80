"""What a policy asks of its backbone, its head and the ranks beside it, with doubles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rft_core.packed_tokens import PackedTokens
from rft_models.backbone.backbone import States
from rft_models.layers.moe_router import AuxLossShare, Router
from rft_models.policy import causal_policy
from rft_models.policy.causal_policy import FUSED_FROM, CausalPolicy

IDS = torch.tensor([10, 11, 12, 13, 14])
TOKENS = PackedTokens(
    IDS, torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, False, True, True, True])
)
TARGETS, HIDDEN = [2, 4], torch.arange(10.0).view(5, 2)
BIAS = torch.tensor(0.25)


class Backbone:
    """Gives states, and notes what it is asked."""

    def __init__(self) -> None:
        self.states_given = States(HIDDEN, None)
        self.split: Any = None
        self.packed = True
        self.asked: list[tuple[Any, ...]] = []

    def states(self, tokens: PackedTokens, routed: list[Tensor] | None = None) -> States:
        assert tokens is TOKENS
        if routed is not None:
            routed.append(torch.full((1,), 7.0))
        return self.states_given

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        assert tokens is TOKENS
        return HIDDEN

    def split_over(self, *given: Any) -> None:
        self.asked.append(given)


class Head:
    """Log-probability n of the n-th row from 1, entropy tenfold; notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        self.weight = torch.ones(1)

    def logprobs(self, hidden: Tensor, targets: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        self.calls.append((hidden, targets, given))
        rows = torch.arange(1.0, 1.0 + len(targets), dtype=torch.float64)
        return rows, rows * 10 if given["with_entropy"] else None

    def loss(self, hidden: Tensor, targets: Tensor, objective: Any, **given: Any) -> Any:
        self.calls.append((hidden, targets, given))
        rows = torch.arange(1.0, 1.0 + len(targets), dtype=torch.float64)
        loss = objective(rows, rows * 10, torch.arange(len(targets)).flip(0))
        return SimpleNamespace(loss=loss.sum(), logprobs=rows, entropy=rows * 10)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * 2


class Model(nn.Module):
    """One parameter; notes what is saved of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.saved: list[str] = []
        self.generates = True
        text = SimpleNamespace(to_dict=lambda: {"router": "settings"})

        def text_config(*, decoder: bool) -> Any:
            assert decoder
            return text

        self.config = SimpleNamespace(
            save_pretrained=lambda path: self.saved.append(f"config {path}"),
            get_text_config=text_config,
            model_type="kind",
        )
        self.generation_config = SimpleNamespace(save_pretrained=lambda path: self.saved.append(f"generation {path}"))

    def can_generate(self) -> bool:
        return self.generates


class Policy(CausalPolicy):
    """A policy of doubles."""

    def __init__(self) -> None:
        self.model, self.tokenizer, self.where, self.tower = Model(), None, "here", None
        self.backbone: Any = Backbone()
        self.head: Any = Head()
        self.adapters = None
        self.head_chunk_size: int | None = 6
        self._vocab_size = 100
        self.wrapped: list[tuple[Any, ...]] = []
        self.wrap_forward(self.wrapper)

    def wrapper(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.wrapped.append(arguments)
        return function(*arguments)


def placed(values: list[float], places: list[int] = TARGETS) -> list[float]:
    row = [0.0] * 5
    for place, value in zip(places, values, strict=True):
        row[place] = value
    return row


def test_the_head_runs_on_the_rows_that_predict_targets() -> None:
    policy = Policy()
    logprobs, entropy = policy.token_logprobs(TOKENS)
    [(hidden, targets, given)] = policy.head.calls
    assert torch.equal(hidden, HIDDEN[[1, 3]])
    assert targets.tolist() == [12, 14]
    assert given == {"temperature": 1.0, "with_entropy": False, "entropy_gradient": False, "chunk_size": 6}
    assert logprobs.tolist() == placed([1.0, 2.0])
    assert logprobs.dtype is torch.float64
    assert entropy is None
    assert policy.wrapped == [(TOKENS, 1.0, False, False)]
    logprobs, entropy = policy.token_logprobs(TOKENS, temperature=0.5, with_entropy=True, entropy_gradient=True)
    given = policy.head.calls[-1][2]
    assert given == {"temperature": 0.5, "with_entropy": True, "entropy_gradient": True, "chunk_size": 6}
    assert entropy is not None
    assert entropy.tolist() == placed([10.0, 20.0])


def test_tokens_that_share_a_row_are_predicted_from_it() -> None:
    policy = Policy()
    policy.backbone.states_given = States(HIDDEN, torch.tensor([4, 2, 0, 1, 3]))
    policy.token_logprobs(TOKENS)
    assert torch.equal(policy.head.calls[0][0], HIDDEN[[2, 1]])


def test_the_objective_is_asked_by_tokens_and_its_sum_is_the_loss() -> None:
    policy, asked = Policy(), list[tuple[list[float], ...]]()

    def objective(logprobs: Tensor, entropy: Tensor, tokens: Tensor) -> Tensor:
        asked.append((logprobs.tolist(), entropy.tolist(), tokens.tolist()))
        return logprobs * 3

    found = policy.fused_loss(TOKENS, objective)
    [(hidden, targets, given)] = policy.head.calls
    assert torch.equal(hidden, HIDDEN[[1, 3]])
    assert targets.tolist() == [12, 14]
    assert given == {"temperature": 1.0, "chunk_size": 6}
    assert asked == [([1.0, 2.0], [10.0, 20.0], [4, 2])]
    assert float(found.loss) == 9.0
    assert (found.logprobs.tolist(), found.entropy.tolist()) == (placed([1.0, 2.0]), placed([10.0, 20.0]))
    assert found.logprobs.dtype is torch.float64
    policy.fused_loss(TOKENS, objective, temperature=0.25)
    assert policy.head.calls[-1][2]["temperature"] == 0.25


def test_ranks_that_share_a_row_have_an_even_share_of_its_targets_and_merge_what_they_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy()
    split = SimpleNamespace(merge=lambda values: values + 100)
    policy.backbone.split, policy.backbone.states_given = split, States(HIDDEN, None, (0, 5), 9)

    def balance(*given: Any) -> tuple[Tensor, Tensor]:
        assert given[0] is split
        assert given[1] is HIDDEN
        assert (given[2], given[3].tolist(), given[4].tolist()) == (9, TARGETS, [1, 3])
        return torch.tensor([4]), HIDDEN[3:4]

    monkeypatch.setattr(causal_policy, "balance_rows", balance)
    logprobs, entropy = policy.token_logprobs(TOKENS, with_entropy=True)
    assert logprobs.tolist() == [100.0, 100.0, 100.0, 100.0, 101.0]
    assert entropy is not None
    assert entropy.tolist() == [100.0, 100.0, 100.0, 100.0, 110.0]
    assert policy.head.calls[0][1].tolist() == [14]
    found = policy.fused_loss(TOKENS, lambda logprobs, entropy, tokens: logprobs)
    assert found.entropy.tolist() == [100.0, 100.0, 100.0, 100.0, 110.0]


def test_ranks_that_all_have_the_whole_row_compute_all_of_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    policy.backbone.split = SimpleNamespace(merge=lambda values: values + 1)
    monkeypatch.delattr(causal_policy, "balance_rows")
    logprobs, _ = policy.token_logprobs(TOKENS)
    assert logprobs.tolist() == [1.0, 1.0, 2.0, 1.0, 3.0]


def balanced(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the routers' loss is asked."""
    asked: list[tuple[Any, ...]] = []

    def load_balancing(logits: list[Tensor], rows: Tensor, router: Any, counts: Any, biases: Any) -> AuxLossShare:
        assert biases == [BIAS]
        asked.append(([float(one) for one in logits], rows.tolist(), router, counts))
        return AuxLossShare(*(torch.tensor(number) for number in (0.5, 3.0, 1.5, 2.0, 4.0)))

    def gates(model: Any) -> list[Any]:
        assert model is policy.model
        return [SimpleNamespace(e_score_correction_bias=BIAS)]

    monkeypatch.setattr(causal_policy, "load_balancing_loss", load_balancing)
    monkeypatch.setattr(causal_policy, "gates_of", gates)
    policy.router = cast("Router", SimpleNamespace(num_experts=8))
    return asked


def test_the_routers_loss_is_of_the_rows_of_the_same_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    asked, counts = balanced(policy, monkeypatch), torch.ones(8)
    logprobs, entropy, share = policy.token_logprobs_and_balance(TOKENS, expert_counts_E=counts)
    assert asked == [([7.0], [1, 3], policy.router, counts)]
    assert logprobs.tolist() == placed([1.0, 2.0])
    assert entropy is None
    assert [float(getattr(share, field.name)) for field in fields(share)] == [0.5, 3.0, 1.5, 2.0, 4.0]
    given = {"temperature": 1.0, "with_entropy": False, "entropy_gradient": False, "chunk_size": 6}
    assert policy.head.calls[0][2] == given
    assert torch.equal(policy.head.calls[0][0], HIDDEN[[1, 3]])
    policy.token_logprobs_and_balance(
        TOKENS, expert_counts_E=None, temperature=0.5, with_entropy=True, entropy_gradient=True
    )
    given = {"temperature": 0.5, "with_entropy": True, "entropy_gradient": True, "chunk_size": 6}
    assert policy.head.calls[1][2] == given
    assert asked[1][3] is None
    assert policy.num_experts == 8
    assert policy.num_routers == 1


def test_a_rank_that_shares_rows_balances_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    asked = balanced(policy, monkeypatch)
    policy.backbone.states_given = States(HIDDEN[2:], None, (2, 5), 5)
    policy.token_logprobs_and_balance(TOKENS, expert_counts_E=None)
    assert asked[0][1] == [1], "row 3, counted from the first one here"
    assert torch.equal(policy.head.calls[0][0], HIDDEN[3:4])
    assert policy.head.calls[0][1].tolist() == [14]


def test_experts_are_counted_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    balanced(policy, monkeypatch)

    def count(logits: list[Tensor], rows: Tensor, router: Any, biases: Any) -> Any:
        assert not torch.is_grad_enabled()
        assert biases == [BIAS]
        assert router is policy.router
        return [float(one) for one in logits], rows.tolist()

    monkeypatch.setattr(causal_policy, "count_experts", count)
    assert policy.expert_counts(TOKENS) == ([7.0], [1, 3])
    assert policy.wrapped == [(TOKENS,)]


def test_a_router_is_read_and_tried_once_with_the_models_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, done, router = Policy(), list[Any](), SimpleNamespace(num_experts=2)

    @contextmanager
    def native(model: Any, *, packed: bool) -> Iterator[None]:
        assert model is policy.model
        done.append(("native", packed))
        yield
        done.append("restored")

    def read(model_type: str, config: Any, where: str) -> Any:
        done.append((model_type, config, where))
        return router

    def verify(model: Any, given: Any, where: str) -> None:
        done.append((model is policy.model, given is router, where))

    monkeypatch.setattr(causal_policy, "native_attention_mode", native)
    monkeypatch.setattr(causal_policy, "router_of", read)
    monkeypatch.setattr(causal_policy, "verify_router", verify)
    assert policy.router is policy.router is router
    assert done == [("kind", {"router": "settings"}, "here"), ("native", True), (True, True, "here"), "restored"]


@pytest.mark.parametrize(
    ("dtype", "device", "chunk", "rows", "prefers"),
    [
        (torch.bfloat16, "cpu", None, FUSED_FROM // 100, False),
        (torch.bfloat16, "cpu", None, FUSED_FROM // 100 + 1, True),
        (torch.float16, "cpu", 5, 1, True),
        (torch.float32, "cpu", 5, 1, False),
        (torch.float32, "meta", 5, 1, True),
        (torch.float32, "meta", None, 1, False),
        (torch.float32, "meta", None, -1, False),
    ],
)
def test_a_fused_loss_is_preferred_where_logits_are_many_and_the_device_is_quick(
    dtype: torch.dtype, device: str, chunk: int | None, rows: int, prefers: bool
) -> None:
    policy = Policy()
    policy.head_chunk_size = chunk
    if rows < 0:  # exactly the limit
        rows, policy._vocab_size = 1, FUSED_FROM
    policy.model.weight = nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    policy.head.weight = policy.model.weight
    assert policy.prefers_fused_loss(rows) == prefers


def test_the_head_and_the_packed_forward_are_compared_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, found = Policy(), list[dict[str, Any]]()

    def check(model: Any, tower: Any, logits: Any, vocab_size: int, **given: Any) -> None:
        assert (model is policy.model, tower, vocab_size) == (True, None, 100)
        assert torch.equal(logits(TOKENS), HIDDEN * 2)
        found.append(given)

    monkeypatch.setattr(causal_policy, "check_logits", check)
    policy.verify()
    policy.verify(device=torch.device("meta"), dtype=torch.float16)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert found == [
        {"packed": True, "device": cpu, "dtype": torch.bfloat16, "where": "here"},
        {"packed": True, "device": meta, "dtype": torch.float16, "where": "here"},
    ]
    assert policy.wrapped == [(TOKENS,)] * 2
    assert policy.hidden_states(TOKENS) is HIDDEN
    assert policy.wrapped == [(TOKENS,)] * 3


def test_a_wrapped_forward_uses_the_tower_for_every_row_and_ranks_are_handed_on() -> None:
    policy, ranks = Policy(), SimpleNamespace()
    policy.tower = SimpleNamespace(runs_always=False)  # type: ignore[assignment]
    policy.wrap_forward(policy.wrapper)
    assert policy.tower is not None
    assert policy.tower.runs_always
    policy.enable_sequence_parallel(ranks)  # type: ignore[arg-type]
    policy.enable_sequence_parallel(ranks, "ring")  # type: ignore[arg-type]
    assert policy.backbone.asked == [(ranks, "here", "auto"), (ranks, "here", "ring")]


@pytest.mark.parametrize("generates", [True, False])
def test_a_description_has_the_configuration_and_the_tokenizer(generates: bool, tmp_path: Path) -> None:
    policy, folder = Policy(), tmp_path / "a" / "b"
    policy.model.generates = generates
    policy.tokenizer = SimpleNamespace(save_pretrained=lambda path: policy.model.saved.append(f"tokenizer {path}"))  # type: ignore[assignment]
    for _ in range(2):
        policy.save_description(str(folder))
    assert folder.is_dir()
    expected = ["config", "generation", "tokenizer"] if generates else ["config", "tokenizer"]
    assert policy.model.saved == [f"{name} {folder}" for name in expected] * 2


@pytest.mark.parametrize("adapted", [False, True])
def test_a_snapshot_holds_the_weights_of_its_moment(
    adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, written = Policy(), list[tuple[Any, ...]]()
    adapters: Any = SimpleNamespace() if adapted else None
    policy.adapters = adapters

    def beside(given: Any, directory: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        assert given is adapters
        written.append(("adapters", directory))
        return {name: tensor + 1 for name, tensor in weights.items()}

    monkeypatch.setattr(causal_policy, "save_beside", beside)
    monkeypatch.setattr(
        policy, "write", lambda directory, tensors: written.append((directory, tensors["weight"].tolist()))
    )
    write = policy.snapshot(lambda name, tensor: tensor.detach() * (2 if name == "weight" else 0))
    with torch.no_grad():
        policy.model.weight.zero_()
    write(tmp_path)
    assert written == ([("adapters", tmp_path), (tmp_path, [3.0, 3.0])] if adapted else [(tmp_path, [2.0, 2.0])])
