"""Windows: every token predicted once, documents apart, sources one after the other, the first ones of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_shards_doubles import END, Characters, joined_ids, joined_text

from rft_trainer.data.token_shards.stream_building import build_stream, in_this_process
from rft_trainer.data.token_shards.text_plan import TextStream
from rft_trainer.data.token_shards.windows import (
    StreamWindows,
    TokenStream,
    TokenWindows,
    first_windows,
    num_windows_of,
)


def source(
    tmp_path: Path, name: str, documents: list[str], window: int, num: int = 0, bytes_of_shard: int = 5
) -> StreamWindows:
    """Return the windows of documents, in shards of a few bytes."""
    file = tmp_path / f"{name}.txt"
    file.write_text("#".join(documents))
    stream = TextStream((file,), "#")
    built = build_stream(tmp_path, stream, Characters(), in_this_process(Characters()), bytes_of_shard=bytes_of_shard)
    size = num_windows_of(built.num_tokens, window)
    end = built.num_tokens if not num else num * (window - 1) + 1
    return StreamWindows(name, TokenStream(built), built.content_hash, num or size, end, built.num_bytes)


@pytest.mark.parametrize("window", [2, 3, 5, 8, 100])
@pytest.mark.parametrize("mask_documents", [True, False])
def test_every_token_but_the_first_is_predicted_once(tmp_path: Path, window: int, mask_documents: bool) -> None:
    documents = ["one two", "3", "four five six", "seven"]
    windows = TokenWindows([source(tmp_path, "a", documents, window)], window, mask_documents=mask_documents)
    assert joined_text(windows) == "|".join(documents)
    assert sum(sample.num_loss_tokens for samples in windows for sample in samples) == windows.num_tokens - 1
    assert all(sum(sample.num_loss_tokens for sample in samples) <= window - 1 for samples in windows)
    assert all(1 < sample.num_tokens <= window for samples in windows for sample in samples)


def test_a_sample_holds_one_document_and_the_end_token_before_it(tmp_path: Path) -> None:
    documents = ["ab", "cde", "f"]
    windows = TokenWindows([source(tmp_path, "a", documents, 6)], 6, mask_documents=True)
    texts = [[Characters().decode(sample.token_ids) for sample in samples] for samples in windows]
    assert texts == [["ab|", "|cde"], ["e|", "|f"]]
    assert [sample.unit for sample in windows[0]] == ["a:0", "a:0"]
    assert [sample.sample_id for sample in windows[0]] == ["a:0#0", "a:0#1"]
    whole = TokenWindows(windows.sources, 6, mask_documents=False)
    assert [sample.unit for sample in whole[0]] == [""]
    assert Characters().decode(whole[0][0].token_ids) == "ab|cde"


def test_a_document_that_begins_with_the_last_token_begins_in_the_next_window(tmp_path: Path) -> None:
    windows = TokenWindows([source(tmp_path, "a", ["abc", "de"], 4)], 4, mask_documents=True)
    assert [[sample.token_ids[-1] == END for sample in samples] for samples in windows] == [[True], [False]]
    assert windows[1][0].token_ids[0] == END


@given(st.lists(st.text(alphabet="ab\n ", min_size=1, max_size=9), min_size=1, max_size=6), st.integers(2, 9))
@settings(deadline=None, max_examples=15)
def test_masked_samples_are_the_pieces_of_the_whole_windows(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], window: int
) -> None:
    one = source(tmp_path_factory.mktemp("windows"), "a", [*documents, "end"], window)
    masked, whole = (TokenWindows([one], window, mask_documents=mask) for mask in (True, False))
    assert joined_ids(masked) == joined_ids(whole)
    for samples in masked:
        for sample in samples:
            assert END not in sample.token_ids[1:-1]


def test_sources_follow_one_another(tmp_path: Path) -> None:
    first, second = source(tmp_path, "a", ["abcdefg"], 4), source(tmp_path, "b", ["hij"], 4)
    windows = TokenWindows([first, second], 4, mask_documents=True)
    assert windows.sizes == (2, 1)
    assert [sample.sample_id for (sample,) in windows] == ["a:0", "a:1", "b:0"]
    assert windows[-1] == windows[2]
    assert windows[1:] == [windows[1], windows[2]]
    assert windows.num_tokens == 10
    with pytest.raises(IndexError):
        windows[3]


def test_the_hash_follows_from_tokens_window_mask_and_number(tmp_path: Path) -> None:
    one = source(tmp_path, "a", ["abcdefg", "x"], 4)
    hashes = {
        TokenWindows([one], 4, mask_documents=True).data_hash,
        TokenWindows([one], 4, mask_documents=False).data_hash,
        TokenWindows([one], 5, mask_documents=True).data_hash,
        TokenWindows([source(tmp_path, "a", ["abcdefg", "x"], 4, num=1)], 4, mask_documents=True).data_hash,
        TokenWindows([source(tmp_path, "c", ["abcdefh", "x"], 4)], 4, mask_documents=True).data_hash,
    }
    assert len(hashes) == 5


def test_bytes_up_to_a_piece_are_known(tmp_path: Path) -> None:
    one = source(tmp_path, "a", ["éa\nb", "cdé", "f"], 4)
    # tokens e', a, newline | b | end, c, d, e' | end, f: pieces by lines and documents
    assert one.stream.bytes_before(0) == (0, 0)
    assert one.stream.bytes_before(len(one.stream)) == (len("éa\nbcdéf".encode()), len(one.stream))
    bytes_before, place = one.stream.bytes_before(7)
    text = Characters().decode(one.stream.tokens(0, place), skip_special_tokens=True)
    assert bytes_before == len(text.encode())


@pytest.mark.parametrize(
    ("sizes", "limit", "chosen"),
    [
        ([10, 30], 0, [10, 30]),
        ([10, 30], 50, [10, 30]),
        ([10, 30], 8, [2, 6]),
        ([1, 100], 5, [1, 4]),
        ([7, 7, 7], 4, [1, 2, 1]),
    ],
)
def test_a_limit_is_divided_by_the_sizes(sizes: list[int], limit: int, chosen: list[int]) -> None:
    assert first_windows(sizes, limit) == chosen


@pytest.mark.parametrize(("num_tokens", "window", "num"), [(2, 2, 1), (3, 2, 2), (9, 5, 2), (10, 5, 3), (3, 9, 1)])
def test_the_number_of_windows(num_tokens: int, window: int, num: int) -> None:
    assert num_windows_of(num_tokens, window) == num
