"""Pairs in a store: `dpo` and `rm` have the samples, held-out rows and order that they have without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft.settings import DpoSettings
from rft.stages.preference_data import preference_data
from rft.stages.reward_pairs import reward_data
from rft.stages.supervised.pair_texts import PairTextEncoder
from rft_core.errors import OptionsError
from rft_models.settings import ModelSettings
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.settings.preference_training import PreferenceDataSettings, PreferenceLossSettings
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(build_bpe_tokenizer(["1+1=2"], 258))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Pairs of four prompts, some alike, with margins, weights and outcomes; one is too long, and one equal."""
    pairs = [
        {"prompt": f"{n % 4}?", "chosen": "y" * (n + 1), "rejected": "no", "m": n / 4, "w": n + 1, "right": "AB"[n % 2]}
        for n in range(20)
    ]
    pairs.append({**pairs[0], "chosen": "1" * 60})
    pairs.append({**pairs[0], "chosen": "no"})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(tmp_path / "p.jsonl")


@pytest.mark.parametrize("held_out", [0, 3])
def test_dpo_has_the_same_samples_with_and_without_a_store(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, held_out: int
) -> None:
    made = DpoSettings(model=ModelSettings(pretrain="m"), loss=PreferenceLossSettings(ld_alpha=0.5))
    usual: dict[str, Any] = {"prompt_data": rows, "margin_key": "m", "weight_key": "w", "held_out_rows": held_out}
    on, off = (
        preference_data(
            replace(
                made,
                data=PreferenceDataSettings(data_store=choice, data_store_path=str(tmp_path / "s"), **usual),
                training=replace(made.training, max_len=40, train_batch_size=4),
            ),
            tokenizer,
            99,
        )
        for choice in ("on", "off")
    )
    assert list(on.training.samples) == list(off.training.samples)
    assert on.training.num_loss_tokens == off.training.num_loss_tokens
    assert on.training.stored is not None
    assert on.training.stored.num_equal == 1
    if held_out:
        assert on.held_out is not None
        assert off.held_out is not None
        assert on.held_out.samples == off.held_out.samples
    assert (on.num_steps, on.mixture.sizes) == (off.num_steps, off.mixture.sizes)


@pytest.mark.parametrize(("held_out", "margin_key"), [(0, "m"), (3, "")])
def test_rm_has_the_same_units_with_and_without_a_store(
    tokenizer: HfTokenizer, rows: str, tmp_path: Path, held_out: int, margin_key: str
) -> None:
    training = RewardTrainingSettings(train_batch_size=4, margin=0.5, max_len=40)
    usual: dict[str, Any] = {"prompt_data": rows, "margin_key": margin_key, "weight_key": "w", "outcome_key": "right"}
    on, off = (
        reward_data(
            PairDataSettings(data_store=choice, data_store_path=str(tmp_path / "s"), held_out_rows=held_out, **usual),
            training,
            ("score",),
            PairTextEncoder(tokenizer),
            max_positions=99,
            seed=1,
        )
        for choice in ("on", "off")
    )
    assert list(on.units) == list(off.units)
    assert on.held_out == off.held_out
    assert (on.num_steps, on.mixture.sizes) == (off.num_steps, off.mixture.sizes)


def test_labelled_responses_are_refused(tokenizer: HfTokenizer, rows: str, tmp_path: Path) -> None:
    settings = DpoSettings(
        model=ModelSettings(pretrain="m"),
        data=PreferenceDataSettings(prompt_data=rows, data_store="on", data_store_path=str(tmp_path)),
        loss=PreferenceLossSettings(loss_type="kto"),
    )
    with pytest.raises(OptionsError, match="loss_type kto"):
        preference_data(settings, tokenizer, 99)
