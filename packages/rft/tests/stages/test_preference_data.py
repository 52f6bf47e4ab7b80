"""Preference rows as samples: pairs as units, what is left out, labelled responses and those of other prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.settings import DpoSettings
from rft.stages.preference_data import PreferenceData, preference_data
from rft_core.errors import DataError, OptionsError
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.settings.preference_training import (
    PreferenceDataSettings,
    PreferenceLossSettings,
    PreferenceTrainingSettings,
)

ROWS = [{"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": str(20 * a)} for a in range(1, 7)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    path = tmp_path_factory.mktemp("model") / "m"
    build_character_model(path, alphabet="0123456789+=", hidden=8, layers=1, heads=2, ffn=8, seed=0)
    return load_tokenizer(path)


def written(rows: list[dict[str, Any]], name: str = "p.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def read(
    tokenizer: HfTokenizer, rows: list[dict[str, Any]], *, loss: Any = None, training: Any = None, **data: Any
) -> PreferenceData:
    settings = DpoSettings(
        model=ModelSettings(pretrain="m"),
        data=PreferenceDataSettings(prompt_data=written(rows), **data),
        loss=PreferenceLossSettings(**(loss or {})),
        training=PreferenceTrainingSettings(train_batch_size=4, **(training or {})),
    )
    return preference_data(settings, tokenizer, 64)


def test_a_pair_is_one_unit_of_prompt_and_each_response(tokenizer: HfTokenizer) -> None:
    data = read(tokenizer, ROWS)
    chosen, rejected = data.training.samples[:2]
    assert (chosen.sample_id, rejected.sample_id) == ("p:0/chosen", "p:0/rejected")
    assert chosen.unit == rejected.unit == "p:0"
    end = tokenizer.eos_ids[0]
    prompt = tokenizer.encode("1+1=", add_special_tokens=True)
    assert list(chosen.token_ids) == [*prompt, *tokenizer.encode("2"), end]
    assert list(rejected.token_ids) == [*prompt, *tokenizer.encode("20"), end]
    assert chosen.prompt_length == len(prompt)
    assert (data.training.num_rows, data.num_steps) == (6, 2)
    assert sorted(int(i) for i in data.mixture.order(0, 0)) == list(range(6))


def test_what_is_too_long_is_left_out_by_name_and_nothing_left_is_an_error(tokenizer: HfTokenizer) -> None:
    longer = {"prompt": "9+9=", "chosen": "1" * 9, "rejected": "2"}
    data = read(tokenizer, [*ROWS, longer], training={"max_len": 10})
    assert data.training.num_rows == 6
    [(name, length)] = data.training.left_out
    assert (name, length) == ("p:6", len(tokenizer.encode("9+9=", add_special_tokens=True)) + 10)
    with pytest.raises(DataError) as raised:
        read(tokenizer, [longer], training={"max_len": 10})
    assert raised.value.problem.do == f"--max_len {length}"


def test_held_out_rows_are_those_of_a_file_or_drawn_by_the_seed(tokenizer: HfTokenizer) -> None:
    data = read(tokenizer, ROWS, held_out_rows=2)
    assert data.held_out is not None
    assert (data.training.num_rows, data.held_out.num_rows) == (4, 2)
    names = [sample.sample_id for part in (data.training, data.held_out) for sample in part.samples]
    assert len(set(names)) == 12
    assert sorted(int(i) for i in data.mixture.order(0, 0)) == list(range(4))
    data = read(tokenizer, ROWS, eval_data=written(ROWS[:3], "e.jsonl"))
    assert data.held_out is not None
    assert data.held_out.num_rows == 3
    assert any("among the training prompts" in note for note in data.notes)
    with pytest.raises(OptionsError) as raised:
        read(tokenizer, ROWS, held_out_rows=6)
    assert raised.value.problem.do == "--held_out_rows 1"


def test_the_excess_of_the_longer_response_weighs_less(tokenizer: HfTokenizer) -> None:
    chosen, rejected = read(tokenizer, ROWS, loss={"ld_alpha": 0.25}).training.samples[:2]
    assert chosen.token_weights == (1.0, 1.0)
    assert rejected.token_weights == (1.0, 1.0, 0.25)


def test_labels_and_pairs_both_give_labelled_responses(tokenizer: HfTokenizer) -> None:
    kto = {"loss_type": "kto"}
    labels = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "2+2=", "completion": "5", "label": False},
    ]
    data = read(tokenizer, labels, loss=kto)
    assert [(s.sample_id, s.advantage, s.unit) for s in data.training.samples] == [
        ("p:0/good", 1, ""),
        ("p:1/bad", -1, ""),
    ]
    data = read(tokenizer, ROWS, loss=kto)
    assert (data.training.samples_a_row, data.training.num_rows) == (1, 12)
    assert [s.sample_id for s in data.training.samples[:2]] == ["p:0/good", "p:0/bad"]
    for sample, other in zip(data.training.samples, data.training.mismatched, strict=True):
        start = sample.prompt_length
        assert other.token_ids[:start] == sample.token_ids[:start]
        assert all(
            other.token_ids[start:] != own.token_ids[start:]
            for own in data.training.samples
            if own.sample_id.split("/")[0] == sample.sample_id.split("/")[0]
        ), "the response belongs to another prompt"


def test_max_samples_takes_the_first_rows(tokenizer: HfTokenizer) -> None:
    data = read(tokenizer, ROWS, max_samples=2)
    assert [sample.unit for sample in data.training.samples] == ["p:0", "p:0", "p:1", "p:1"]
    with pytest.raises(OptionsError) as raised:
        preference_data(DpoSettings(model=ModelSettings(pretrain="m")), tokenizer, 64)
    assert raised.value.problem.code == "data.no_preferences"
