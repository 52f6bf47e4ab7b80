"""Models that runs begin with: new ones, and those whose vocabulary is extended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rft_core.errors import DataError, OptionsError
from rft_genrec.catalogue.records import SemanticIds
from rft_genrec.prompts.builder import PromptBuilder
from rft_genrec.prompts.model_record import ModelRecord, read_record
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_genrec.settings.sft import GenrecSftSettings, RecommenderDecoderSettings, RecommenderModelSettings
from rft_genrec.training.models import prepared_model
from rft_models.new_decoders.build import build_new_decoder
from rft_models.settings import DecoderSettings
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tokenization.tokenizer import load_tokenizer

IDS = SemanticIds((("<a_0>", "<b_1>"), ("<a_1>", "<b_0>")))
BUILDER = PromptBuilder(IDS)
SETTINGS = GenrecSftSettings(
    catalogue=CatalogueSettings(catalogue="unused"),
    decoder=RecommenderDecoderSettings(hidden_size=8, num_layers=1, num_heads=2, max_seq_len=16),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model that knows no ID."""
    build_character_tokenizer("abc ").save_pretrained(str(tmp_path / "tokenizer"))
    sizes = DecoderSettings(hidden_size=8, num_layers=1, num_heads=2, max_seq_len=16)
    return build_new_decoder(tmp_path / "plain", sizes, tmp_path / "tokenizer", seed=1)


def from_model(path: Path, *, freeze: bool = False) -> GenrecSftSettings:
    return replace(SETTINGS, model=RecommenderModelSettings(pretrain=str(path), freeze_llm=freeze))


def test_a_new_decoder_writes_bytes_and_ids_and_is_made_once() -> None:
    path, first = prepared_model(SETTINGS, BUILDER)
    tokenizer = load_tokenizer(path)
    assert first == -1
    assert tokenizer.vocab_size == 258 + 4
    assert len(tokenizer.encode("<a_0><b_1>x<a_1>")) == 4
    assert read_record(path) == ModelRecord.of(BUILDER)
    assert prepared_model(SETTINGS, BUILDER)[0] == path
    assert prepared_model(SETTINGS, PromptBuilder(IDS, max_history=3))[0] != path


def test_a_model_gets_the_tokens_and_a_second_run_on_it_gets_none(plain: Path) -> None:
    size = load_tokenizer(plain).vocab_size
    path, first = prepared_model(from_model(plain, freeze=True), BUILDER)
    assert first == size
    assert load_tokenizer(path).encode("<a_0><b_1>") == [size, size + 3]
    assert prepared_model(from_model(path), BUILDER) == (path, -1)
    with pytest.raises(OptionsError, match="nothing would be trained") as refused:
        prepared_model(from_model(path, freeze=True), BUILDER)
    assert refused.value.problem.do.endswith(f"--train_only_tokens_from {size}")


def test_a_model_of_other_ids_is_refused_and_one_of_other_prompts_gets_a_new_record(plain: Path) -> None:
    path, _ = prepared_model(from_model(plain), BUILDER)
    with pytest.raises(DataError) as refused:
        prepared_model(from_model(path), PromptBuilder(SemanticIds(IDS.tokens_by_item[::-1])))
    assert refused.value.problem.code == "genrec.other_ids"
    with pytest.raises(DataError, match="2 of 3 new tokens are in the vocabulary") as refused:
        prepared_model(from_model(path), PromptBuilder(SemanticIds((("<a_0>", "<b_1>"), ("<z_9>", "<a_0>")))))
    other = PromptBuilder(IDS, max_history=2)
    copied, _ = prepared_model(from_model(path), other)
    assert copied != path
    assert read_record(copied) == ModelRecord.of(other)
