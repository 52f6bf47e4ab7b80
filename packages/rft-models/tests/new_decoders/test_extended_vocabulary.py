"""Models with a longer vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft_core.errors import DataError
from rft_models.new_decoders.build import build_new_decoder
from rft_models.new_decoders.extended_vocabulary import extend_vocabulary
from rft_models.policy.load import load_policy
from rft_models.settings import DecoderSettings
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tokenization.tokenizer import load_tokenizer

TOKENS = ["<a_1>", "<b_1>", "<c_1>"]


def built(folder: Path, *, tied: bool, rows: int | None = None) -> Path:
    build_character_tokenizer("abc<>_1").save_pretrained(str(folder / "tokenizer"))
    sizes = DecoderSettings(
        hidden_size=8, num_layers=1, num_heads=2, max_seq_len=16, tie_embeddings=tied, vocab_size=rows
    )
    return build_new_decoder(folder / "model", sizes, folder / "tokenizer", seed=3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [None, 64])
def test_old_rows_keep_their_bits_and_new_ones_are_near_the_mean(tied: bool, rows: int | None, tmp_path: Path) -> None:
    source = built(tmp_path, tied=tied, rows=rows)
    first = extend_vocabulary(source, tmp_path / "longer", TOKENS, seed=5)
    assert first == load_tokenizer(source).vocab_size
    old, new = load_policy(source).model, load_policy(tmp_path / "longer").model
    for name in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(old, name)().weight[:first], getattr(new, name)().weight
        assert after.shape[0] == first + 3  # rows of no token are gone
        assert torch.equal(after[:first], before)
        mean, spread = before.mean(dim=0), before.std(dim=0)
        assert ((after[first:] - mean).abs() <= 0.05 * spread).all()
        assert len({tuple(row.tolist()) for row in after[first:]}) == 3
    assert (new.get_input_embeddings().weight is new.get_output_embeddings().weight) == tied
    extend_vocabulary(source, tmp_path / "again", TOKENS, seed=5)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("longer", "again")]
    assert files[0] == files[1]


def test_a_vocabulary_is_extended_once(tmp_path: Path) -> None:
    source = built(tmp_path, tied=True)
    extend_vocabulary(source, tmp_path / "longer", TOKENS, seed=5)
    with pytest.raises(DataError, match="3 of 4 new tokens"):
        extend_vocabulary(tmp_path / "longer", tmp_path / "twice", [*TOKENS, "<d_1>"], seed=5)
