"""A text family is added with one file and one row: packed forward, log-probs, gradients and decoding follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from additions import echo_family
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.families.registry import TEXT_FAMILIES, TextFamily
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer, draw_weights

TEXTS = ("1+1=2", "12+30=42")


@pytest.fixture
def echo_directory(tmp_path: Path) -> Path:
    echo_family.register()
    tokenizer = build_character_tokenizer("0123456789+= ")
    config = echo_family.EchoConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = echo_family.EchoForCausalLM(config)
    draw_weights(model, seed=3, std=0.2)
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    return tmp_path


def own_logits(policy: CausalPolicy, token_ids: Tensor) -> Tensor:
    """[L, V] of one sequence by the forward of the class, untouched."""
    with torch.no_grad():
        plain = echo_family.EchoForCausalLM.from_pretrained(policy.where, attn_implementation="eager").eval()
        return plain(input_ids=token_ids[None]).logits[0]


def check(policy: CausalPolicy) -> None:
    assert policy.tokenizer is not None
    segments = [torch.tensor(policy.tokenizer.encode(text)) for text in TEXTS]
    tokens = PackedTokens.of_segments(segments)
    logprobs_T, entropy_T = policy.token_logprobs(tokens, with_entropy=True)
    rows = [own_logits(policy, segment)[:-1].log_softmax(-1) for segment in segments]
    expected = torch.cat([row.gather(1, s[1:, None])[:, 0] for row, s in zip(rows, segments, strict=True)])
    torch.testing.assert_close(logprobs_T[tokens.targets_T], expected, atol=1e-5, rtol=0)
    assert entropy_T is not None
    entropies = torch.cat([-(row.exp() * row).sum(-1) for row in rows])
    torch.testing.assert_close(entropy_T[tokens.targets_T], entropies, atol=1e-5, rtol=0)
    logprobs_T.sum().backward()
    assert all(parameter.grad is not None for _, parameter in policy.named_parameters())

    decoder = decoder_for(policy)
    cache = decoder.new_cache(2, 16)
    prompt, rest = segments[1][:4], segments[1][4:]
    found = [decoder.prefill(cache, prompt[None], torch.tensor([len(prompt)]), [2])]
    found += [decoder.step(cache, token.expand(2))[:1] for token in rest]
    torch.testing.assert_close(torch.cat(found), own_logits(policy, segments[1])[3:], atol=1e-4, rtol=0)


def test_one_row_lets_a_family_run_packed_and_decode_fast(
    echo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEXT_FAMILIES, "echo", TextFamily("EchoForCausalLM", fast_decode=True))
    policy = load_policy(echo_directory)
    assert policy.packed
    assert isinstance(decoder_for(policy), FastDecoder)
    check(policy)


def test_without_the_row_it_takes_the_general_paths(echo_directory: Path) -> None:
    policy = load_policy(echo_directory)
    assert not policy.packed
    assert isinstance(decoder_for(policy), HfDecoder)
    check(policy)
