"""The output head: scale, bias, softcap and shard of its logits, and what it hands to the functions of slabs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError
from rft_models.logprobs import output_head as module
from rft_models.logprobs.output_head import OutputHead, head_of
from rft_models.logprobs.row_statistics import VocabularyShard

ROWS, WIDTH, VOCAB = 4, 3, 7


class Alone:
    """A rank that meets nobody."""

    rank, world_size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Over ranks."""
        return tensor

    max = sum


def layer(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> nn.Linear:
    made = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def hidden_states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def expected_logits(made: nn.Linear, hidden: Tensor, scale: float, softcap: float | None) -> Tensor:
    logits = hidden.double() @ made.weight.double().T
    logits = scale * (logits if made.bias is None else logits + made.bias.double())
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, 1.1])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_softcapped_after_the_scaled_product(
    scale: float | None, softcap: float | None, bias: bool, dtype: torch.dtype
) -> None:
    made, hidden = layer(dtype, bias=bias), hidden_states(dtype)
    head = OutputHead(made, softcap=softcap) if scale is None else OutputHead(made, scale, softcap)
    found = head.logits(hidden)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    near = 1e-12 if dtype is torch.float64 else 0.05
    torch.testing.assert_close(
        found.double(), expected_logits(made, hidden, scale or 1.0, softcap), atol=near, rtol=near
    )


def test_all_outputs_are_of_the_same_logits() -> None:
    made, hidden, targets = layer(), hidden_states(), torch.tensor([0, 6, 3, 3])
    head = OutputHead(made, 0.25, 1.5)
    table = torch.log_softmax(expected_logits(made, hidden, 0.25, 1.5) / 0.7, 1)
    wanted, entropies = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(1)
    near: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-12}
    logprobs, entropy = head.logprobs(hidden, targets, temperature=0.7, with_entropy=True)
    torch.testing.assert_close(logprobs, wanted, **near)
    assert entropy is not None
    torch.testing.assert_close(entropy, entropies, **near)
    assert head.logprobs(hidden, targets, temperature=0.7, with_entropy=False)[1] is None
    more = head.outputs(hidden, targets, temperature=0.7, with_argmax=True, top_k=2)
    assert more.argmax is not None
    assert more.argmax.tolist() == table.argmax(1).tolist()
    torch.testing.assert_close(more.top_logprobs, table.topk(2, 1).values, **near)
    loss = head.loss(hidden, targets, lambda found, entropy, rows: found + 2 * entropy, temperature=0.7).loss
    torch.testing.assert_close(loss, (wanted + 2 * entropies).sum(), **near)


class Cut(nn.Parameter):
    """A tensor of which this rank has some rows."""

    def to_local(self) -> Tensor:
        """Those rows."""
        return self.detach()[2:5]


