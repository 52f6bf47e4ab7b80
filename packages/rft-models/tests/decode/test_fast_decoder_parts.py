"""One layer of each kind against its own forward, and what a decoder asks of caches, media and recordings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft_core.packed_tokens import PackedTokens
from rft_models.decode import fast_decoder
from rft_models.decode.fast_decoder import FastDecoder, decoder_for, is_fast
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.decode.kv_cache import StaticCache
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy

Build = Callable[..., PreTrainedModel]
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_hidden_layers": 2, "max_window_layers": 1, "sliding_window": 3},
    "llama": {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"num_hidden_layers": 1, "sliding_window": 3, "num_key_value_heads": 1},
    "qwen3": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module")
def policies(tiny_model: Build) -> dict[str, CausalPolicy]:
    """Unchecked policies in float64, each with one or two layers."""
    return {
        name: CausalPolicy(tiny_model(name, dtype=torch.float64, **changes), None, packed=False)
        for name, changes in VARIANTS.items()
    }


def expected(policy: CausalPolicy, row: list[int]) -> Tensor:
    ids = torch.tensor(row)
    with torch.no_grad():
        tokens = PackedTokens(ids, torch.arange(len(row)), torch.zeros_like(ids))
        return policy.head.logits(policy.hidden_states(tokens)[-1:])[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_models_own_forward(name: str, policies: dict[str, CausalPolicy]) -> None:
    policy = policies[name]
    decoder = FastDecoder(policy)
    cache = decoder.new_cache(4, 12)
    rows = [[3, 9, 4, 7, 1], [8, 2], [8, 2]]
    ids = torch.tensor([rows[0], [*rows[1], 5, 5, 5]])
    found = decoder.prefill(cache, ids, torch.tensor([5, 2]), [1, 2])
    for logits, row in zip(found, rows[:2], strict=True):
        torch.testing.assert_close(logits, expected(policy, row), check_dtype=False, atol=1e-5, rtol=1e-5)
    for tokens in ([1, 2, 3], [6, 5, 4], [0, 7, 9], [2, 2, 1]):
        found = decoder.step(cache, torch.tensor(tokens))
        rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        for logits, row in zip(found, rows, strict=True):
            torch.testing.assert_close(logits, expected(policy, row), check_dtype=False, atol=1e-5, rtol=1e-5)
    assert cache.own_lengths_B.tolist() == [4, 4, 4]
    cache.keep(torch.tensor([1]))
    decoder.prefill(cache, torch.tensor([[4, 4]]), torch.tensor([1]), [1])
    found = decoder.step(cache, torch.tensor([7, 8]))
    torch.testing.assert_close(found[1], expected(policy, [4, 8]), check_dtype=False, atol=1e-5, rtol=1e-5)


def test_a_cache_has_the_sizes_and_the_type_of_the_model(policies: dict[str, CausalPolicy]) -> None:
    decoder = FastDecoder(policies["qwen2"])
    assert (decoder.vocab_size, decoder.max_positions) == (61, 96)
    cache = decoder.new_cache(5, 96)
    assert isinstance(cache, StaticCache)
    assert [tuple(layer.shape) for layer in cache.keys] == [(5, 2, 96, 8)] * 2
    assert {layer.dtype for layer in cache.keys + cache.values} == {torch.float64}
    with pytest.raises(ValueError, match="asked for 0 of 97"):
        decoder.new_cache(5, 97)
    of_rows, of_prompts = 2 * 2 * 5 * 2 * 20 * 8 * 8, 2 * 2 * 3 * 2 * 7 * 8 * 8
    found = decoder.cache_bytes(5, 20, num_prompts=3, prompt_len=7)
    assert found == of_rows + of_rows // 4 + of_prompts + of_prompts // 4


def test_positions_beyond_those_of_an_earlier_cache_are_rotated_too(policies: dict[str, CausalPolicy]) -> None:
    policy = policies["llama"]
    decoder = FastDecoder(policy)
    decoder.new_cache(1, 3)
    long = decoder.new_cache(1, 9)
    decoder.new_cache(1, 2)
    row = [1, 2, 3, 4, 5, 6, 7, 8]
    found = decoder.prefill(long, torch.tensor([row]), torch.tensor([8]), [1])
    torch.testing.assert_close(found[0], expected(policy, row), check_dtype=False, atol=1e-5, rtol=1e-5)
    found = decoder.step(long, torch.tensor([9]))
    torch.testing.assert_close(found[0], expected(policy, [*row, 9]), check_dtype=False, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="asked for 1 of 10"):
        decoder.step(long, torch.tensor([9]))


def test_weights_with_adapters_are_folded_in_at_every_refresh(tiny_model: Build) -> None:
    policy = CausalPolicy(tiny_model("qwen2", num_hidden_layers=1, dtype=torch.float64), None, packed=True)
    adapters = add_adapters(policy, AdapterRules(rank=2), seed=0)
    decoder, generator = FastDecoder(policy), torch.Generator().manual_seed(2)
    for _ in range(2):
        with torch.no_grad():
            for _, parameter in adapters.named_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        decoder.refresh()
        cache = decoder.new_cache(1, 5)
        found = decoder.prefill(cache, torch.tensor([[3, 1, 4]]), torch.tensor([3]), [1])
        torch.testing.assert_close(found[0], expected(policy, [3, 1, 4]), check_dtype=False, atol=1e-5, rtol=1e-5)


class Attention(nn.Module):
    """The matrices of a block's attention."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, kind(2, 2))
        self.head_dim = 8


