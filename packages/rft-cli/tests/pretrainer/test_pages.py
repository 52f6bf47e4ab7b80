"""The table of the guide's fields as the help shows it."""

from __future__ import annotations

from rft_cli.pretrainer.fields import FIELDS
from rft_cli.pretrainer.pages import field_table


def test_each_field_has_a_line_with_the_setting_here_and_both_defaults() -> None:
    [(title, rows)] = field_table()
    assert "guide" in title
    assert len(rows) == len(FIELDS)
    assert rows["training.batch_size"].startswith("--train_batch_size; 128, 32; ")
    assert rows["training.gradient_clip_val"] == "--max_norm; 1.0, 1"
    assert rows["logging.save_logs"].startswith("true; ")