@pytest.mark.parametrize("bias", [True, False])
def test_calls_pass_on_the_heads_own_rows_and_every_option(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("linear_logprobs", "linear_outputs", "linear_loss"):
        note = lambda *words, name=name, **options: calls.append((name, words, options))  # noqa: E731
        monkeypatch.setattr(module, name, note)
    shard = VocabularyShard(2, Alone())
    made: Any = SimpleNamespace(weight=Cut(layer().weight), bias=Cut(layer().bias) if bias else None)
    head = OutputHead(made, 0.5, 1.5, shard)
    hidden, targets = hidden_states(), torch.tensor([0, 6, 3, 3])

    def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
        return logprobs

    head.logprobs(hidden, targets, temperature=0.7, with_entropy=True, entropy_gradient=True, chunk_size=3)
    head.logprobs(hidden, targets, temperature=0.7, with_entropy=False)
    head.outputs(hidden, targets, temperature=0.7, with_argmax=True, top_k=4, chunk_size=3)
    head.outputs(hidden, targets, temperature=0.7)
    head.loss(hidden, targets, objective, temperature=0.7, chunk_size=3)
    for name, words, options in calls:
        assert torch.equal(words[0], hidden * 0.5)
        assert torch.equal(words[1], layer().weight[2:5])
        assert words[2] is targets
        assert words[3:] in ((), (objective,))
        own_bias = options.pop("bias")
        assert own_bias is None if not bias else torch.equal(own_bias, 0.5 * layer().bias[2:5])
        assert options.pop("shard") is shard
        assert (options.pop("temperature"), options.pop("softcap")) == (0.7, 1.5)
        # every target of a policy is a token, so that no row is counted
        assert options.pop("all_counted", False) is (name != "linear_outputs")
    assert [(name, len(words), options) for name, words, options in calls] == [
        ("linear_logprobs", 3, {"chunk_size": 3, "with_entropy": True, "entropy_gradient": True}),
        ("linear_logprobs", 3, {"chunk_size": None, "with_entropy": False, "entropy_gradient": False}),
        ("linear_outputs", 3, {"chunk_size": 3, "with_entropy": True, "with_argmax": True, "top_k": 4}),
        ("linear_outputs", 3, {"chunk_size": None, "with_entropy": True, "with_argmax": False, "top_k": 0}),
        ("linear_loss", 4, {"chunk_size": 3}),
    ]


def model_with(layer: object, of_decoder: dict[str, Any]) -> Any:
    """A model whose configuration describes its decoder apart."""

    class Config(SimpleNamespace):
        def to_dict(self) -> dict[str, Any]:
            return vars(self)

        def get_text_config(self, *, decoder: bool) -> Config:
            return Config(**of_decoder) if decoder else Config(logit_scale=77.0)

    return SimpleNamespace(get_output_embeddings=lambda: layer, config=Config())


@pytest.mark.parametrize(
    ("config", "scale", "softcap"),
    [
        ({}, 1.0, None),
        ({"logit_scale": None, "final_logit_softcapping": 30.0}, 1.0, 30.0),
        ({"logit_scale": 0.25}, 0.25, None),
        ({"lm_head_multiplier": 3.0, "logits_scaling": 2.0}, 1.5, None),
        ({"logits_scaling": 8.0}, 0.125, None),
    ],
)
def test_scale_and_softcap_are_read_from_the_decoders_configuration(
    config: dict[str, Any], scale: float, softcap: float | None
) -> None:
    made = layer()
    head = head_of(model_with(made, config), "here")
    assert (head.layer, head.scale, head.softcap, head.shard) == (made, scale, softcap, None)


@pytest.mark.parametrize("wrong", [None, nn.Identity(), SimpleNamespace(weight="none")])
def test_a_model_without_one_output_matrix_is_refused(wrong: object) -> None:
    with pytest.raises(PreflightError) as caught:
        head_of(model_with(wrong, {}), "here")
    assert caught.value.problem.code == "models.no_output_matrix"


@pytest.mark.parametrize(("scale", "softcap", "with_bias"), [(1.0, None, False), (0.3, None, True), (1.0, 2.0, False)])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_terms_over_the_vocabulary_are_those_of_the_logits(
    scale: float, softcap: float | None, with_bias: bool, chunk_size: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(4, 7, bias=with_bias, dtype=torch.float64)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    head = OutputHead(layer, scale=scale, softcap=softcap)
    with_mean = softcap is None

    def gradients(terms: list[torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack([(term * torch.arange(1.0, 6.0)).sum() * n for n, term in enumerate(terms, 1)]).sum()
        return list(torch.autograd.grad(total, [hidden, *layer.parameters()]))

    logits = head.logits(hidden)
    rows = torch.log_softmax(logits, 1)
    expected = [rows.gather(1, targets[:, None])[:, 0], logits.logsumexp(1), *([rows.mean(1)] if with_mean else [])]
    found = [
        x for x in head.vocabulary_terms(hidden, targets, with_mean=with_mean, chunk_size=chunk_size) if x is not None
    ]
    assert len(found) == len(expected)
    for one, other in zip([*found, *gradients(found)], [*expected, *gradients(expected)], strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
    if not with_mean:
        with pytest.raises(OptionsError, match="capped at 2"):
            head.vocabulary_terms(hidden, targets, with_mean=True)
