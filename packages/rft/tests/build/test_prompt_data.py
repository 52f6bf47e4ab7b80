"""From rows to token ids: the tokenizer's own special tokens, and the end of a demonstration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.build.prompt_data import PreparedPrompts, demonstrations, read_training
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.packing import pack
from rft_trainer.settings.data import SftDataSettings

BOS = "<s>"


@pytest.fixture(scope="module")
def codec() -> HfTokenizer:
    """A tokenizer that begins a document with a token of its own, as Llama's and Gemma's do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = build_bpe_tokenizer(["1+1=2"], 258)
    tokenizer.add_special_tokens({"bos_token": BOS})
    number = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    return HfTokenizer(tokenizer)


def read(codec: HfTokenizer, path: Path, **changes: Any) -> PreparedPrompts:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": f"{n}+1=", "output": str(n + 1)}) + "\n" for n in range(3)))
    settings = SftDataSettings(prompt_data=str(file), **changes)
    return read_training(settings, settings, codec, label_key=None, output_key="output", prompt_max_len=50)


def test_a_plain_prompt_begins_as_the_tokenizer_begins_a_document(codec: HfTokenizer, tmp_path: Path) -> None:
    bos = codec.tokenizer.convert_tokens_to_ids(BOS)
    rows = read(codec, tmp_path).rendered
    assert [row.token_ids for row in rows] == [(bos, *codec.encode(f"{n}+1=")) for n in range(3)]
    assert all(row.token_ids.count(bos) == 1 for row in rows)


def test_a_chat_template_writes_its_own_special_tokens_and_none_are_added(codec: HfTokenizer, tmp_path: Path) -> None:
    bos = codec.tokenizer.convert_tokens_to_ids(BOS)
    rows = read(codec, tmp_path, apply_chat_template=True).rendered
    assert all(bos not in row.token_ids for row in rows)


def test_a_demonstration_is_prompt_output_and_end_token_and_the_end_is_learned(
    codec: HfTokenizer, tmp_path: Path
) -> None:
    rendered = read(codec, tmp_path).rendered
    samples, left_out = demonstrations(rendered, codec, max_len=50)
    assert left_out == []
    for sample, row in zip(samples, rendered, strict=True):
        assert row.output is not None
        assert sample.token_ids == (*row.token_ids, *codec.encode(row.output), codec.eos_ids[0])
        batch = pack([sample])
        learned = batch.token_ids_T[batch.loss_mask_T].tolist()
        assert learned == [*codec.encode(row.output), codec.eos_ids[0]]


def test_a_demonstration_that_is_too_long_by_its_end_token_is_left_out_by_name(
    codec: HfTokenizer, tmp_path: Path
) -> None:
    rendered = read(codec, tmp_path).rendered
    samples, _ = demonstrations(rendered, codec, max_len=50)
    length = len(samples[0].token_ids)
    kept, left_out = demonstrations(rendered, codec, max_len=length)
    assert (len(kept), left_out) == (3, [])
    longer = [*rendered[:1], rendered[1], read(codec, tmp_path, input_template="now {}").rendered[2]]
    kept, left_out = demonstrations(longer, codec, max_len=length)
    assert [sample.sample_id for sample in kept] == [row.prompt_id for row in rendered[:2]]
    assert [name for name, _ in left_out] == [rendered[2].prompt_id]
