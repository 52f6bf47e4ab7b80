"""Which code runs the passes over a slab, what the kernels are handed, and wide sums of narrow products."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from slab_reference import ENTROPY_GRAD, GRAD, ROWS, TARGETS, Reference, products
from torch import Tensor

from rft_models.logprobs import backend
from rft_models.logprobs.backend import EpilogueName, KernelEpilogue, add_product, choose_epilogue
from rft_models.logprobs.epilogue import EagerEpilogue, Shape
from rft_models.logprobs.epilogue_compiled import CompiledEpilogue
from rft_models.logprobs.row_statistics import SlabSums

SHAPE = Shape(0.7, 3.0)
MILLIONS = 4096 * 4096
COMPILED = CompiledEpilogue("a test")


def like(device: str, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, device=SimpleNamespace(type=device))


def kind(found: object) -> str:
    return type(found).__name__.removesuffix("Epilogue")


@pytest.mark.parametrize(
    ("hidden", "num_logits", "wanted", "expected"),
    [
        (like("cpu"), MILLIONS, None, "Compiled"),
        (like("cpu"), MILLIONS - 1, None, "Eager"),
        (like("cpu"), 1, "compiled", "Compiled"),
        (like("cpu"), MILLIONS, "eager", "Eager"),
        (like("cpu"), MILLIONS, "kernels", "Eager"),
        (like("mps"), MILLIONS, None, "Eager"),
        (like("mps"), MILLIONS, "compiled", "Eager"),
        (like("cuda"), 1, None, "Kernel"),
        (like("cuda", torch.bfloat16), 1, "kernels", "Kernel"),
        (like("cuda"), 1, "eager", "Eager"),
        (like("cuda"), 1, "compiled", "Eager"),
        (like("cuda", torch.float64), MILLIONS, None, "Eager"),
    ],
)
def test_the_choice_follows_device_type_and_size(
    hidden: Any, num_logits: int, wanted: EpilogueName | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ModuleType("kernels")
    asked: list[tuple[torch.dtype, Shape]] = []

    def compiled(dtype: torch.dtype, shape: Shape) -> CompiledEpilogue:
        asked.append((dtype, shape))
        return COMPILED

    monkeypatch.setattr(backend, "_kernels", lambda: kernels)
    monkeypatch.setattr(backend, "compiled_epilogue", compiled)
    found = choose_epilogue(hidden, num_logits, SHAPE, wanted)
    assert kind(found) == expected
    assert not isinstance(found, KernelEpilogue) or found.module is kernels
    assert asked == ([(torch.float32, SHAPE)] if expected == "Compiled" else [])


def test_without_kernels_or_a_compiler_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_kernels", lambda: None)
    monkeypatch.setattr(backend, "compiled_epilogue", lambda *_: "no compiler")
    assert kind(choose_epilogue(like("cuda"), MILLIONS, SHAPE)) == "Eager"
    found = choose_epilogue(like("cpu"), MILLIONS, SHAPE)
    assert (kind(found), found.reason) == ("Eager", "no compiler")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of kernels whose operations a test sets."""
    module: Any = ModuleType("rft_kernels")
    module.ops = ModuleType("rft_kernels.ops")
    monkeypatch.setitem(sys.modules, "rft_kernels", module)
    monkeypatch.setitem(sys.modules, "rft_kernels.ops", module.ops)
    backend._kernels.cache_clear()
    yield module
    backend._kernels.cache_clear()


def test_a_package_of_kernels_is_used_where_it_has_every_operation(package: Any) -> None:
    package.ops.slab_sums = package.ops.slab_gradients = print
    assert kind(choose_epilogue(like("cuda"), 1, SHAPE)) == "Eager"
    package.ops.fused_sums = print
    backend._kernels.cache_clear()
    found = choose_epilogue(like("cuda"), 1, SHAPE)
    assert isinstance(found, KernelEpilogue)
    assert found.module is package.ops
    del package.ops
    sys.modules["rft_kernels.ops"] = None  # type: ignore[assignment]
    backend._kernels.cache_clear()
    assert kind(choose_epilogue(like("cuda"), 1, SHAPE)) == "Eager"


class Told(ModuleType):
    """Kernels that keep what they are called with."""

    def __init__(self) -> None:
        super().__init__("told")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.result = SlabSums(*(torch.full((ROWS,), float(number)) for number in range(5)))

    def __getattr__(self, name: str) -> Any:
        def operation(*words: Any, **options: Any) -> Any:
            self.calls.append((name, words, options))
            return words[0] if name == "slab_gradients" else self.result

        return operation


