"""The constraint in transformers' own `generate`: families, padding, beams, and what a directory's defaults change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.decoding.constrained_logits import ConstrainedLogitsProcessor
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import make_policy

VOCABULARY, EOS, PAD = 97, 1, 0
FAMILIES = ("qwen2", "llama", "gpt2", "mistral", "gemma")
SEQUENCES = [[10 + a, 30 + (a + b) % 7, 50 + (3 * a + b) % 11, EOS] for a in range(8) for b in range(5)]
TRIE = TokenTrie.of(SEQUENCES)
KNOWN = {tuple(sequence) for sequence in SEQUENCES}
PROMPTS = [[3, 4, 5], [7], [8, 9, 10, 11, 12]]
SAVED_DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
"""What the directories of instruction-tuned models carry: unset arguments of a call are filled from it."""


def model_of(family: str, **defaults: Any) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=PAD, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # peaked, so that the mass is on illegal tokens nearly everywhere
            parameter.mul_(12.0 if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    return model


def left_padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def found_by(model: Any, **options: Any) -> list[list[tuple[int, ...]]]:
    inputs = left_padded(PROMPTS)
    processor = ConstrainedLogitsProcessor(TRIE, inputs["input_ids"], eos_token_id=EOS)
    first = processor.sequences(model.generate(**inputs, logits_processor=[processor], max_new_tokens=8, **options))
    if not options.get("do_sample"):  # nothing is kept between calls
        again = model.generate(**inputs, logits_processor=[processor], max_new_tokens=8, **options)
        assert processor.sequences(again) == first
    return first


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_those_of_the_native_engine(family: str) -> None:
    model = model_of(family)
    engine = NativeEngine(decoder_for(make_policy(model, None, packed=True)), max_rows=64, max_len=32)
    for width in (1, 3, 12):
        beams = found_by(model, do_sample=False, num_beams=width, num_return_sequences=width, length_penalty=0.0)
        ours = engine.beam_search(PROMPTS, TRIE, num_beams=width)
        assert beams == [[beam.token_ids for beam in row] for row in ours]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_is_a_sequence(family: str) -> None:
    inputs = left_padded(PROMPTS)
    processor = ConstrainedLogitsProcessor(TRIE, inputs["input_ids"], eos_token_id=EOS)
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 16, "max_new_tokens": 8}
    found = model_of(family).generate(**inputs, logits_processor=[processor], **options)
    width = inputs["input_ids"].shape[1]
    assert all(tuple(row[width : width + 4].tolist()) in KNOWN for row in found)
    assert sum(map(len, processor.sequences(found))) > len(PROMPTS)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("width", [1, 12, 60])
def test_defaults_of_a_directory_let_nothing_else_through(do_sample: bool, width: int) -> None:
    model = model_of("qwen2", do_sample=do_sample, **SAVED_DEFAULTS)
    found = found_by(model, num_beams=width, num_return_sequences=width, do_sample=do_sample)
    for sequences in found:
        assert sequences
        assert set(sequences) <= KNOWN
        assert len(sequences) == len(set(sequences)) <= min(width, len(KNOWN))


def test_more_beams_than_sequences_find_every_sequence_once() -> None:
    found = found_by(model_of("qwen2"), do_sample=False, num_beams=70, num_return_sequences=70)
    assert [len(sequences) for sequences in found] == [40, 40, 40]
    assert all(set(sequences) == KNOWN for sequences in found)
