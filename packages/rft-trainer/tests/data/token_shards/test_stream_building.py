"""Building of streams: the same tokens however they are divided, kills, damage, and what the name follows from."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from token_shards_doubles import END, Characters

from rft_core.errors import DataError
from rft_trainer.data.store.published_file import shard_path
from rft_trainer.data.token_shards.stream_building import BuiltStream, build_stream, in_this_process
from rft_trainer.data.token_shards.text_plan import TextStream
from rft_trainer.data.token_shards.token_file import open_token_shard
from rft_trainer.data.token_shards.windows import TokenStream

TEXTS = ["one\ntwo\n", "three", "four\nfive\nsix"]


@pytest.fixture
def stream(tmp_path: Path) -> TextStream:
    """Three documents in three files."""
    files = tuple(tmp_path / f"{number}.txt" for number in range(3))
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text)
    return TextStream(files)


def built(root: Path, stream: TextStream, tokenizer: Characters | None = None, bytes_of_shard: int = 6) -> BuiltStream:
    """Build with shards of a few bytes."""
    tokenizer = tokenizer or Characters()
    return build_stream(root, stream, tokenizer, in_this_process(tokenizer), bytes_of_shard=bytes_of_shard)


def text_of(made: BuiltStream) -> str:
    """Return the whole stream, with | for the end token."""
    tokens = TokenStream(made)
    return Characters().decode(tokens.tokens(0, len(tokens)))


@pytest.mark.parametrize("bytes_of_shard", [1, 6, 100])
def test_the_stream_is_the_documents_with_the_end_token_between(
    tmp_path: Path, stream: TextStream, bytes_of_shard: int
) -> None:
    made = built(tmp_path / "store", stream, bytes_of_shard=bytes_of_shard)
    assert text_of(made) == "|".join(TEXTS)
    assert made.num_documents == 3
    assert made.num_bytes == sum(map(len, TEXTS)) == made.num_tokens - 2
    tokens = TokenStream(made)
    assert tokens.document_starts(0, len(tokens)) == [8, 14]
    assert tokens.document_starts(9, 14) == []


def test_ids_take_two_bytes_where_they_fit_and_four_where_not(tmp_path: Path, stream: TextStream) -> None:
    for vocab_size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        made = built(tmp_path / "store", stream, Characters(vocab_size))
        assert open_token_shard(made.directory, 0).token_ids.dtype == dtype
        assert text_of(made) == "|".join(TEXTS)


def test_a_build_that_was_stopped_goes_on_behind_what_it_had(tmp_path: Path, stream: TextStream) -> None:
    asked = iter([False, False, True])
    first = Characters()
    stopping = in_this_process(first, stopped=lambda: next(asked))
    with pytest.raises(KeyboardInterrupt):
        build_stream(tmp_path / "store", stream, first, stopping, bytes_of_shard=6)
    (directory,) = (tmp_path / "store").iterdir()
    (directory / ".shard_000002.1").mkdir()  # as a kill leaves it
    again = Characters()
    made = built(tmp_path / "store", stream, again)
    assert made.directory == directory
    assert text_of(made) == "|".join(TEXTS)
    whole = Characters()
    other = built(tmp_path / "other", stream, whole)
    assert other.content_hash == made.content_hash
    assert sorted([*first.encoded, *again.encoded]) == sorted(whole.encoded)
    assert not [*directory.glob(".shard_*")]


def test_a_complete_stream_is_not_made_again(tmp_path: Path, stream: TextStream) -> None:
    made = built(tmp_path / "store", stream)
    tokenizer = Characters()
    assert built(tmp_path / "store", stream, tokenizer) == made
    assert tokenizer.encoded == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "manifest", "gone"])
def test_a_damaged_shard_is_named_and_built_anew(
    tmp_path: Path, stream: TextStream, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = built(tmp_path / "store", stream)
    place = shard_path(made.directory, 1)
    file = place / "tokens.arrow"
    raw = file.read_bytes()
    if damage == "flipped":
        at = raw.index(np.asarray([ord("t") + 2], np.uint16).tobytes())
        file.write_bytes(raw[:at] + b"\x42" + raw[at + 1 :])
    elif damage == "cut":
        file.write_bytes(raw[:-8])
    elif damage == "manifest":
        (place / "manifest.json").write_text("{}")
    else:
        file.unlink()
    tokenizer = Characters()
    with caplog.at_level(logging.WARNING):
        again = built(tmp_path / "store", stream, tokenizer)
    assert again == made
    assert text_of(again) == "|".join(TEXTS)
    assert [record.getMessage() for record in caplog.records] == [
        f"{place} is not what its manifest says: it is built anew"
    ]
    # that shard alone
    assert len([text for text in tokenizer.encoded if text]) == 1


def test_the_manifest_says_what_the_tokens_follow_from(tmp_path: Path, stream: TextStream) -> None:
    made = built(tmp_path / "store", stream)
    manifest = json.loads((made.directory / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["tokenizer"] == Characters().digest
    assert manifest["shards"] == [facts.sha256 for facts in made.shards]
    assert [entry[1] for entry in manifest["files"]] == [len(text) for text in TEXTS]


def test_another_text_or_tokenizer_or_separator_is_another_stream(tmp_path: Path, stream: TextStream) -> None:
    root = tmp_path / "store"
    before = built(root, stream)
    others = [built(root, stream, Characters(500)), built(root, TextStream(stream.files, "ee"))]
    os.utime(stream.files[0], ns=(1, 1))
    others.append(built(root, stream))
    assert len({made.directory for made in [before, *others]}) == 4
    # the tokens are the same, and a run goes on with them
    assert others[-1].content_hash == before.content_hash
    assert text_of(others[1]) == "one\ntwo\n|thr|four\nfive\nsix"


def test_a_second_document_needs_an_end_token(tmp_path: Path, stream: TextStream) -> None:
    assert text_of(built(tmp_path / "store", TextStream(stream.files[:1]), Characters(eos_ids=()))) == TEXTS[0]
    with pytest.raises(DataError, match="no end token") as caught:
        built(tmp_path / "store", stream, Characters(eos_ids=()))
    assert caught.value.problem.where == str(stream.files[1])


def test_a_text_without_a_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="no token"):
        built(tmp_path / "store", TextStream((file,)))


def test_the_place_of_an_end_token_is_that_of_the_document_in_every_shard(tmp_path: Path, stream: TextStream) -> None:
    made = built(tmp_path / "store", stream, bytes_of_shard=1)
    tokens = TokenStream(made)
    whole = tokens.tokens(0, len(tokens))
    assert [place for place, token in enumerate(whole) if token == END] == tokens.document_starts(0, len(tokens))
