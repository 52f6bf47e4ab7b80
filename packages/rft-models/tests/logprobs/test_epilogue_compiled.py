"""The compiled passes as the functions that they are compiled from, and when they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from slab_reference import ENTROPY_GRAD, GRAD, ROWS, START, STOP, TARGETS, Reference, products
from torch import Tensor

from rft_models.logprobs import epilogue_compiled as module
from rft_models.logprobs.epilogue import RowTerms, Shape
from rft_models.logprobs.epilogue_compiled import CompiledEpilogue, compiled_epilogue

COMPILED = CompiledEpilogue("a test")
SHAPES = [Shape(1.0, None), Shape(0.7, None), Shape(0.7, 1.5)]
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Function, dict[str, Any]]]]:
    """Functions that run as they are instead of compiled, and what the compiler was asked for."""
    asked: list[tuple[Function, dict[str, Any]]] = []

    def keep(function: Function, **options: Any) -> Function:
        asked.append((function, options))
        return function

    caches = (module._compiled, module._scalars, compiled_epilogue)
    monkeypatch.setattr(torch, "compile", keep)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    for cache in caches:
        cache.cache_clear()
    yield asked
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("start", "stop"), [(START, STOP), (START, START + 1), (0, 11)])
def test_sums_are_those_of_the_definition(shape: Shape, start: int, stop: int) -> None:
    given = products()[:, start:stop].float()
    found, held = COMPILED.sums(given, TARGETS, start, shape, moment=True, argmax=True)
    assert held is given
    for ours, theirs in zip(found, Reference(products(), shape).sums(start, stop), strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    bare, _ = COMPILED.sums(given, TARGETS, start, shape, moment=False, argmax=False)
    assert bare.moment is bare.argmax is None
    assert COMPILED.held(given, shape) is given


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entropy_grad", [None, ENTROPY_GRAD])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(START, STOP), (0, 11)])
def test_gradients_are_those_of_autograd(
    shape: Shape, entropy_grad: Tensor | None, free: bool, start: int, stop: int
) -> None:
    reference = Reference(products(), shape)
    given = products()[:, start:stop].float()
    before = given.clone()
    rows = reference.terms(GRAD, entropy_grad, torch.float32)
    found = COMPILED.gradients(given, rows, torch.zeros(ROWS), start, shape, torch.float32, free=free)
    expected = reference.slopes(GRAD, entropy_grad)[:, start:stop]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert (found is given) == free
    assert free or torch.equal(given, before)


def test_one_compilation_serves_all_shapes_and_graphs_are_whole(
    compiler: list[tuple[Function, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = torch._dynamo.config
    for limit, expected in ((8, 32), (40, 40)):
        monkeypatch.setattr(settings, "recompile_limit", limit)
        module._compiled.cache_clear()
        COMPILED.sums(products().float(), TARGETS, 0, SHAPES[0], moment=True, argmax=False)
        assert settings.recompile_limit == expected
    COMPILED.sums(products().float()[:3], TARGETS[:3], 0, SHAPES[2], moment=False, argmax=False)
    assert [options for _, options in compiler] == 2 * [{"dynamic": True, "fullgraph": True}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_passes_that_agree_with_plain_torch_are_used(dtype: torch.dtype, shape: Shape) -> None:
    assert isinstance(compiled_epilogue(dtype, shape), CompiledEpilogue)


def change_sums(number: int, factor: float) -> Function:
    """Compiled code that gives another number in the last row: 1 the total, 2 the moment."""

    def compiled(function: Function) -> Function:
        def run(*words: Any) -> Any:
            found = function(*words)
            if function is module._sums and words[3] == (number == 2):  # a total only where no moment is wanted
                found[number][-1] *= factor
            return found

        return run

    return compiled


def change_slopes(name: str, column: int | slice, change: Callable[[Tensor], Tensor]) -> Function:
    """Compiled code whose gradients are others in some columns of the first row."""

    def compiled(function: Function) -> Function:
        def run(products_RC: Tensor, *words: Any) -> Any:
            found = function(products_RC, *words)
            if function.__name__ == name:
                products_RC[0, column] = change(products_RC[0, column])
            return found

        return run

    return compiled


FAULTS: dict[str, tuple[Function, float]] = {
    "total": (change_sums(1, 1 + 3e-5), 3e-5),
    "moment": (change_sums(2, 1 + 1e-4), 1e-4),
    "gradient of the first entry": (change_slopes("_slopes_", 0, lambda x: x + 5e-5), 5e-5),
    "gradient of the last entry": (change_slopes("_slopes_", -1, lambda x: x - 5e-5), 5e-5),
    "gradient of all entries": (change_slopes("_slopes_", slice(None), lambda x: x * 1.0001), 1e-4),
    "gradient with entropies": (change_slopes("_slopes_with_entropy_", 3, lambda x: x + 5e-5), 5e-5),
}


@pytest.mark.parametrize("name", FAULTS)
def test_compiled_code_that_is_wrong_anywhere_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, size = FAULTS[name]
    monkeypatch.setattr(module, "_compiled", fault)
    found = compiled_epilogue(torch.float32, Shape(0.9, None))
    assert isinstance(found, str)
    assert 1e-5 < module._disagreement(torch.float32, Shape(0.9, None)) < 4 * size


@pytest.mark.parametrize(("units", "is_refused"), [(1.0, False), (2.4, True)])
def test_half_precision_may_round_to_either_side(
    units: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def farther(value: Tensor) -> Tensor:
        return value * (1 + units * torch.finfo(torch.bfloat16).eps)

    monkeypatch.setattr(module, "_compiled", change_slopes("_slopes_", slice(None), farther))
    assert isinstance(compiled_epilogue(torch.bfloat16, Shape(0.9, None)), str) == is_refused
    monkeypatch.setattr(module, "_compiled", change_sums(1, 1 + 1e-3))
    compiled_epilogue.cache_clear()
    assert isinstance(compiled_epilogue(torch.bfloat16, Shape(0.9, None)), str), "totals are float32 in every type"


def test_compiled_code_that_gives_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_slopes_", "_slopes_with_entropy_"):
        monkeypatch.setattr(module, "_compiled", change_slopes(name, 5, lambda x: x * torch.nan))
        assert isinstance(compiled_epilogue(torch.float32, SHAPES[0]), str)
        compiled_epilogue.cache_clear()


def test_the_comparison_is_the_same_every_time_and_its_sizes_divide_by_no_vector_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    options: list[object] = []
    rows: list[RowTerms] = []
    sums, gradients = CompiledEpilogue.sums, CompiledEpilogue.gradients

    def noted_sums(self: CompiledEpilogue, products_RC: Tensor, targets_R: Tensor, *words: Any, **chosen: Any) -> Any:
        seen.append((products_RC.clone(), targets_R))
        options.append((words[0], chosen))
        return sums(self, products_RC, targets_R, *words, **chosen)

    def noted_gradients(self: CompiledEpilogue, *words: Any, **chosen: Any) -> Any:
        rows.append(words[1])
        options.append((words[3], chosen))
        return gradients(self, *words, **chosen)

    monkeypatch.setattr(CompiledEpilogue, "sums", noted_sums)
    monkeypatch.setattr(CompiledEpilogue, "gradients", noted_gradients)
    for _ in range(2):
        compiled_epilogue(torch.float32, SHAPES[0])
        compiled_epilogue.cache_clear()
    (values, targets), *others = seen
    assert len(others) == 3, "with and without entropies, twice"
    assert all(torch.equal(values, other) and torch.equal(targets, ids) for other, ids in others)
    assert [size % 2 for size in values.shape] == [1, 1]
    assert float(values.std()) == pytest.approx(3, rel=0.05)
    inside = targets < values.shape[1]
    assert bool(inside.any())
    assert not bool(inside.all()), "some targets are of other slabs"
    kept = (0, {"free": False})
    wanted = [(0, {"moment": moment, "argmax": False}) for moment in (False, True)]
    assert options == 2 * [wanted[0], kept, wanted[1], kept]
    plain, entropic, *_ = rows
    assert float(plain.logprobs.min()) == -50, "finite, for the entropy's part of a target in no column"
    assert plain.entropy_grad is None
    assert entropic.entropy_grad is not None
    assert entropic.grad.tolist() == plain.grad.tolist() == torch.linspace(-1, 1, len(values)).tolist()
    assert entropic.entropy_grad.tolist() == plain.grad.tolist()[::-1]


@pytest.mark.parametrize(("apart", "is_used"), [(1e-5, True), (1.05e-5, False), (float("nan"), False)])
def test_a_disagreement_above_the_tolerance_refuses(
    apart: float, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(*words: object) -> float:
        asked.append(words)
        torch.set_num_threads(threads + 1)
        return apart

    threads = torch.get_num_threads()
    monkeypatch.setattr(module, "_disagreement", measured)
    found = compiled_epilogue(torch.bfloat16, SHAPES[1])
    assert isinstance(found, CompiledEpilogue) == is_used
    assert asked == [(torch.bfloat16, SHAPES[1])]
    assert torch.get_num_threads() == threads


def test_other_types_no_compiler_and_a_failing_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(compiled_epilogue(torch.float64, SHAPES[0]), str)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/g++" if name == "g++" else None)
    assert isinstance(compiled_epilogue(torch.float32, SHAPES[0]), CompiledEpilogue)
    monkeypatch.setattr("shutil.which", lambda name: None)
    compiled_epilogue.cache_clear()
    assert isinstance(compiled_epilogue(torch.float32, SHAPES[0]), str)
    monkeypatch.undo()
    for error in (RuntimeError("first\nsecond"), OSError(), ImportError("gone")):

        def fail(*_: object, error: Exception = error) -> float:
            raise error

        monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(module, "_disagreement", fail)
        compiled_epilogue.cache_clear()
        found = compiled_epilogue(torch.float32, SHAPES[0])
        assert isinstance(found, str)
        assert str(error).partition("\n")[0] in found
        assert "second" not in found
