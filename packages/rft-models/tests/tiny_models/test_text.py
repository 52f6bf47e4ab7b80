"""Tokenizers, chat templates and models built on the spot."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_core.errors import DataError, OptionsError
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import (
    build_bpe_tokenizer,
    build_character_model,
    build_character_tokenizer,
    build_decoder,
    draw_weights,
)
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer

ALPHABET = "0123456789+= \n"
TEXTS = ["the cat sat on the mat", "the dog sat on the log", "caf\u00e9 \U0001f600 12 + 30 = 42"] * 4
CHARACTERS = HfTokenizer(build_character_tokenizer(ALPHABET))
BPE = HfTokenizer(build_bpe_tokenizer(TEXTS, 300))


@given(st.text(alphabet=ALPHABET, max_size=40))
@settings(max_examples=60, deadline=None)
def test_characters_round_trip_one_token_each(text: str) -> None:
    ids = CHARACTERS.encode(text)
    assert len(ids) == len(text)
    assert CHARACTERS.decode(ids) == text


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_bytes_round_trip_any_text(text: str) -> None:
    text = unicodedata.normalize("NFC", text.encode("utf-8", "ignore").decode())  # as the tokenizer's family does
    assert BPE.decode(BPE.encode(text)) == text


def test_character_ids_follow_the_alphabet_after_the_special_tokens() -> None:
    assert (CHARACTERS.pad_id, CHARACTERS.eos_ids, CHARACTERS.vocab_size) == (0, (1,), 2 + len(ALPHABET))
    assert CHARACTERS.encode("01+<eos>") == [2, 3, 12, 1]
    assert CHARACTERS.decode([2, 1, 0], skip_special_tokens=True) == "0"
    assert CHARACTERS.decode([2, 1]) == "0<eos>"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(DataError, match="'x'") as caught:
        CHARACTERS.encode("1+x")
    assert caught.value.problem.code == "text.unknown_character"


def test_chat_is_rendered_and_ends_where_the_assistant_speaks() -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    assert BPE.has_chat_template
    assert BPE.render_chat(messages, add_generation_prompt=True) == "system: add\nuser: 1+1\nassistant: "
    closed = BPE.render_chat([*messages, {"role": "assistant", "content": "2"}], add_generation_prompt=False)
    assert closed == "system: add\nuser: 1+1\nassistant: 2\n<eos>"
    assert BPE.encode(closed)[-1] == BPE.eos_ids[0]


def test_chat_without_a_template_is_refused_with_the_reason() -> None:
    assert not CHARACTERS.has_chat_template
    with pytest.raises(DataError) as caught:
        CHARACTERS.render_chat([{"role": "user", "content": "1"}], add_generation_prompt=True)
    assert caught.value.problem.code == "text.no_chat_template"


def test_a_template_that_refuses_is_quoted() -> None:
    tokenizer = HfTokenizer(build_bpe_tokenizer(TEXTS, 300))
    tokenizer.hf_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "1"}], add_generation_prompt=True)
    assert caught.value.problem.code == "text.chat_refused"


def test_template_and_every_end_token_survive_saving(tmp_path: Path) -> None:
    directory = build_decoder(
        tmp_path,
        build_bpe_tokenizer(TEXTS, 300),
        hidden=16,
        layers=1,
        heads=2,
        kv_heads=1,
        ffn=24,
        max_positions=32,
        seed=0,
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.has_chat_template
    assert tokenizer.eos_ids == (1, 9)
    assert tokenizer.encode("the cat") == BPE.encode("the cat")
    load_policy(directory).save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").eos_ids == (1, 9)


SPLIT_TEXTS = ["12 + 345 = 357 cats,  $1,234.50\n#### 1234", "caf\u00e9 and cafe\u0301", "a\n\nb\t c"]


def test_a_bpe_tokenizer_gives_the_same_ids_from_its_files_whatever_loads_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    learned = build_bpe_tokenizer(SPLIT_TEXTS * 3, 290)
    directory = build_decoder(
        tmp_path, learned, hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, max_positions=64, seed=5
    )
    tokenizer, automatic = load_tokenizer(directory), AutoTokenizer.from_pretrained(str(directory))
    assert tokenizer.vocab_size == len(learned) == load_policy(directory).head.weight.shape[0]
    for text in SPLIT_TEXTS:
        ids = learned.encode(text)
        assert tokenizer.encode(text) == ids
        assert automatic.encode(text) == ids
    assert len(tokenizer.encode("1234")) == 4, "each digit is a token"


def test_a_character_tokenizer_keeps_its_closed_alphabet_in_its_files(tmp_path: Path) -> None:
    directory = build_character_model(tmp_path, alphabet="01 +\n", hidden=16, layers=1, heads=2, ffn=24, seed=5)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("0 +\n1") == [2, 4, 5, 6, 3]
    assert tokenizer.decode([2, 4, 5, 6, 3]) == "0 +\n1"
    with pytest.raises(DataError, match="'x'") as caught:
        tokenizer.encode("0x")
    assert caught.value.problem.code == "text.unknown_character"


def test_the_same_seed_builds_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 24}
    torch.manual_seed(1)
    one = build_character_model(tmp_path / "one", alphabet=ALPHABET, seed=5, **sizes)
    torch.manual_seed(2)
    two = build_character_model(tmp_path / "two", alphabet=ALPHABET, seed=5, **sizes)
    other = build_character_model(tmp_path / "other", alphabet=ALPHABET, seed=6, **sizes)
    for entry in one.iterdir():
        assert entry.read_bytes() == (two / entry.name).read_bytes(), entry.name
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_building_does_not_move_the_global_generator(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_character_model(tmp_path, alphabet=ALPHABET, hidden=16, layers=1, heads=2, ffn=24, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_the_padding_row_is_drawn_like_the_others(tmp_path: Path) -> None:
    directory = build_character_model(tmp_path, alphabet=ALPHABET, hidden=64, layers=1, heads=2, ffn=24, seed=5)
    rows = load_policy(directory).head.weight.norm(dim=1)
    assert rows.min() > 0.5 * rows.max()


def test_drawn_weights_depend_on_names_and_not_on_order() -> None:
    small, large = torch.nn.ModuleDict(), torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4)})
    small["same"], large["same"] = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    draw_weights(small, seed=1)
    draw_weights(large, seed=1)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(small["same"], name), getattr(large["same"], name))


@pytest.mark.parametrize("sizes", [(30, 4, 4), (36, 4, 4 + 1), (12, 4, 4)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    hidden, heads, kv_heads = sizes
    with pytest.raises(OptionsError, match=f"hidden = {hidden}") as caught:
        build_character_model(
            tmp_path, alphabet=ALPHABET, hidden=hidden, layers=1, heads=heads, kv_heads=kv_heads, ffn=8, seed=0
        )
    assert caught.value.problem.code == "build.sizes"


def test_a_byte_vocabulary_below_all_bytes_is_refused() -> None:
    with pytest.raises(OptionsError, match="258") as caught:
        build_bpe_tokenizer(TEXTS, 200)
    assert caught.value.problem.code == "build.small_vocabulary"
