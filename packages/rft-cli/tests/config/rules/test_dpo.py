"""Contradictions of preference training, and settings that have no effect."""

from __future__ import annotations

import pytest

from rft.config.errors import SettingsError
from rft_cli.config.resolve import resolve


def codes(words: str) -> list[str]:
    try:
        resolve("dpo", ["--pretrain", "m", *words.split()])
    except SettingsError as error:
        return [problem.code if problem.do else "no remedy" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--loss_type ipo --beta 0.3", []),
        ("--label_smoothing 0.1", []),
        ("--loss_type robust --label_smoothing 0.1", []),
        ("--loss_type hinge --label_smoothing 0.1", ["dpo.other_loss"]),
        ("--simpo_gamma 1", ["dpo.other_loss"]),
        ("--loss_type simpo --simpo_gamma 1", []),
        ("--loss_type simpo --cpo_alpha 0", ["dpo.other_loss"]),
        ("--f_divergence alpha --label_smoothing 0.1", ["dpo.smoothed_divergence"]),
        ("--loss_type kto --ld_alpha 0.5 --rpo_alpha 1", ["dpo.no_pairs", "dpo.no_pairs"]),
        ("--loss_type kto --reference_free", ["dpo.kto_reference"]),
        ("--loss_type kto --desirable_weight 2", []),
        ("--completion_key answer", ["dpo.other_loss"]),
        ("--margin_key m", []),
        ("--loss_type hinge --margin_key m", ["dpo.other_loss"]),
        ("--f_divergence alpha --margin_key m", ["dpo.margin_divergence"]),
        ("--loss_weights sigmoid=0.8,bco_pair=0.2 --margin_key m", []),
        ("--loss_weights hinge=1,bco_pair=1", ["dpo.loss_weights"]),
        ("--loss_weights sigmoid", ["dpo.loss_weights"]),
        ("--loss_type hinge --loss_weights hinge=1,simpo=1 --simpo_gamma 1", []),
        ("--loss_type aot --label_smoothing 0.1", []),
        ("--loss_type aot --weight_key w", ["dpo.sorted_pairs"]),
        ("--loss_weights sigmoid=1,aot_unpaired=1 --use_weighting", ["dpo.sorted_pairs"]),
        ("--reference_pretrain r", []),
        ("--reference_pretrain r --reference_free", ["dpo.no_reference"]),
        ("--reference_pretrain r --loss_type simpo", ["dpo.no_reference"]),
        ("--patience 2", ["dpo.no_held_out"]),
        ("--patience 2 --held_out_rows 5", []),
        ("--label_smoothing 0.5", ["setting.range"]),
    ],
)
def test_numbers_of_another_loss_are_refused(words: str, found: list[str]) -> None:
    shown = codes(words)
    assert shown == found or (found == ["setting.range"] and len(shown) == 1)


def test_settings_without_effect_are_noted() -> None:
    notes = resolve("dpo", ["--pretrain", "m", "--loss_type", "orpo", "--reference_free"]).notes
    assert any("reference_free" in note and "has no effect" in note for note in notes)
    notes = resolve("dpo", ["--pretrain", "m", "--f_alpha", "0.7"]).notes
    assert any("f_alpha" in note for note in notes)
