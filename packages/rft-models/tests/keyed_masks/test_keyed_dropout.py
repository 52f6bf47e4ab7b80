"""Masks of adapters' dropout against the same arithmetic on Python's integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft_models.keyed_masks.keyed_dropout import KeyedDropout, RowKeys, mix

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """SplitMix64's finaliser."""
    word %= WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def row_keys(samples: list[list[int]], update: int) -> list[int]:
    """One key for each token of these samples."""
    keys: list[int] = []
    for sample in samples:
        whole = sum(mixed(token * GOLDEN + place) for place, token in enumerate(sample))
        keys += [mixed(whole + mixed(place * GOLDEN + update)) for place in range(len(sample))]
    return keys


def hooked(samples: list[list[int]], update: int = 0, rows: RowKeys | None = None) -> RowKeys:
    rows = RowKeys() if rows is None else rows
    rows.update = update
    ids = torch.tensor([[token for sample in samples for token in sample]])
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
    rows.hook(nn.Identity(), (), {"input_ids": ids, "position_ids": positions})
    return rows


def unsigned(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    return [int(value) % WORD for value in tensor.flatten().tolist()]


def test_words_are_mixed_as_splitmix64_mixes_them() -> None:
    words = [0, 1, WORD - 1, 2**63, 0x0123456789ABCDEF, 30, 27 << 40]
    signed = [word - WORD if word >= 2**63 else word for word in words]
    assert unsigned(mix(torch.tensor(signed))) == [mixed(word) for word in words]


def test_a_row_has_the_key_of_its_sample_its_place_and_the_update() -> None:
    samples = [[5, 9, 5], [7], [0, 3]]
    for update in (0, 3):
        keys = unsigned(hooked(samples, update).keys_T)
        assert keys == row_keys(samples, update)
        assert len(set(keys)) == 6
    assert unsigned(hooked(samples[1:]).keys_T) == row_keys(samples, 0)[3:]


def test_keys_are_those_of_the_last_forward_with_gradients() -> None:
    rows = hooked([[1, 2]])
    kept = unsigned(rows.keys_T)
    with torch.no_grad():
        hooked([[3, 4]], rows=rows)
    assert unsigned(rows.keys_T) == kept, "layers that are computed again need them"
    for absent in ("input_ids", "position_ids"):
        hooked([[1, 2]], rows=rows)
        inputs: dict[str, Any] = {"input_ids": torch.ones(1, 2), "position_ids": torch.arange(2)[None]}
        del inputs[absent]
        rows.hook(nn.Identity(), (), inputs)
        assert rows.keys_T is None


def wide_keys(number: int) -> RowKeys:
    rows = RowKeys()
    rows.keys_T = mix(torch.arange(number))
    return rows


def test_an_entry_is_kept_where_the_first_24_bits_of_its_word_reach_the_share() -> None:
    rows, key, columns = wide_keys(40), 12345, 30
    assert rows.keys_T is not None
    words = [[mixed(mixed(int(row) + key) + column * GOLDEN) for column in range(columns)] for row in rows.keys_T]
    inputs = torch.arange(1.0, 1.0 + 40 * columns).view(1, 40, columns)
    # one whose next bit is set too, so that a border between two words of 24 bits is rounded to the next
    border = next(word >> 40 for word in words[7] if word >> 39 & 1)
    for share in (border / 2**24, (border + 0.6) / 2**24):
        found = KeyedDropout(share, key, rows)(inputs)
        keep = torch.tensor([[word >> 40 >= round(share * 2**24) for word in row] for row in words])
        assert torch.equal(found[0] != 0, keep)
        torch.testing.assert_close(found[0], inputs[0] * keep / (1 - share))


def test_masks_are_drawn_where_the_inputs_are() -> None:
    rows = RowKeys()
    assert rows.update == 0
    ids = torch.ones(1, 3, dtype=torch.int64, device="meta")
    rows.hook(nn.Identity(), (), {"input_ids": ids, "position_ids": ids})
    assert rows.keys_T is not None
    assert rows.keys_T.is_meta
    assert KeyedDropout(0.5, 1, rows)(torch.ones(1, 3, 2, device="meta")).is_meta


def test_layers_have_masks_of_their_own_and_the_type_stays() -> None:
    rows, inputs = wide_keys(20), torch.ones(1, 20, 8, dtype=torch.bfloat16)
    found = [KeyedDropout(0.5, key, rows)(inputs) for key in (1, 2, 1)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert {output.dtype for output in found} == {torch.bfloat16}


def test_nothing_is_dropped_without_gradients_or_in_eval_mode() -> None:
    inputs, rows = torch.ones(1, 3, 2), wide_keys(3)
    dropout = KeyedDropout(0.5, 1, rows)
    with torch.no_grad():
        assert dropout(inputs) is inputs
    assert dropout.eval()(inputs) is inputs
    assert dropout.train()(inputs) is not inputs


@pytest.mark.parametrize("keys", [None, 2])
def test_rows_without_keys_of_their_own_are_refused(keys: int | None) -> None:
    rows = RowKeys() if keys is None else wide_keys(keys)
    with pytest.raises(AssertionError):
        KeyedDropout(0.5, 1, rows)(torch.ones(1, 3, 2))
