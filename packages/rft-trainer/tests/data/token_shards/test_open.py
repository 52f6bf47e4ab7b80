"""Opening of the windows of a run: what is trained on, what is held out, and what is refused."""

from __future__ import annotations

from pathlib import Path

from token_shards_doubles import Characters, joined_text

from rft_trainer.data.token_shards.open import open_windows
from rft_trainer.settings.pretraining import PretrainDataSettings


def test_the_last_share_of_the_characters_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {number} é\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    data = PretrainDataSettings(
        prompt_data=str(tmp_path / "a.txt"), held_out_share=0.1, data_store_path=str(tmp_path / "store")
    )
    rows = open_windows(data, Characters(), window=9, seed=1)
    place = int(len(text) * 0.9)
    assert joined_text(rows.training) == text[:place]
    assert rows.held_out is not None
    assert joined_text(rows.held_out) == text[place:]
    assert rows.training.num_tokens == place
    assert rows.training.num_bytes == len(text[:place].encode())
    assert sorted(rows.order(0)) == [*range(len(rows.training))]
