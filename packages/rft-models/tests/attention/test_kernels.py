"""Which kernel is chosen and why, what it is handed, and that a varlen kernel gives what the blocks give.

The kernel here is the contract written out in float64; the real ones need a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.attention import kernels
from rft_models.attention.kernels import FlashAttn, TorchVarlen, choose_attention, describe_attention
from rft_models.attention.packed import PackedLayout
from rft_models.attention.shared_prefix import find_shared_prefixes
from rft_models.attention.varlen import Piece, Sequences
from rft_models.backbone.backbone import Backbone
from rft_models.policy.load import make_policy

Build = Callable[..., Any]


@dataclass
class WrittenOut:
    """softmax(scaling q k^T) v of each sequence, the last query aligned with the last key."""

    calls: list[tuple[int, int]] = field(default_factory=list)

    def takes(self, query_THD: Tensor, value_SGD: Tensor, *, softcap: float | None, dropout: float) -> bool:
        return dropout == 0.0

    def __call__(
        self,
        query_THD: Tensor,
        key_SGD: Tensor,
        value_SGD: Tensor,
        sequences: Sequences,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        dropout: float,
    ) -> Tensor:
        queries, keys = sequences.query_starts_N1.tolist(), sequences.key_starts_N1.tolist()
        self.calls.append((len(queries) - 1, len(key_SGD)))
        assert (queries[-1], keys[-1]) == (len(query_THD), len(key_SGD))
        groups = query_THD.shape[1] // key_SGD.shape[1]
        found = []
        for number in range(len(queries) - 1):
            query = query_THD[queries[number] : queries[number + 1]]
            key = key_SGD[keys[number] : keys[number + 1]].repeat_interleave(groups, 1)
            value = value_SGD[keys[number] : keys[number + 1]].repeat_interleave(groups, 1)
            assert len(query) <= sequences.longest_query
            assert len(key) <= sequences.longest_key
            scores = scaling * torch.einsum("qhd,khd->hqk", query, key)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            last = torch.arange(len(query))[:, None] + len(key) - len(query)
            place = torch.arange(len(key))[None]
            hidden = place > last
            if sliding_window is not None:
                hidden |= place <= last - sliding_window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(found)


def tensors(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, 4, 6, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, num_tokens, 2, 6, generator=generator, dtype=torch.float64)
    return query, key, value


SETTINGS = [(None, None), (3, None), (None, 0.7), (3, 0.7), (20, None)]


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
def test_a_kernel_gives_what_the_blocks_give(window: int | None, softcap: float | None) -> None:
    plain, fused = (PackedLayout.from_lengths((5, 2, 7, 1)) for _ in range(2))
    kernel = fused.kernel = WrittenOut()
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    query, key, value = tensors(15)
    torch.testing.assert_close(
        fused.attend(query, key, value, **settings), plain.attend(query, key, value, **settings), atol=1e-12, rtol=0
    )
    assert kernel.calls == [(4, 15)]


@pytest.mark.parametrize(("window", "softcap"), SETTINGS)
def test_a_kernel_gives_what_the_blocks_give_with_shared_prompts(window: int | None, softcap: float | None) -> None:
    rows = [(0, 9, 4), (0, 9, 4), (1, 5, 3), (2, 7, 1), (2, 7, 6), (3, 9, 4), (3, 9, 4)]  # (prompt, its length, own)
    parts = [
        [*range(100 * prompt, 100 * prompt + length), *range(1000 + 50 * row, 1000 + 50 * row + own)]
        for row, (prompt, length, own) in enumerate(rows)
    ]
    segments = torch.cat([torch.full((len(part),), n) for n, part in enumerate(parts)])
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    ids = torch.cat([torch.tensor(part) for part in parts])
    shared = find_shared_prefixes(ids, positions, segments, ids >= 1000)
    assert shared is not None
    query, key, value = tensors(len(shared.kept_K))
    settings: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    expected = shared.layout.attend(query, key, value, **settings)
    kernel = shared.layout.kernel = WrittenOut()
    torch.testing.assert_close(shared.layout.attend(query, key, value, **settings), expected, atol=1e-12, rtol=0)
    num_keys = 2 * (9 + 2 * 13) + (7 + 8 + 13) + 8
    assert kernel.calls == [(2 * 3 + 3 + 1, num_keys)]


@pytest.mark.parametrize("model_type", ["gemma2", "qwen2", "qwen3"])
def test_a_policy_with_a_kernel_gives_the_same_logprobs_and_gradients(model_type: str, tiny_model: Build) -> None:
    lengths = (7, 1, 12, 3)
    ids = torch.arange(sum(lengths)) * 7 % 61
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    results = []
    for kernel in (None, WrittenOut()):
        policy = make_policy(tiny_model(model_type, dtype=torch.float64), None, packed=True, kernel=kernel)
        found, _ = policy.token_logprobs(PackedTokens(ids, positions, segments, positions > 0))
        found.sum().backward()
        results.append((found, {n: p.grad for n, p in policy.named_parameters()}))
        assert kernel is None or kernel.calls
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-10, rtol=0)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-6, rtol=1e-6)


def test_a_policy_hands_shared_prompts_to_the_kernel_too(tiny_model: Build) -> None:
    prompt, own = [5, 6, 7, 8, 9, 10], [[11, 12], [13, 14, 15], [16]]
    ids = torch.tensor([token for tokens in own for token in (*prompt, *tokens)])
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor([8, 9, 7]))
    positions = torch.cat([torch.arange(8), torch.arange(9), torch.arange(7)])
    found = []
    for kernel in (None, WrittenOut()):
        policy = make_policy(tiny_model("qwen2", dtype=torch.float64), None, packed=True, kernel=kernel)
        found.append(policy.token_logprobs(PackedTokens(ids, positions, segments, positions >= 6))[0])
        if kernel is not None:
            assert kernel.calls[-1] == (1 + 3, 6 + 8 + 9 + 7), "the prompt once, then what follows it"
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=0)


def test_what_the_kernel_does_not_take_goes_to_the_blocks() -> None:
    layout = PackedLayout.from_lengths((3, 2))
    kernel = layout.kernel = WrittenOut()
    layout.attend(*tensors(5), scaling=0.3, dropout=0.5)
    assert not kernel.calls
    empty = PackedLayout.from_lengths(())
    empty.kernel = kernel
    assert not kernel.calls


def test_sequences_of_plain_pieces_need_no_copy_of_the_keys() -> None:
    sequences = Sequences.of([Piece(0, 3), Piece(3, 2)], torch.device("cpu"))
    assert sequences.key_places_S is None
    assert sequences.query_starts_N1.tolist() == sequences.key_starts_N1.tolist() == [0, 3, 5]
    behind = Sequences.of([Piece(0, 2), Piece(2, 1, 0, 2), Piece(3, 3, 0, 2)], torch.device("cpu"))
    assert behind.key_places_S is not None
    assert behind.key_places_S.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert (behind.query_starts_N1.tolist(), behind.key_starts_N1.tolist()) == ([0, 2, 3, 6], [0, 2, 5, 10])
    assert (behind.longest_query, behind.longest_key) == (3, 5)


@dataclass
class Told:
    """A library's function that keeps what it is called with."""

    words: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *words: Any, **options: Any) -> Tensor:
        self.words, self.options = words, options
        return words[0]


