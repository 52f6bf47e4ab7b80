"""Opening of the windows of a run: what is trained on, what is held out, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from token_shards_doubles import Characters, joined_text

from rft_core.errors import DataError, OptionsError
from rft_trainer.data.token_shards.open import PretrainRows, open_windows, separator_of, store_directory
from rft_trainer.settings.pretraining import PretrainDataSettings

TEXT = "".join(f"line {number} é\n" for number in range(100))


@pytest.fixture
def data(tmp_path: Path) -> PretrainDataSettings:
    """One text, whose last tenth is held out."""
    (tmp_path / "a.txt").write_text(TEXT)
    return PretrainDataSettings(
        prompt_data=str(tmp_path / "a.txt"), held_out_share=0.1, data_store_path=str(tmp_path / "store")
    )


def opened(data: PretrainDataSettings, window: int = 9) -> PretrainRows:
    """Open with one token a character."""
    return open_windows(data, Characters(), window=window, seed=1)


def test_the_last_share_of_the_characters_is_held_out(data: PretrainDataSettings) -> None:
    rows = opened(data)
    place = int(len(TEXT) * 0.9)
    assert joined_text(rows.training) == TEXT[:place]
    assert rows.held_out is not None
    assert joined_text(rows.held_out) == TEXT[place:]
    assert rows.training.num_tokens == place
    assert rows.training.num_bytes == len(TEXT[:place].encode())
    assert sorted(rows.order(0)) == [*range(len(rows.training))]
    assert [*rows.order(0)] != [*rows.order(1)]
    assert "1 documents" in rows.notes[0]


def test_held_out_texts_of_their_own(data: PretrainDataSettings, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ("first", "second")))
    chosen = replace(data, held_out_share=0.0, eval_data=f"own={tmp_path / 'b.jsonl'}", text_key="body")
    rows = opened(chosen)
    assert joined_text(rows.training) == TEXT
    assert rows.held_out is not None
    assert joined_text(rows.held_out) == "first|second"
    assert rows.held_out.sources[0].name == "own"
    assert opened(replace(chosen, eval_data="")).held_out is None


def test_fewer_windows_have_fewer_tokens_and_bytes(data: PretrainDataSettings) -> None:
    rows = opened(replace(data, max_samples=3, max_eval_samples=2))
    assert rows.held_out is not None
    assert (len(rows.training), len(rows.held_out)) == (3, 2)
    assert rows.training.num_tokens == 3 * 8 + 1
    assert rows.training.num_bytes == len(TEXT[:25].encode())
    assert joined_text(rows.training) == TEXT[:25]
    assert rows.data_hash != opened(data).data_hash


def test_sources_are_mixed_by_their_shares(data: PretrainDataSettings, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b" * 500)
    both = replace(data, prompt_data=f"{data.prompt_data},{tmp_path / 'b.txt'}", held_out_share=0.0)
    plain = opened(both)
    assert sorted(plain.order(0)) == [*range(len(plain.training))]
    rows = opened(replace(both, prompt_data_probs="0.2,0.8"))
    first = [index < rows.training.sizes[0] for index in rows.order(0)]
    assert abs(sum(first) - 0.2 * len(first)) <= 1


def test_a_directory_or_pattern_of_texts_is_one_source(data: PretrainDataSettings, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_text(f"text of {name}")
    for path in (folder, folder / "*.txt"):
        rows = opened(replace(data, prompt_data=str(path), held_out_share=0.0))
        assert joined_text(rows.training) == "text of a|text of b"


@pytest.mark.parametrize(
    ("changes", "code", "do"),
    [
        ({"prompt_data": ""}, "data.no_texts_named", "--prompt_data input.txt"),
        ({"eval_data": "b.txt"}, "data.two_held_out", "--held_out_share 0"),
    ],
)
def test_settings_that_do_not_fit(data: PretrainDataSettings, changes: dict[str, str], code: str, do: str) -> None:
    with pytest.raises(OptionsError) as caught:
        opened(replace(data, **changes))
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)


def test_a_window_of_one_token_and_a_text_of_one_token_are_refused(data: PretrainDataSettings, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="window of 1 token"):
        opened(data, window=1)
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(DataError, match="one has 1 token"):
        opened(replace(data, prompt_data=str(tmp_path / "one.txt"), held_out_share=0.0))


def test_an_unknown_suffix_is_refused(data: PretrainDataSettings, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(DataError, match=r"\.md"):
        opened(replace(data, prompt_data=str(tmp_path / "a.md")))


@pytest.mark.parametrize(("text", "separator"), [("\\n--\\n", "\n--\n"), ("a\\\\nb", "a\\nb"), ("\\t", "\t"), ("", "")])
def test_a_separator_is_written_with_backslashes(text: str, separator: str) -> None:
    assert separator_of(text) == separator


def test_the_store_lies_where_it_is_chosen_else_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RFT_CACHE", raising=False)
    assert store_directory("~/tokens") == tmp_path / "tokens"
    assert store_directory("") == tmp_path / ".cache" / "rft" / "data"
    monkeypatch.setenv("RFT_CACHE", "~/mine")
    assert store_directory("") == tmp_path / "mine" / "data"
    assert store_directory("/else") == Path("/else")