class Feed(nn.Module):
    """The matrices of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, nn.Linear(2, 2))


class Other(nn.Linear):
    """A linear layer that may compute something else."""


def architecture(
    model_type: str = "qwen2", rope: str = "default", rotated: int = 4, kind: type[nn.Linear] = nn.Linear
) -> CausalPolicy:
    layers = [SimpleNamespace(self_attn=Attention(one), mlp=Feed()) for one in (nn.Linear, kind)]
    rotary = SimpleNamespace(rope_type=rope, inv_freq=torch.ones(rotated))
    config = SimpleNamespace(model_type=model_type)

    def text_config(*, decoder: bool) -> Any:
        assert decoder
        return config

    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=text_config, model_type=model_type),
        get_decoder=lambda: SimpleNamespace(rotary_emb=rotary, layers=layers),
    )
    return cast("CausalPolicy", SimpleNamespace(model=model))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"model_type": "qwen3_vl_text"}, True),
        ({"rope": "yarn"}, True),
        ({"model_type": "gemma"}, False),
        ({"rope": "dynamic"}, False),
        ({"rotated": 2}, False),
        ({"rotated": 8}, False),
        ({"kind": Other}, False),
    ],
)
def test_the_fast_path_is_for_layers_that_are_known(
    changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, patched = architecture(**changes), [False]
    monkeypatch.setattr(fast_decoder, "is_patched", lambda model: patched[0])
    assert is_fast(policy) == expected
    patched[0] = True
    assert not is_fast(policy)


def test_graphs_are_recorded_on_a_gpu_alone_and_where_they_are_wanted(
    policies: dict[str, CausalPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(fast_decoder, "CudaGraphs", never)
    assert isinstance(decoder_for(policies["qwen2"]), FastDecoder)
    seen: list[bool] = []

    def note(policy: Any, *, graphs: bool) -> None:
        seen.append(graphs)

    monkeypatch.setattr(fast_decoder, "FastDecoder", note)
    decoder_for(policies["qwen2"])
    decoder_for(policies["qwen2"], graphs=False)
    assert seen == [True, False]
    monkeypatch.setattr(fast_decoder, "is_fast", lambda policy: False)
    assert isinstance(decoder_for(policies["qwen2"]), HfDecoder)


class Recorder:
    """Notes what it is asked to record, and runs it."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        return forward


def test_recordings_are_made_again_for_other_weights_or_longer_tables(policies: dict[str, CausalPolicy]) -> None:
    policy, recorder = policies["mistral"], Recorder()
    decoder = FastDecoder(policy)
    decoder.record_steps(recorder)
    cache, row = decoder.new_cache(1, 40), [3]
    decoder.prefill(cache, torch.tensor([[3]]), torch.tensor([1]), [1])
    counts: list[int] = []
    for change in (lambda: None, decoder.refresh, lambda: decoder.new_cache(1, 40), lambda: decoder.new_cache(1, 50)):
        change()
        for _ in range(5):
            row.append(len(row))
            found = decoder.step(cache, torch.tensor(row[-1:]))
            torch.testing.assert_close(found[0], expected(policy, row), check_dtype=False, atol=1e-5, rtol=1e-5)
        counts.append(recorder.recorded)
    assert counts == [1, 2, 2, 3]
    decoder.record_steps(None)
    decoder.refresh()
    decoder.step(cache, torch.tensor([1]))
    assert recorder.recorded == 3
