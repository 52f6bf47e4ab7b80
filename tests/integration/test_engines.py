"""Engines draw the same tokens from the same model: keys, options, stop tokens and log-probs mean the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError, PreflightError, ServiceError
from rft_core.packed_tokens import PackedTokens
from rft_engine.completions import Completion
from rft_engine.hf_engine import HfEngine
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.decode.hf_generate import HfGenerator
from rft_models.families.registry import packed_families
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import make_policy

VOCAB = 61
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def tiny_policy(model_type: str) -> CausalPolicy:
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **(GPT2 if model_type == "gpt2" else SIZES))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    # what a published model brings along: none of it may reach a rollout
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, repetition_penalty=1.5)
    return make_policy(model.eval(), None, packed=model_type in packed_families())


numbers = random.Random(5)
PROMPTS = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in (3, 9, 1, 6)]
KEYS = [[10, 11], [20], [30, 31, 32], [40]]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "max_new_tokens": 7},
    {"temperature": 0.7, "top_p": 0.8, "max_new_tokens": 5},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.05, "max_new_tokens": 9, "stop_token_ids": tuple(range(2, 22))},
    {"temperature": 1.0, "max_new_tokens": 6, "min_new_tokens": 3, "stop_token_ids": tuple(range(2, 40))},
    {"temperature": 0.0, "max_new_tokens": 6, "stop_token_ids": (2, 5, 7)},
    {"temperature": 0.8, "first_token_temperature": 10.0, "max_new_tokens": 4},
]


def assert_equal(one: list[list[Completion]], other: list[list[Completion]]) -> None:
    for a, b in zip([c for cs in one for c in cs], [c for cs in other for c in cs], strict=True):
        assert a.token_ids == b.token_ids
        assert (a.finish_reason, a.weight_version) == (b.finish_reason, b.weight_version)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.log_kept_mass == pytest.approx(b.log_kept_mass, abs=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}" for k in options))
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_hugging_face_and_native_draw_the_same(model_type: str, options: dict[str, Any]) -> None:
    policy = tiny_policy(model_type)
    hf = HfEngine(HfGenerator(policy), max_rows=5, max_len=32)
    native = NativeEngine(decoder_for(policy), max_rows=5, max_len=32)
    for engine in (hf, native):
        engine.load_weights(4)
    found = hf.generate(PROMPTS, KEYS, SamplingOptions(**options))
    assert_equal(found, native.generate(PROMPTS, KEYS, SamplingOptions(**options)))
    assert hf.stats().num_generated_tokens == native.stats().num_generated_tokens
    assert policy.model.generation_config.top_k == 3  # the model's own settings are as they were
    # a sample does not depend on its neighbours
    alone = HfEngine(HfGenerator(policy), max_rows=1, max_len=32)
    alone.load_weights(4)
    assert_equal([found[2]], alone.generate([PROMPTS[2]], [KEYS[2]], SamplingOptions(**options)))


BUDGETS = [[1, 9], [4], [9, 2, 6], [5]]
TREE = TokenTrie.of([[5, 9, 2], [5, 9, 3, 2], [7, 2], [11, 12, 13, 14, 2], [11, 12, 15, 2], [40, 2], [5, 8, 2]])
CONSTRAINED: list[dict[str, Any]] = [
    {"temperature": 1.0, "stop_token_ids": (2,)},
    {"temperature": 1.4, "top_p": 0.7, "min_new_tokens": 1},
    {"temperature": 0.0},
    {"temperature": 0.6, "first_token_temperature": 4.0, "top_k": 2, "min_p": 0.1},
]


@pytest.mark.parametrize("stops", [(), tuple(range(2, 22))])
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_budgets_mean_the_same(model_type: str, stops: tuple[int, ...]) -> None:
    policy = tiny_policy(model_type)
    options = SamplingOptions(temperature=1.2, max_new_tokens=9, stop_token_ids=stops)
    native = NativeEngine(decoder_for(policy), max_rows=5, max_len=32)
    wanted = native.generate(PROMPTS, KEYS, options, budgets=BUDGETS)
    hf = HfEngine(HfGenerator(policy), max_rows=3, max_len=32)
    assert_equal(hf.generate(PROMPTS, KEYS, options, budgets=BUDGETS), wanted)
    lengths = [[len(completion.token_ids) for completion in row] for row in wanted]
    assert stops or lengths == BUDGETS
    with pytest.raises(OptionsError, match="a budget of 10 tokens") as caught:
        HfEngine(HfGenerator(policy), max_rows=3, max_len=32).generate(
            PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=9), budgets=[[1, 9], [4], [10, 2, 6], [5]]
        )
    assert caught.value.problem.code == "engine.budgets"


@pytest.mark.parametrize("options", CONSTRAINED, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_a_constraint_means_the_same(model_type: str, options: dict[str, Any]) -> None:
    policy = tiny_policy(model_type)
    hf = HfEngine(HfGenerator(policy), max_rows=4, max_len=32)
    wanted = NativeEngine(decoder_for(policy), max_rows=5, max_len=32).generate(
        PROMPTS, KEYS, SamplingOptions(max_new_tokens=7, **options), constraint=TREE
    )
    assert_equal(hf.generate(PROMPTS, KEYS, SamplingOptions(max_new_tokens=7, **options), constraint=TREE), wanted)
    assert all(completion.finish_reason == "stop" for row in wanted for completion in row)
    assert hf.stats().num_decode_steps <= 5 * 2  # two batches of rows, the longest sequence has five tokens
    with pytest.raises(OptionsError, match="the longest sequence of the constraint has 5") as caught:
        hf.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=4), constraint=TREE)
    assert caught.value.problem.code == "engine.constraint.budget"


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_with_little_memory_fewer_rows_draw_the_same(model_type: str) -> None:
    policy = tiny_policy(model_type)
    decoder: Any = decoder_for(policy)
    heads = (2, 2, 8) if model_type == "qwen2" else (2, 4, 8)  # layers, heads of keys, their size
    one_step = 2 * heads[0] * heads[1] * heads[2] * 4  # float32 keys and values of a token
    bytes_of_five = decoder.cache_bytes(5, 32, num_prompts=0, prompt_len=0)
    assert one_step * 5 * 32 <= bytes_of_five <= 2 * one_step * 5 * 32
    wanted = NativeEngine(decoder, max_rows=7, max_len=32).generate(
        PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=7)
    )
    tight = NativeEngine(decoder, max_rows=7, max_len=32, free_memory=lambda device: bytes_of_five)
    assert_equal(tight.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=7)), wanted)
    assert 1 <= tight.stats().rows < 5 < tight.stats().rows_asked
    tighter = NativeEngine(decoder, max_rows=7, max_len=32, free_memory=lambda device: bytes_of_five // 10)
    with pytest.raises(PreflightError, match="1 sequence of 32 tokens needs") as caught:
        tighter.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=20))
    assert caught.value.problem.code == "engine.memory"


def test_training_continues_after_a_rollout_as_before() -> None:
    policy = tiny_policy("qwen2")
    policy.train()
    engine = HfEngine(HfGenerator(policy), max_rows=4, max_len=32)
    before = policy.token_logprobs(PackedTokens(*packed(PROMPTS[1])))[0]
    engine.generate(PROMPTS, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=2))
    assert policy.model.training
    assert torch.equal(policy.token_logprobs(PackedTokens(*packed(PROMPTS[1])))[0], before)


def packed(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor(tokens)
    return ids, torch.arange(len(ids)), torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)


def test_states_are_those_of_every_engine() -> None:
    engine = HfEngine(HfGenerator(tiny_policy("gpt2")), max_rows=4, max_len=100)
    with pytest.raises(OptionsError, match="prompt 0 has 63 tokens") as caught:
        engine.generate([[1] * 63], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))  # the model places 64
    assert caught.value.problem.code == "engine.prompt_too_long"
    engine.sleep()
    with pytest.raises(ServiceError):
        engine.generate([[1]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=2))
    engine.wake()
    assert engine.generate([], [], SamplingOptions(temperature=1.0, max_new_tokens=2)) == []
    engine.close()
    assert engine.state == "closed"
