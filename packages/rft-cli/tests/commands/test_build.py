"""`rft-train build`: a complete model from nothing, the same bytes for the same seed, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft.tiny_models import new_model
from rft_cli.main import main
from rft_models.policy.load import load_policy

SIZES = ["--vocab_size", "300", "--hidden", "16", "--layers", "1", "--heads", "2", "--ffn", "24"]
SIZES += ["--max_positions", "64"]


@pytest.fixture(autouse=True)
def rows() -> None:
    rows = [{"question": f"How much is {i} and {i}?", "answer": f"{i}+{i} = {2 * i}\n#### {2 * i}"} for i in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(name: str, *argv: str) -> Path:
    words = ["build", "--texts", "rows.jsonl", "--text_keys", "question,answer", *SIZES, "--save_path", name, *argv]
    assert main(words) == 0
    return Path(name)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_other_weights() -> None:
    one, two, other = made("one", "--seed", "5"), made("two", "--seed", "5"), made("other", "--seed", "6")
    names = {file.name for file in one.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    differing = {name for name in names if (one / name).read_bytes() != (other / name).read_bytes()}
    assert differing == {"model.safetensors"}


def test_the_model_has_the_sizes_that_were_asked_for_and_encodes_its_texts(capsys: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(made("model", "--kv_heads", "1"))
    config = policy.model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 1, 2)
    assert (config.num_key_value_heads, config.intermediate_size, config.max_position_embeddings) == (1, 24, 64)
    assert policy.tokenizer is not None
    assert 258 < policy.tokenizer.vocab_size == policy.head.weight.shape[0] <= 300
    text = "How much is 7 and 7?\n#### 14"
    assert policy.tokenizer.decode(policy.tokenizer.encode(text)) == text
    assert len(policy.tokenizer.encode(text)) < len(text) / 1.5, "merges were learned from both columns"
    assert f"{policy.num_parameters:,} random weights" in capsys.readouterr().out


def test_a_text_file_is_read_as_it_is() -> None:
    Path("plain.txt").write_text("one fish two fish\n" * 40)
    tokenizer = load_policy(made("model", "--texts", "plain.txt")).tokenizer
    assert tokenizer is not None
    assert len(tokenizer.encode("one fish two fish")) <= 5


def test_a_model_is_never_written_over_another(capsys: pytest.CaptureFixture[str]) -> None:
    before = (made("model") / "model.safetensors").read_bytes()
    assert main(["build", "--texts", "rows.jsonl", "--text_keys", "answer", "--save_path", "model"]) == 2
    assert "--save_path model-2" in capsys.readouterr().err
    assert (Path("model") / "model.safetensors").read_bytes() == before


def test_a_failure_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(new_model, "build_decoder", fails)
    words = ["build", "--texts", "rows.jsonl", "--text_keys", "answer", *SIZES, "--save_path", "model"]
    assert main(words) == 130
    assert [path.name for path in Path().iterdir() if "model" in path.name] == []


@pytest.mark.parametrize(
    ("argv", "code", "remedy"),
    [
        (["--texts", "row.jsonl"], 4, "--texts rows.jsonl"),
        (["--texts", "none.txt"], 4, "ls -l ."),
        (["--text_keys", "anser"], 4, "--text_keys answer"),
        (["--text_keys", " , "], 4, "--text_keys input,output"),
        (["--vocab_size", "200"], 2, "--vocab_size 258"),
        (["--heads", "3"], 2, "--hidden 12 --heads 3 --kv_heads 3"),
        (["--hiden", "3"], 2, "--hidden 3"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_remedy(
    argv: list[str], code: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", "--texts", "rows.jsonl", "--text_keys", "answer", *SIZES, "--save_path", "model", *argv]
    assert main([*words, "--json_errors"]) == code
    assert remedy in json.loads(capsys.readouterr().err)["problem"]["do"]
    assert not Path("model").exists()
