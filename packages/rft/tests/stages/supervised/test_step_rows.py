"""Rows of labelled steps as units: what is learned, left out and held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft.stages.supervised.step_rows import StepData, step_data
from rft_core.errors import DataError
from rft_models.reward_model.step_encoding import StepText
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings


class Encoder:
    """A token a character, and 0 behind each step."""

    separator = "\n"

    class tokenizer:
        has_chat_template = False

    def encode(self, prompt: str, messages: Any, steps: Any) -> StepText:
        ids, ends = [*map(ord, prompt)], []
        for step in steps:
            ids += [*map(ord, step), 0]
            ends.append(len(ids) - 1)
        return StepText(tuple(ids), len(prompt), tuple(ends))


def read(tmp_path: Path, rows: list[dict[str, Any]], **chosen: Any) -> StepData:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {name: chosen.pop(name) for name in ("max_len", "train_on_last_step_only") if name in chosen}
    encoder: Any = Encoder()
    data = PairDataSettings(prompt_data=str(path), **chosen)
    return step_data(data, RewardTrainingSettings(train_batch_size=4, **training), encoder, max_positions=64, seed=1)


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{n}?",
            "completions": ["a", "bc" * (n + 1)],
            "labels": [True, None if n == 1 else False],
            "w": n + 1,
        }
        for n in range(count)
    ]


def test_the_tokens_that_end_labelled_steps_are_learned(tmp_path: Path) -> None:
    found = read(tmp_path, rows(3), weight_key="w")
    [sample] = found.units[0]
    assert sample.loss_mask == (False, True, False, False, True)
    assert sample.returns == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert (sample.weight, found.units[2][0].weight) == (1.0, 3.0)
    assert (found.num_labels, found.good_share, found.num_steps) == (5, 3 / 5, 1)


def test_the_last_labelled_step_alone_is_learned_and_held_out_rows_keep_all(tmp_path: Path) -> None:
    found = read(tmp_path, rows(4), train_on_last_step_only=True, held_out_rows=1)
    assert len(found.units) == 3
    assert all(unit[0].num_loss_tokens == 1 for unit in found.units)
    assert sum(sample.num_loss_tokens for sample in found.held_out) in (1, 2)


def test_a_row_that_is_too_long_is_left_out_by_name(tmp_path: Path) -> None:
    assert read(tmp_path, rows(3), max_len=9).left_out == (("train:2", 11),)
    with pytest.raises(DataError) as caught:
        read(tmp_path, rows(2), max_len=5)
    assert (caught.value.problem.code, caught.value.problem.do) == ("data.steps_too_long", "--max_len 9")
