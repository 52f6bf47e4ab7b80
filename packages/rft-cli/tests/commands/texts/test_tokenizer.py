"""`rft-train tokenizer`: a directory that loads, whole or not at all, and settings without an effect refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft_cli.main import main
from rft_models.tokenization.tokenizer import load_tokenizer

TEXT = "one fish two fish\nred fish blue fish\n" * 40


@pytest.fixture(autouse=True)
def texts() -> None:
    Path("input.txt").write_text(TEXT)


def made(*argv: str) -> Path:
    assert main(["tokenizer", *argv, "--save_path", "made"]) == 0
    return Path("made")


def test_characters_of_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(made("--prompt_data", "input.txt", "--tokenizer_type", "characters"))
    assert tokenizer.vocab_size == 2 + len(set(TEXT))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    shown = capsys.readouterr().out
    assert f"{len(TEXT):,} characters in input.txt" in shown
    assert "one token a character, 18 tokens" in shown


def test_bpe_learns_merges_from_rows_and_takes_a_chat_template() -> None:
    Path("rows.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    Path("chat.jinja").write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    words = ["--prompt_data", "rows.jsonl", "--text_key", "body", "--vocab_size", "262"]
    tokenizer = load_tokenizer(made(*words, "--chat_template_file", "chat.jinja"))
    assert tokenizer.vocab_size == 262
    assert len(tokenizer.encode("fish")) < 4
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "[hi]"


def test_few_characters_give_no_merges(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tokenizer(made("--prompt_data", "input.txt")).vocab_size == 258
    assert "no merges" in capsys.readouterr().out


def test_only_the_first_characters_are_learned_from() -> None:
    words = ["--prompt_data", "input.txt", "--tokenizer_type", "characters", "--max_characters", "4"]
    assert load_tokenizer(made(*words)).vocab_size == 2 + len(set("one "))


def test_bytes_need_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_tokenizer(made("--tokenizer_type", "bytes")).vocab_size == 258
    assert "none are needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--tokenizer_type", "bytes", "--prompt_data", "input.txt"], "--prompt_data"),
        (["--tokenizer_type", "bytes", "--vocab_size", "300"], "--vocab_size"),
        (["--tokenizer_type", "characters", "--prompt_data", "input.txt", "--vocab_size", "300"], "--vocab_size"),
        ([], "--prompt_data"),
    ],
)
def test_what_has_no_effect_or_is_missing_is_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", *words, "--save_path", "made"]) == 2
    assert named in capsys.readouterr().err
    assert not Path("made").exists()


def test_a_chat_template_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt_data", "input.txt", "--chat_template_file", "none.jinja", "--save_path", "made"]
    assert main(["tokenizer", *words]) == 4
    assert "none.jinja cannot be read" in capsys.readouterr().err
    assert not Path("made").exists()


def test_a_tokenizer_is_never_written_over_another(capsys: pytest.CaptureFixture[str]) -> None:
    made("--tokenizer_type", "bytes")
    assert main(["tokenizer", "--tokenizer_type", "bytes", "--save_path", "made"]) == 2
    assert "--save_path made-2" in capsys.readouterr().err
