"""Beams over a catalogue, through real tokenizers and a real forward: every result is an item, none comes twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.policy.load import make_policy

END = "<end>"
NUM_PROMPTS = 60
"""For each tokenizer and width; a thousand, which take a minute and a half, at night."""
WORDS = ["red", "green", "blue", "lamp", "chair", "table", "oak", "steel", "small", "large", "kit", "pro", "mini"]


def catalogue() -> list[str]:
    numbers = random.Random(3)
    titles = {" ".join(numbers.choices(WORDS, k=numbers.randint(1, 3))) for _ in range(70)}
    return sorted(titles | {f"item {numbers.randrange(1000)}" for _ in range(20)})


def trained(model: Any, trainer: Any, splitter: Any, decoder: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator([*catalogue(), *WORDS, "what comes next after", *map(str, range(200))], trainer)
    return tokenizer


def special() -> dict[str, Any]:
    return {"special_tokens": [END, "<unk>"], "show_progress": False}


def byte_bpe() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, **special())
    return trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def metaspace_bpe() -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=200, **special())
    return trained(models.BPE(unk_token="<unk>"), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", **special())
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=150, **special())
    return trained(models.WordPiece(unk_token="<unk>"), trainer, pre_tokenizers.Whitespace(), decoders.WordPiece())


def characters() -> Tokenizer:
    splitter = pre_tokenizers.Split("", "isolated")
    trainer = trainers.WordLevelTrainer(vocab_size=100, **special())
    return trained(models.WordLevel(unk_token="<unk>"), trainer, splitter, decoders.Fuse())


TOKENIZERS: list[Callable[[], Tokenizer]] = [byte_bpe, metaspace_bpe, unigram, word_piece, characters]


def engine_for(vocab_size: int) -> NativeEngine[Any]:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", vocab_size=vocab_size, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that beams differ between prompts
            parameter.mul_(20.0 if parameter.dim() > 1 else 1.0)
    return NativeEngine(decoder_for(make_policy(model.eval(), None, packed=True)), max_rows=512, max_len=96)


def prompts_of(tokenizer: Tokenizer, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    numbers = random.Random(7)
    texts = [" ".join(numbers.choices([*WORDS, "what", "next"], k=numbers.randint(1, 6))) for _ in range(num_prompts)]
    return [tokenizer.encode(text).ids for text in texts]


def sequences_of(tokenizer: Tokenizer, items: Sequence[str]) -> list[list[int]]:
    end = tokenizer.token_to_id(END)
    assert end is not None
    return [[*tokenizer.encode(item).ids, end] for item in items]


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_all_beams_are_distinct_items(make: Callable[[], Tokenizer]) -> None:
    check_beams(make, NUM_PROMPTS)


@pytest.mark.night
@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_all_beams_of_a_thousand_prompts_are_distinct_items(make: Callable[[], Tokenizer]) -> None:
    check_beams(make, 1000)


def check_beams(make: Callable[[], Tokenizer], num_prompts: int) -> None:
    """At widths 1, 16, 50 and more than there are items: no beam is something else, none comes twice."""
    tokenizer, items = make(), catalogue()
    sequences = sequences_of(tokenizer, items)
    engine, trie = engine_for(tokenizer.get_vocab_size()), TokenTrie.of(sequences)
    names = {tuple(sequence): item for sequence, item in zip(sequences, items, strict=True)}
    prompts = prompts_of(tokenizer, num_prompts)
    first: set[str] = set()
    for width in (1, 16, 50, len(items) + 40):
        for beams in engine.beam_search(prompts, trie, num_beams=width):
            found = [names[beam.token_ids] for beam in beams]  # a KeyError here is an invalid item
            assert len(set(found)) == len(found)
            assert len(found) == min(width, len(items)) or width < 50
            scores = [sum(beam.logprobs) for beam in beams]
            assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
            first.add(found[0])
    assert len(first) > 3


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_all_samples_are_items(make: Callable[[], Tokenizer]) -> None:
    tokenizer, items = make(), catalogue()
    sequences = sequences_of(tokenizer, items)
    engine, trie = engine_for(tokenizer.get_vocab_size()), TokenTrie.of(sequences)
    names = {tuple(sequence): item for sequence, item in zip(sequences, items, strict=True)}
    prompts = prompts_of(tokenizer)
    keys = [[16 * place + sample for sample in range(16)] for place in range(len(prompts))]
    found: set[str] = set()
    for temperature, top_p in ((1.0, 1.0), (3.0, 1.0), (1.0, 0.8), (0.0, 1.0)):
        answers = engine.generate(
            prompts,
            keys,
            SamplingOptions(
                temperature=temperature, top_p=top_p, max_new_tokens=trie.depth, stop_token_ids=(sequences[0][-1],)
            ),
            constraint=trie,
        )
        drawn = [completion for row in answers for completion in row]
        found |= {names[completion.token_ids] for completion in drawn}  # a KeyError here is an invalid item
        assert all(completion.finish_reason == "stop" for completion in drawn)
    assert len(found) > 20


def test_items_that_a_tokenizer_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(OptionsError, match="sequences 0 and 1 are equal") as caught:
        TokenTrie.of(sequences_of(characters(), ["é", "ü"]))
    assert caught.value.problem.code == "trie.sequences"
