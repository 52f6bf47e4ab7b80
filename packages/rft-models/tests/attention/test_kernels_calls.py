"""Which calls a varlen kernel takes, every argument that it is handed, and for which GPUs and types one is chosen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_models.attention import kernels
from rft_models.attention.kernels import FlashAttn, TorchVarlen, choose_attention, describe_attention
from rft_models.attention.varlen import Piece, Sequences


@dataclass
class Told:
    """A library's function that keeps what it is called with."""

    words: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *words: Any, **options: Any) -> Tensor:
        self.words, self.options = words, options
        return words[0]


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=is_cuda)


@pytest.mark.parametrize(
    ("query", "value_width", "takes"),
    [
        (on_gpu(5, 2, 64), 64, True),
        (on_gpu(5, 2, 64, dtype=torch.float16), 64, True),
        (on_gpu(5, 2, 256), 256, True),
        (on_gpu(5, 2, 264), 264, False),
        (on_gpu(5, 2, 257), 257, False),
        (on_gpu(5, 8, 20), 20, False),
        (on_gpu(5, 2, 72), 72, True),
        (on_gpu(5, 2, 64), 32, False),
        (on_gpu(5, 2, 64, dtype=torch.float32), 64, False),
        (on_gpu(5, 2, 64, is_cuda=False), 64, False),
    ],
)
def test_tensors_of_half_precision_on_a_gpu_with_even_heads_are_taken(
    query: Any, value_width: int, takes: bool
) -> None:
    value = on_gpu(5, 4, value_width, is_cuda=query.is_cuda, dtype=torch.float32)
    for kernel in (TorchVarlen(Told()), FlashAttn(Told())):
        assert kernel.takes(query, value, softcap=None, dropout=0.0) == takes


@pytest.mark.parametrize(
    ("softcap", "dropout", "by_torch", "by_package"),
    [(None, 0.0, True, True), (2.0, 0.0, False, True), (None, 0.1, False, True), (2.0, 0.1, False, False)],
)
def test_softcapping_and_dropout_are_taken_where_the_library_has_them(
    softcap: float | None, dropout: float, by_torch: bool, by_package: bool
) -> None:
    query, value = on_gpu(5, 2, 64), on_gpu(5, 2, 64)
    assert TorchVarlen(Told()).takes(query, value, softcap=softcap, dropout=dropout) == by_torch
    assert FlashAttn(Told()).takes(query, value, softcap=softcap, dropout=dropout) == by_package


@pytest.mark.parametrize(("groups", "has_groups"), [(2, True), (4, False)])
def test_torchs_function_is_handed_the_sequences_in_its_order(groups: int, has_groups: bool) -> None:
    query, key, value = torch.zeros(5, 4, groups), torch.ones(7, groups, 4), torch.full((7, groups, 4), 2.0)
    sequences = Sequences.of([Piece(0, 2), Piece(2, 3, 0, 2)], torch.device("cpu"))
    told = Told()
    found = TorchVarlen(told)(query, key, value, sequences, scaling=0.3, sliding_window=4, softcap=None, dropout=0.0)
    assert found is query
    starts = (sequences.query_starts_N1, sequences.key_starts_N1)
    assert [x is y for x, y in zip(told.words, (query, key, value, *starts), strict=False)] == [True] * 5
    assert told.words[5:] == (3, 5)
    assert told.options == {"scale": 0.3, "window_size": (3, 0), "enable_gqa": has_groups}
    assert TorchVarlen(told).takes(query, value, softcap=None, dropout=0.0) is False


def test_the_packages_function_is_handed_the_sequences_by_name() -> None:
    query, key, value = torch.zeros(5, 4, 8), torch.ones(7, 2, 8), torch.full((7, 2, 8), 2.0)
    sequences = Sequences.of([Piece(0, 2), Piece(2, 3, 0, 2)], torch.device("cpu"))
    for softcap, passed in ((2.0, 2.0), (None, 0.0)):
        told = Told()
        FlashAttn(told)(query, key, value, sequences, scaling=0.3, sliding_window=None, softcap=softcap, dropout=0.1)
        assert [x is y for x, y in zip(told.words, (query, key, value), strict=True)] == [True] * 3
        assert told.options.pop("cu_seqlens_q") is sequences.query_starts_N1
        assert told.options.pop("cu_seqlens_k") is sequences.key_starts_N1
        assert told.options == {
            "max_seqlen_q": 3,
            "max_seqlen_k": 5,
            "dropout_p": 0.1,
            "softmax_scale": 0.3,
            "causal": True,
            "window_size": (-1, 0),
            "softcap": passed,
        }


@pytest.mark.parametrize(("capability", "fused"), [((7, 9), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_gpus_from_compute_capability_8_on_have_a_kernel(
    capability: tuple[int, int], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def told(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return capability

    own = Told()
    monkeypatch.setattr(torch.cuda, "get_device_capability", told)
    monkeypatch.setattr(kernels, "_torchs_own", lambda: (own, ""))
    for dtype in (torch.bfloat16, torch.float16):
        chosen = choose_attention("cuda:1", dtype).kernel
        assert (chosen == TorchVarlen(own)) == fused
    assert choose_attention("cuda:1", torch.float32).kernel is None
    assert choose_attention("cpu", torch.bfloat16).kernel is None
    assert asked == [torch.device("cuda:1")] * 2


def test_a_function_with_the_needed_arguments_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen: Any = ModuleType("varlen")
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)

    def enough(scale: float, window_size: tuple[int, int], enable_gqa: bool) -> None: ...

    def too_old(scale: float, enable_gqa: bool) -> None: ...

    varlen.varlen_attn = enough
    assert kernels._torchs_own()[0] is enough
    varlen.varlen_attn = too_old
    assert kernels._torchs_own()[0] is None


def test_a_package_that_is_not_installed_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_attn")
    package.flash_attn_varlen_func = Told()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(kernels, "find_spec", lambda name: package if name == "flash_attn" else None)
    assert kernels._package()[0] is package.flash_attn_varlen_func
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels._package()[0] is None


def test_the_package_is_looked_for_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    package, own = Told(), Told()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_torchs_own", lambda: (own, ""))
    monkeypatch.setattr(kernels, "_package", lambda: asked.append("asked") or (package, ""))
    assert choose_attention("cuda", torch.bfloat16).kernel == TorchVarlen(own)
    assert not asked
    assert choose_attention("cuda", torch.bfloat16, flash_attn=True).kernel == FlashAttn(package)
    monkeypatch.setattr(kernels, "_torchs_own", lambda: (None, "missing"))
    assert choose_attention("cuda", torch.bfloat16).kernel is None


@pytest.mark.parametrize(
    ("model_type", "text_type", "packs"),
    [
        ("qwen2", "", True),
        ("qwen2_vl", "", True),
        ("llava", "qwen2", True),
        ("llava", "gpt2", False),
        ("gpt2", "qwen2", False),
    ],
)
def test_the_description_is_that_of_the_choice_where_the_architecture_packs(
    model_type: str, text_type: str, packs: bool
) -> None:
    for flash_attn in (False, True):
        chosen = choose_attention("cpu", torch.float32, flash_attn=flash_attn).description
        words: dict[str, Any] = {"flash_attn": flash_attn, "text_type": text_type}
        assert (describe_attention(model_type, "cpu", torch.float32, **words) == chosen) == packs
    plain, asked = (choose_attention("cpu", torch.float32, flash_attn=on).description for on in (False, True))
    assert plain != asked