@pytest.mark.parametrize(("moment", "argmax"), [(True, False), (False, True), (True, True)])
def test_kernels_of_sums_are_handed_the_slab_and_give_what_is_wanted(moment: bool, argmax: bool) -> None:
    told = Told()
    kernels = KernelEpilogue(told, "a test")
    slab = products()
    found, held = kernels.sums(slab, TARGETS, 4, SHAPE, moment=moment, argmax=argmax)
    assert held is slab
    assert kernels.held(slab, SHAPE) is slab
    hidden, weight, bias = torch.ones(ROWS, 2), torch.ones(11, 2), torch.ones(11)
    fused = kernels.fused_sums(hidden, weight, bias, TARGETS, 4, SHAPE, moment=moment, argmax=argmax)
    (name, words, options), (fused_name, fused_words, fused_options) = told.calls
    assert (name, fused_name) == ("slab_sums", "fused_sums")
    assert [x is y for x, y in zip(words, (slab, TARGETS), strict=False)] == [True, True]
    assert words[2:] == (4,)
    assert options == {"temperature": 0.7, "softcap": 3.0}
    assert [x is y for x, y in zip(fused_words, (hidden, weight, TARGETS), strict=True)] == [True] * 3
    assert fused_options.pop("bias_V") is bias
    assert fused_options == {"temperature": 0.7, "softcap": 3.0, "start": 4}
    highest, total, moment_R, target, argmax_R = told.result
    wanted = (highest, total, moment_R if moment else None, target, argmax_R if argmax else None)
    for sums in (found, fused):
        assert [x is y for x, y in zip(sums, wanted, strict=True)] == [True] * 5


@pytest.mark.parametrize("entropy_grad", [None, ENTROPY_GRAD])
def test_the_kernel_of_gradients_is_handed_the_terms_of_the_rows(entropy_grad: Tensor | None) -> None:
    told = Told()
    rows = Reference(products(), SHAPE).terms(GRAD, entropy_grad)
    slab = products()
    for free in (True, False):
        told.calls.clear()
        share = torch.zeros(ROWS)
        found = KernelEpilogue(told, "").gradients(slab, rows, share, 4, SHAPE, torch.float64, free=free)
        [(name, words, options)] = told.calls
        assert (name, options) == ("slab_gradients", {"temperature": 0.7, "softcap": 3.0})
        assert (found is slab) == free, "the kernel writes over what it is handed"
        assert torch.equal(words[0], slab)
        assert (words[1] is rows.targets, words[2]) == (True, 4)
        assert torch.equal(words[3], rows.highest + rows.log_total)
        rest = (rows.entropy, rows.grad, rows.entropy_grad)
        assert [x is y for x, y in zip(words[4:], rest, strict=True)] == [True] * 3


def test_up_to_2048_columns_products_and_sums_are_one_kernel() -> None:
    kernels = KernelEpilogue(Told(), "")
    assert [kernels.fuses(torch.empty(3, width)) for width in (64, 2048, 2049)] == [True, True, False]


@pytest.mark.parametrize(
    ("is_cuda", "narrow", "wide", "adds", "expected"),
    [
        (True, torch.bfloat16, torch.float32, True, True),
        (True, torch.float16, torch.float32, True, True),
        (False, torch.bfloat16, torch.float32, True, False),
        (True, torch.float32, torch.float32, True, False),
        (True, torch.bfloat16, torch.bfloat16, True, False),
        (True, torch.bfloat16, torch.float32, False, False),
    ],
)
def test_narrow_products_are_added_to_wide_sums_where_torch_can(
    is_cuda: bool,
    narrow: torch.dtype,
    wide: torch.dtype,
    adds: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    asked: list[torch.dtype] = []
    monkeypatch.setattr(torch, "addmm", lambda *words, **options: calls.append((words, options)))
    monkeypatch.setattr(backend, "_adds_wide", lambda dtype: asked.append(dtype) or adds)
    total: Any = SimpleNamespace(is_cuda=is_cuda, dtype=wide)
    left: Any = SimpleNamespace(dtype=narrow)
    right: Any = SimpleNamespace(dtype=narrow)
    assert add_product(total, left, right) is expected
    assert calls == ([((total, left, right), {"out_dtype": torch.float32, "out": total})] if expected else [])
    assert asked in ([], [narrow])


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of a GPU, in memory of the host."""
    ones = torch.ones

    def there(*size: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
        assert device == "cuda"
        return ones(*size, dtype=dtype)

    monkeypatch.setattr(torch, "ones", there)
    backend._adds_wide.cache_clear()
    yield
    backend._adds_wide.cache_clear()


def adds(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> None:
    assert (total.shape, left.shape, right.shape) == ((16, 16),) * 3
    assert left.dtype is right.dtype is torch.bfloat16
    assert out_dtype is out.dtype is torch.float32
    out.copy_(total + left.float() @ right.float())


def writes_over(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> None:
    out.copy_(left.float() @ right.float())


def refuses(*_: Tensor, **__: object) -> None:
    raise RuntimeError


def lacks_the_option(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor) -> None: ...


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("operation", "expected"), [(adds, True), (writes_over, False), (refuses, False), (lacks_the_option, False)]
)
def test_a_torch_that_adds_otherwise_is_found_out(
    operation: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "addmm", operation)
    assert backend._adds_wide(torch.bfloat16) is expected


def test_plain_torch_is_the_choice_of_a_name_alone() -> None:
    found = choose_epilogue(torch.zeros(1, 1), 1, SHAPE, "eager")
    assert isinstance(found, EagerEpilogue)
