"""More than log-probabilities, ignored targets, vocabularies over ranks, and which code runs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from vocabulary_ranks import Ranks, on_ranks

from rft_models.logprobs import backend
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.epilogue_compiled import compiled_epilogue
from rft_models.logprobs.fused_loss import linear_loss
from rft_models.logprobs.linear_logprobs import linear_logprobs, linear_outputs
from rft_models.logprobs.row_statistics import IGNORED, SlabSums, VocabularyShard

ROWS, WIDTH, VOCAB = 13, 6, 53


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, bias, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def table_of(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits = hidden @ weight.T + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("slab_size", [7, 52, None])
@pytest.mark.parametrize("chunk_size", [4, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_argmax_and_the_most_probable_entries(
    slab_size: int | None, chunk_size: int | None, softcap: float | None
) -> None:
    hidden, weight, bias, targets = inputs()
    found = linear_outputs(
        hidden, weight, targets, bias=bias, temperature=0.7, softcap=softcap, slab_size=slab_size,
        chunk_size=chunk_size, with_argmax=True, top_k=9,
    )  # fmt: skip
    table = table_of(hidden, weight, bias, 0.7, softcap)
    values, ids = table.topk(9, 1)
    assert found.entropy is None
    assert found.argmax is not None
    assert found.argmax.tolist() == table.argmax(1).tolist()
    assert found.top_ids is not None
    assert found.top_ids.tolist() == ids.tolist()
    torch.testing.assert_close(found.top_logprobs, values, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.logprobs, table.gather(1, targets[:, None])[:, 0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("slab_size", [3, None])
def test_the_lowest_id_of_equal_logits_is_the_argmax(slab_size: int | None) -> None:
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]])
    found = linear_outputs(hidden, weight, torch.tensor([0, 1]), slab_size=slab_size, with_argmax=True)
    assert found.argmax is not None
    assert found.argmax.tolist() == [1, 1]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [4, None])
def test_ignored_targets_give_zero_and_no_gradient(with_entropy: bool, chunk_size: int | None) -> None:
    hidden, weight, bias, targets = inputs()
    targets[::3] = IGNORED
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    options = {"with_entropy": with_entropy, "entropy_gradient": with_entropy, "chunk_size": chunk_size}
    found, entropy = linear_logprobs(hidden, weight, targets, bias=bias, **options)
    table = table_of(hidden, weight, bias, 1.0, None)
    counted = targets != IGNORED
    expected = torch.where(counted, table.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    ours, theirs = found.sum(), expected.sum()
    if entropy is not None:
        expected_entropy = -(table.exp() * table).sum(1)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)  # values of all rows
        ours, theirs = ours + entropy.sum(), theirs + expected_entropy[counted].sum()
    gradients = torch.autograd.grad(ours, leaves)
    for our, their in zip(gradients, torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(our, their, atol=1e-12, rtol=0)
    assert (gradients[0][~counted] == 0).all()


@pytest.mark.parametrize("offsets", [[0], [0, 20], [0, 1, 30], [0, 30, 30]])
@pytest.mark.parametrize("chunk_size", [5, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_vocabulary_over_ranks_equals_the_whole(
    offsets: list[int], chunk_size: int | None, softcap: float | None
) -> None:
    hidden, weight, bias, targets = inputs()
    targets[2] = IGNORED
    upstream = torch.linspace(-1, 1, ROWS, dtype=torch.float64)

    def split(shard: VocabularyShard | None, start: int, end: int) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[start:end], bias[start:end])]
        found = linear_outputs(
            *leaves[:2], targets, bias=leaves[2], temperature=0.7, softcap=softcap, slab_size=9, with_entropy=True,
            entropy_gradient=True, chunk_size=chunk_size, with_argmax=True, top_k=4, shard=shard,
        )  # fmt: skip
        others = (found.entropy, found.argmax, found.top_logprobs, found.top_ids)
        assert all(x is not None for x in others)
        assert found.entropy is not None
        total = (found.logprobs * upstream + found.entropy * upstream.flip(0)).sum()
        return [x.detach() for x in (found.logprobs, *others, *torch.autograd.grad(total, leaves)) if x is not None]

    def fused(shard: VocabularyShard | None, start: int, end: int) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[start:end], bias[start:end])]

        def objective(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> Tensor:
            return logprobs * upstream[rows] + entropy.square()

        found = linear_loss(
            *leaves[:2], targets, objective, bias=leaves[2], temperature=0.7, softcap=softcap, chunk_size=chunk_size,
            shard=shard,
        )  # fmt: skip
        return [found.loss.detach(), found.logprobs, found.entropy, *torch.autograd.grad(found.loss, leaves)]

    for one in (split, fused):
        *whole, grad_hidden, grad_weight, grad_bias = one(None, 0, VOCAB)
        parts = on_ranks(
            [*offsets, VOCAB], lambda ranks, start, end, one=one: one(VocabularyShard(start, ranks), start, end)
        )
        for *values, our_hidden, _, _ in parts:
            for our, their in zip([*values, our_hidden], [*whole, grad_hidden], strict=True):
                torch.testing.assert_close(our, their, atol=1e-12, rtol=0)
        for place, their in ((-2, grad_weight), (-1, grad_bias)):
            torch.testing.assert_close(torch.cat([part[place] for part in parts]), their, atol=1e-12, rtol=0)


def test_ranks_exchange_a_few_numbers_a_row() -> None:
    hidden, weight, _, targets = inputs()

    def task(ranks: Ranks, start: int, end: int) -> list[Tensor]:
        with torch.no_grad():
            linear_logprobs(hidden, weight[start:end], targets, with_entropy=True, shard=VocabularyShard(start, ranks))
        return [torch.tensor(ranks.numbers)]

    assert [int(part[0]) for part in on_ranks([0, 20, VOCAB], task)] == [4 * ROWS, 4 * ROWS]


def test_small_heads_and_float64_are_plain_torch_and_say_why() -> None:
    small = backend.choose_epilogue(torch.zeros(2, 2), 1000, Shape(1.0, None))
    assert (small.name, "too few" in small.reason) == ("eager", True)
    wide = backend.choose_epilogue(torch.zeros(2, 2, dtype=torch.float64), 10**9, Shape(1.0, None), "compiled")
    assert (wide.name, "float64" in wide.reason) == ("eager", True)
    absent = backend.choose_epilogue(torch.zeros(2, 2), 10**9, Shape(1.0, None), "kernels")
    assert (absent.name, "cpu" in absent.reason) == ("eager", True)


def test_without_a_compiler_plain_torch_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    compiled_epilogue.cache_clear()
    try:
        found = backend.choose_epilogue(torch.zeros(2, 2), 10**9, Shape(1.0, None))
        assert (found.name, "no C++ compiler" in found.reason) == ("eager", True)
    finally:
        compiled_epilogue.cache_clear()


@pytest.mark.parametrize("error", [RuntimeError("the compiler crashed\nmore"), OSError("no space left")])
def test_a_failing_compilation_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> float:
        raise error

    monkeypatch.setattr("rft_models.logprobs.epilogue_compiled._disagreement", fail)
    compiled_epilogue.cache_clear()
    try:
        found = backend.choose_epilogue(torch.zeros(2, 2), 10**9, Shape(0.9, None))
        assert found.name == "eager"
        assert str(error).splitlines()[0] in found.reason
        monkeypatch.setattr("rft_models.logprobs.epilogue_compiled._disagreement", lambda *_: 2e-5)
        compiled_epilogue.cache_clear()
        assert "2.0e-05 apart" in backend.choose_epilogue(torch.zeros(2, 2), 10**9, Shape(0.9, None)).reason
    finally:
        compiled_epilogue.cache_clear()


def reference_kernels() -> ModuleType:
    """The operations of `rft_kernels.ops` in plain torch, with the signatures it is called by."""
    module = ModuleType("reference")

    def logits(products: Tensor, temperature: float, softcap: float | None) -> Tensor:
        found = products.float()
        return (found if softcap is None else softcap * torch.tanh(found / softcap)) / temperature

    def slab_sums(
        products_RC: Tensor, targets_R: Tensor, start: int, *, temperature: float, softcap: float | None = None
    ) -> SlabSums:
        shape = Shape(temperature, softcap)
        sums, _ = EagerEpilogue("").sums(products_RC.clone(), targets_R, start, shape, moment=True, argmax=True)
        # targets that are ignored are marked by +inf there
        return sums._replace(target=sums.target.masked_fill(targets_R == IGNORED, torch.inf))

    def slab_gradients(
        products_RC: Tensor, targets_R: Tensor, start: int, normalizer_R: Tensor, entropy_R: Tensor, grad_R: Tensor,
        entropy_grad_R: Tensor | None, *, temperature: float, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        found = logits(products_RC, temperature, softcap)
        logprobs = found - normalizer_R[:, None]
        ids = torch.arange(start, start + found.shape[1])
        slopes = grad_R[:, None] * ((ids == targets_R[:, None]).float() - logprobs.exp())
        if entropy_grad_R is not None:
            slopes -= entropy_grad_R[:, None] * logprobs.exp() * (logprobs + entropy_R[:, None])
        if softcap is not None:
            slopes *= 1 - (found * temperature / softcap).square()
        return products_RC.copy_(slopes / temperature)

    def fused_sums(
        hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, *, temperature: float, softcap: float | None = None,
        bias_V: Tensor | None = None, start: int = 0,
    ) -> SlabSums:  # fmt: skip
        products = torch.nn.functional.linear(hidden_RD, weight_VD, bias_V)
        parts = [
            slab_sums(products[:, i : i + 20], targets_R, start + i, temperature=temperature, softcap=softcap)
            for i in range(0, products.shape[1], 20)
        ]
        return SlabSums(*(None if x[0] is None else torch.stack(x) for x in zip(*parts, strict=True)))

    module.slab_sums, module.slab_gradients, module.fused_sums = slab_sums, slab_gradients, fused_sums  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk_size", [5, None])
def test_kernels_are_called_by_their_signatures_and_merge(
    monkeypatch: pytest.MonkeyPatch, fuses: bool, softcap: float | None, chunk_size: int | None
) -> None:
    kernels = backend.KernelEpilogue(reference_kernels(), "a test")
    monkeypatch.setattr("rft_models.logprobs.linear_logprobs.choose_epilogue", lambda *_: kernels)
    monkeypatch.setattr("rft_models.logprobs.fused_loss.choose_epilogue", lambda *_: kernels)
    monkeypatch.setattr(backend, "_FUSED_WIDTH", 2048 if fuses else 0)
    hidden, weight, bias, targets = (x.float() if x.is_floating_point() else x for x in inputs())
    targets[1] = IGNORED
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    upstream = torch.linspace(-1, 1, ROWS)
    options = {"bias": bias, "temperature": 0.7, "softcap": softcap, "chunk_size": chunk_size}
    found = linear_outputs(
        hidden, weight, targets, slab_size=9, with_entropy=True, entropy_gradient=True, with_argmax=True, **options
    )
    table = table_of(hidden, weight, bias, 0.7, softcap)
    counted = targets != IGNORED
    logprobs = torch.where(counted, table.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    entropy = -(table.exp() * table).sum(1)
    assert found.argmax is not None
    assert found.argmax.tolist() == table.argmax(1).tolist()
    assert found.entropy is not None
    ours = (found.logprobs * upstream).sum() + found.entropy[counted].sum()
    theirs = (logprobs * upstream).sum() + entropy[counted].sum()
    loss = linear_loss(hidden, weight, targets, lambda p, e, rows: p * upstream[rows] + e, **options).loss
    expected = torch.autograd.grad(theirs, leaves)
    for total in (ours, loss):
        torch.testing.assert_close(total, theirs, atol=1e-5, rtol=1e-5)
        gradients = torch.autograd.grad(total, leaves, retain_graph=total is ours)
        for our, their in zip(gradients, expected, strict=True):
            torch.testing.assert_close(our, their, atol=1e-5, rtol=1e-4)
    if chunk_size is None:  # kept slabs outlive a backward
        again = torch.autograd.grad(ours, leaves)
        torch.testing.assert_close(again[0], expected[0], atol=1e-5, rtol=1e-4)
