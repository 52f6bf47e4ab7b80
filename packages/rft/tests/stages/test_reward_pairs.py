"""Pairs as units of a reward model's training: tokens, labels, what is left out, what is held out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.build.images import ImageReading
from rft.stages.reward_pairs import RewardData, pair_keys, reward_data
from rft.stages.supervised.pair_texts import PairTextEncoder
from rft_core.errors import DataError, OptionsError
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings


class Tokenizer:
    """A token a character, and an end token."""

    has_chat_template = False
    eos_ids = (0,)
    hf_tokenizer = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [*map(ord, text)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"input": f"{number}?", "chosen": "yes", "rejected": "no" * (1 + number % 3)} | more


def read(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    heads: tuple[str, ...] = ("score",),
    images: ImageReading | None = None,
    **chosen: Any,
) -> RewardData:
    training = {name: chosen.pop(name) for name in ("tie_margin", "margin", "max_len", "max_epochs") if name in chosen}
    data = PairDataSettings(prompt_data=write(tmp_path / "train.jsonl", rows), **chosen)
    tokenizer: Any = Tokenizer()
    encoder = PairTextEncoder(tokenizer, images)
    return reward_data(
        data, RewardTrainingSettings(train_batch_size=4, **training), heads, encoder, max_positions=64, seed=1
    )


def test_both_texts_of_a_pair_are_one_unit_that_begins_with_what_they_share(tmp_path: Path) -> None:
    found = read(tmp_path, [row(n) for n in range(5)], max_epochs=3)
    chosen, rejected = found.units[1]
    assert chosen.token_ids == (*map(ord, "1?yes"), 0)
    assert rejected.token_ids == (*map(ord, "1?nono"), 0)
    assert (chosen.prompt_length, rejected.prompt_length) == (2, 2)
    assert chosen.unit == rejected.unit == "train:1"
    assert (chosen.sample_id, rejected.sample_id) == ("train:1/chosen", "train:1/rejected")
    assert found.num_steps == 2 * 3


def test_margins_weights_and_labels_come_from_columns(tmp_path: Path) -> None:
    rows = [row(0, m=0.5, w=2, right="B"), row(1, m=0.25, w=1, right="A")]
    found = read(tmp_path, rows, margin_key="m", weight_key="w", outcome_key="right", margin=9.0)
    assert [unit[0].sequence_numbers for unit in found.units] == [(0.5, 2.0, -1.0), (0.25, 1.0, 1.0)]
    plain = read(tmp_path, rows, margin=0.125)
    assert plain.units[0][0].sequence_numbers == (0.125, 1.0, 1.0)


def test_several_heads_read_a_column_each(tmp_path: Path) -> None:
    rows = [row(0, good="A", short=None), row(1, good="C", short="B")]
    found = read(tmp_path, rows, ("good", "short"), tie_margin=0.5)
    assert [unit[1].sequence_numbers[2:] for unit in found.units] == [(1.0, 2.0), (0.0, -1.0)]
    assert found.num_ties == 1
    assert pair_keys(PairDataSettings(), ("good", "short")).outcomes == ("good", "short")


def test_a_tie_needs_a_model_of_ties(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, [row(0, right="A"), row(1, right="tie")], outcome_key="right")
    assert (caught.value.problem.code, caught.value.problem.do) == ("data.tie", "--tie_margin 0.5")
    assert "train:1" in caught.value.problem.what


def test_a_pair_with_a_text_that_is_too_long_is_left_out_by_name(tmp_path: Path) -> None:
    found = read(tmp_path, [row(n) for n in range(3)], max_len=7)
    assert found.left_out == (("train:2", 9),)
    assert [unit[0].unit for unit in found.units] == ["train:0", "train:1"]
    with pytest.raises(DataError) as caught:
        read(tmp_path, [row(0)], max_len=3)
    assert (caught.value.problem.code, caught.value.problem.do) == ("data.pairs_too_long", "--max_len 6")
    with pytest.raises(DataError) as caught:
        read(tmp_path, [row(0, chosen="y" * 99)])
    assert "64 tokens" in caught.value.problem.do, "no limit makes the model longer"


def test_held_out_pairs_must_fit(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [row(7), row(8)])
    assert len(read(tmp_path, [row(0)], eval_data=held).held_out) == 4
    with pytest.raises(DataError) as caught:
        read(tmp_path, [row(0)], eval_data=held, max_len=7)
    assert (caught.value.problem.code, caught.value.problem.do) == ("eval.pair_too_long", "--max_len 9")


def test_pairs_of_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    rows = [row(n // 3, rejected="no" * (1 + n % 3)) for n in range(30)]
    found = read(tmp_path, rows, held_out_rows=5)
    assert len(found.held_out) == 2 * 6
    apart = {sample.token_ids[0] for sample in found.held_out}
    assert apart.isdisjoint(unit[0].token_ids[0] for unit in found.units)
    with pytest.raises(OptionsError) as caught:
        read(tmp_path, rows, held_out_rows=30)
    assert caught.value.problem.code == "data.held_out_pairs"


def test_what_a_person_should_know_is_noted(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [row(3), row(40)])
    rows = [row(n, chosen="a long reply") for n in range(20)] + [row(50, rejected="yes")]
    notes = read(tmp_path, rows, eval_data=held, max_len=40).notes
    assert "left out, both responses are the same text: 1 pairs" in notes
    assert "1 of 2 held-out pairs have a prompt that is trained on too" in notes
    assert any("100%" in note for note in notes), "length alone tells which is better"


def test_threads_give_the_same_units(tmp_path: Path) -> None:
    rows = [row(n) for n in range(40)]
    assert read(tmp_path, rows, num_workers=2).units == read(tmp_path, rows).units


def test_max_samples_takes_from_each_source_in_proportion(tmp_path: Path) -> None:
    second = write(tmp_path / "second.jsonl", [row(n) for n in range(20)])
    first = write(tmp_path / "first.jsonl", [row(n) for n in range(10)])
    data = PairDataSettings(prompt_data=f"{first},{second}", max_samples=6)
    tokenizer: Any = Tokenizer()
    encoder = PairTextEncoder(tokenizer)
    found = reward_data(data, RewardTrainingSettings(), ("score",), encoder, max_positions=64, seed=1)
    assert [unit[0].unit.split(":")[0] for unit in found.units] == ["first"] * 2 + ["second"] * 4


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError) as caught:
        read(tmp_path, [row(0, input=turns)])
    assert caught.value.problem.code == "data.no_template"


def test_rows_must_be_named(tmp_path: Path) -> None:
    tokenizer: Any = Tokenizer()
    encoder = PairTextEncoder(tokenizer)
    with pytest.raises(OptionsError) as caught:
        reward_data(PairDataSettings(), RewardTrainingSettings(), ("score",), encoder, max_positions=9, seed=1)
    assert caught.value.problem.code == "data.no_pairs"
