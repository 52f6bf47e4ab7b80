"""Windows of tokens with real tokenizers: pieces change no token, workers change no byte, and text comes back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rft.tokenizing import store_space
from rft.tokenizing.pretraining_windows import pretraining_windows
from rft.tokenizing.store_space import tokens_within
from rft_core.errors import StorageError
from rft_models.tiny_models.text import build_bpe_tokenizer
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_trainer.data.store.worker_pool import BuildWorkers
from rft_trainer.data.token_shards.pieces import cut_text
from rft_trainer.data.token_shards.stream_building import BuiltStream, build_stream, in_this_process
from rft_trainer.data.token_shards.text_plan import TextStream
from rft_trainer.data.token_shards.workers import tokens_in_workers
from rft_trainer.settings.pretraining import PretrainDataSettings

TEXT = "".join(
    f"Line {n}: the {n}th line, isn't it?\n{'  indented' if n % 3 else ''}\n\nÉté {n * n} 日本\n" for n in range(200)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """Byte-level BPE with merges, on disk."""
    place = tmp_path_factory.mktemp("tokenizer")
    HfTokenizer(build_bpe_tokenizer([TEXT], 400)).save_pretrained(place)
    return load_tokenizer(place)


@pytest.fixture
def stream(tmp_path: Path) -> TextStream:
    """One text of some ten thousand bytes."""
    (tmp_path / "a.txt").write_text(TEXT)
    return TextStream((tmp_path / "a.txt",))


@pytest.mark.parametrize("most", [40, 100, 1000])
def test_pieces_have_the_tokens_of_the_whole_text(tokenizer: HfTokenizer, most: int) -> None:
    pieces = [*cut_text(TEXT, most)]
    assert len(pieces) > len(TEXT) // (2 * most)
    assert [token for ids in tokenizer.encode_batch(pieces) for token in ids] == tokenizer.encode(TEXT)


def test_the_windows_hold_the_tokens_of_the_text(tokenizer: HfTokenizer, stream: TextStream, tmp_path: Path) -> None:
    data = PretrainDataSettings(prompt_data=str(stream.files[0]), data_store_path=str(tmp_path / "store"))
    rows = pretraining_windows(data, tokenizer, window=64, seed=1)
    ids = [token for number, (sample,) in enumerate(rows.training) for token in sample.token_ids[number > 0 :]]
    assert ids == tokenizer.encode(TEXT)
    assert rows.training.num_bytes == len(TEXT.encode())


def test_workers_make_the_shards_of_this_process(tokenizer: HfTokenizer, stream: TextStream, tmp_path: Path) -> None:
    here = build_stream(tmp_path / "here", stream, tokenizer, in_this_process(tokenizer), bytes_of_shard=2000)
    workers = BuildWorkers(
        [sys.executable, "-P", "-m", "rft.tokenizing.token_worker_main"],
        {"tokenizer": tokenizer.where, "digest": tokenizer.digest},
        num_workers=2,
        fewest_shards=2,
    )

    def refused(*_: object) -> object:
        raise AssertionError("there are enough shards for workers")

    build = tokens_in_workers(workers, refused)  # pyright: ignore[reportArgumentType]
    there = build_stream(tmp_path / "there", stream, tokenizer, build, bytes_of_shard=2000)
    assert len(there.shards) > 3
    assert there.shards == here.shards


def test_tokens_of_texts_have_the_bound_of_rows(
    tokenizer: HfTokenizer, stream: TextStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_space, "GIGABYTE", 1000)
    root = tmp_path / "stores"

    def made(most: int) -> BuiltStream:
        build = tokens_within(root, most, in_this_process(tokenizer))
        return build_stream(root, stream, tokenizer, build, bytes_of_shard=2000)

    with pytest.raises(StorageError) as caught:
        made(3)
    problem = caught.value.problem
    assert problem.code == "store.space"
    assert problem.do.startswith("--data_store_max_gb ")
    [directory] = root.iterdir()
    assert [*directory.glob("shard_*")] != [], "what is built stays"
    whole = made(10**6)
    assert whole.num_bytes == len(TEXT.encode())
    assert made(1) == whole, "what is there may be read, however much it is"
