"""Decoders of every family: written, loaded by transformers and here, scored packed, decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import decoder_for
from rft_models.files.directories import read_config
from rft_models.loading.transformers_loading import plain_model
from rft_models.new_decoders.build import build_new_decoder
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.settings import DecoderSettings
from rft_models.tiny_models.text import build_character_tokenizer

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"family": "llama"},
    "mixtral": {"family": "mixtral", "use_moe": True, "num_experts": 4},
    "qwen3_moe": {"use_moe": True, "num_experts": 4},
    "qwen2_moe": {"use_moe": True, "num_experts": 4, "shared_experts": 1},
    "dots1": {"family": "dots1", "use_moe": True, "num_experts": 4, "shared_experts": 1, "tie_embeddings": False},
    "rft_decoder": {"use_glu": False, "dropout": 0.1},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_character_tokenizer("abcdefghij ").save_pretrained(str(directory))
    return directory


def built(directory: Path, tokenizer: Path, seed: int = 5, **given: Any) -> Path:
    """A decoder of two blocks; weights so large that every part of them changes the logits."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 48, "init_std": 0.3}
    return build_new_decoder(directory, DecoderSettings(**(sizes | given)), tokenizer, seed=seed)


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> CausalPolicy:
    family: str = request.param
    directory = built(tmp_path_factory.mktemp(family), tokenizer, **FAMILIES[family])
    assert read_config(directory)["model_type"] == family
    return load_policy(directory)


def test_packed_segments_have_the_logits_that_transformers_gives_each(policy: CausalPolicy) -> None:
    model = plain_model(policy.where)
    segments = [torch.tensor([3, 7, 9, 4, 4, 11]), torch.tensor([5, 3, 8])]
    assert policy.packed
    with torch.no_grad():
        packed_T, _ = policy.token_logprobs(PackedTokens.of_segments(segments))
        alone = [
            model(input_ids=segment[None]).logits[0, :-1].log_softmax(-1).gather(-1, segment[1:, None])[:, 0]
            for segment in segments
        ]
    zero = torch.zeros(1)
    torch.testing.assert_close(packed_T, torch.cat([zero, alone[0], zero, alone[1]]), rtol=1e-5, atol=1e-5)


def test_a_step_of_decoding_has_the_logits_of_the_whole_forward(policy: CausalPolicy) -> None:
    model, decoder = plain_model(policy.where), decoder_for(policy, graphs=False)
    tokens = torch.tensor([3, 7, 9, 4])
    cache = decoder.new_cache(1, 8)
    logits = [decoder.prefill(cache, tokens[None, :2], torch.tensor([2]), [1]), decoder.step(cache, tokens[2:3])]
    with torch.no_grad():
        whole = model(input_ids=tokens[None, :3]).logits[0, 1:]
    torch.testing.assert_close(torch.cat(logits).float(), whole, rtol=1e-4, atol=1e-4)


def test_a_policy_is_written_and_read_as_it_is(policy: CausalPolicy, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    again = dict(load_policy(tmp_path).named_parameters())
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, again[name]), name


def test_the_same_seed_writes_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    directories = [
        built(tmp_path / name, tokenizer, seed=seed) for name, seed in (("one", 5), ("two", 5), ("three", 6))
    ]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in directories)
    assert first == again
    assert first != other
    assert (directories[0] / "config.json").read_bytes() == (directories[1] / "config.json").read_bytes()


def test_a_vocabulary_may_be_larger_than_the_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    policy = load_policy(built(tmp_path, tokenizer, vocab_size=64))
    assert policy.head.weight.shape[0] == 64
    assert policy.tokenizer is not None
    assert policy.tokenizer.encode("abc ") == [2, 3, 4, 12]