@pytest.mark.parametrize(("window", "window_size"), [(None, (-1, 0)), (4, (3, 0))])
def test_the_libraries_are_called_with_their_own_names(window: int | None, window_size: tuple[int, int]) -> None:
    query, key, value = tensors(5)
    sequences = Sequences.of([Piece(0, 3), Piece(3, 2)], query.device)
    own, package = Told(), Told()
    TorchVarlen(own)(query, key, value, sequences, scaling=0.3, sliding_window=window, softcap=None, dropout=0.0)
    assert own.options == {"scale": 0.3, "window_size": window_size, "enable_gqa": True}
    assert own.words[5:] == (3, 3)
    FlashAttn(package)(query, key, value, sequences, scaling=0.3, sliding_window=window, softcap=2.0, dropout=0.1)
    assert package.options["window_size"] == window_size
    assert (package.options["softcap"], package.options["dropout_p"], package.options["causal"]) == (2.0, 0.1, True)
    assert (package.options["max_seqlen_q"], package.options["softmax_scale"]) == (3, 0.3)


def test_torchs_own_function_has_the_arguments_that_it_is_called_with() -> None:
    function, missing = kernels._torchs_own()
    assert (function is not None) != bool(missing)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_on_a_cpu_blocks_are_used_and_flash_attn_is_answered_with_the_reason() -> None:
    assert choose_attention("cpu", torch.bfloat16).kernel is None
    asked = choose_attention("cpu", torch.bfloat16, flash_attn=True)
    assert asked.kernel is None
    assert asked.description.startswith("torch's fused attention on blocks of similar length")
    assert asked.description.endswith("flash_attn has no effect: flash attention runs on CUDA, the device is cpu")


@pytest.mark.usefixtures("a_gpu")
def test_on_a_gpu_torchs_varlen_is_used_unless_the_package_is_asked_for_and_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(choose_attention("cuda", torch.bfloat16).kernel, TorchVarlen)
    absent = choose_attention("cuda:0", torch.bfloat16, flash_attn=True)
    assert isinstance(absent.kernel, TorchVarlen)
    assert "flash_attn: the package is not installed" in absent.description
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = Told()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(kernels, "find_spec", lambda name: module)
    assert isinstance(choose_attention("cuda", torch.bfloat16, flash_attn=True).kernel, FlashAttn)
    assert isinstance(choose_attention("cuda", torch.bfloat16).kernel, TorchVarlen)
    del module.flash_attn_varlen_func
    broken = choose_attention("cuda", torch.bfloat16, flash_attn=True)
    assert isinstance(broken.kernel, TorchVarlen)
    assert "the package does not load" in broken.description


@pytest.mark.usefixtures("a_gpu")
def test_full_precision_and_old_gpus_use_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    full = choose_attention("cuda", torch.float32, flash_attn=True)
    assert full.kernel is None
    assert "the weights are float32 (--bf16)" in full.description
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "this GPU has 7.5" in choose_attention("cuda", torch.bfloat16, flash_attn=True).description
    monkeypatch.undo()


@pytest.mark.usefixtures("a_gpu")
def test_a_torch_without_varlen_attention_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    found = choose_attention("cuda", torch.bfloat16)
    assert found.kernel is None
    assert "has no varlen attention" in found.description


def test_kernels_refuse_what_they_do_not_compute() -> None:
    query, _, value = tensors(3)
    for kernel in (TorchVarlen(Told()), FlashAttn(Told())):
        assert not kernel.takes(query, value, softcap=None, dropout=0.0)  # float64 on a CPU


def test_an_architecture_without_packing_says_so() -> None:
    assert describe_attention("gpt2", "cpu", torch.float32, flash_attn=False).startswith("gpt2's own")
    assert "not known to be exact for gpt2" in describe_attention("gpt2", "cpu", torch.float32, flash_attn=True)


def test_a_backbone_uses_blocks_unless_it_is_given_a_kernel(tiny_model: Build) -> None:
    assert Backbone(tiny_model("qwen2").get_decoder(), packed=True).kernel is None
