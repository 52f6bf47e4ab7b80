"""Both caches against lists of rows: what they hold after rows came, grew, were dropped, repeated and reordered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rft_models.decode.kv_cache import (
    GrowingCache,
    StaticCache,
    check_ascending,
    check_places,
    check_room,
    dynamic_layers,
    keys_and_values_bytes,
)

HEADS, WIDTH = 2, 3
CPU = torch.device("cpu")


def new_static(layers: int = 2, rows: int = 6, length: int = 12) -> StaticCache:
    """A cache whose memory is as a former use with broken weights left it."""
    cache = StaticCache(layers, rows, HEADS, length, WIDTH, dtype=torch.float32, device=CPU)
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    return cache


def tokens(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


class StaticRows:
    """The same operations on a `StaticCache` and on lists: [prompt number, own tokens [layer][store][n] of [G, D]]."""

    def __init__(self, layers: int = 2) -> None:
        self.cache, self.layers = new_static(layers), layers
        self.generator = torch.Generator().manual_seed(layers)
        self.prompts: list[Tensor] = []
        """[layer, store, G, L, D] of each prompt."""
        self.offsets: list[int] = []
        self.layouts = {self.cache.layout}
        self.rows: list[tuple[int, list[Tensor]]] = []
        """(number of the prompt, [layer, store, G, D] of each own token)."""

    def append(self, lengths: list[int], copies: list[int], offsets: list[int] | None = None) -> None:
        self.cache.append(torch.tensor(lengths), torch.tensor(copies))
        self.check_layout()
        if offsets is not None:
            self.cache.shift_positions(torch.tensor(offsets))
        self.offsets += offsets or [0] * len(lengths)
        blocks = torch.zeros(self.layers, 2, len(lengths), HEADS, max(lengths), WIDTH)
        for number, (length, count) in enumerate(zip(lengths, copies, strict=True)):
            blocks[:, :, number, :, :length] = tokens(self.generator, self.layers, 2, HEADS, length, WIDTH)
            self.rows += [(len(self.prompts), [])] * count
            self.prompts.append(blocks[:, :, number, :, :length])
        for layer in range(self.layers):
            self.cache.write_prompts(layer, blocks[layer, 0].clone(), blocks[layer, 1].clone())
        self.check()

    def step(self) -> None:
        self.cache.clear_next_column()
        new = tokens(self.generator, len(self.rows), self.layers, 2, HEADS, WIDTH)
        for row, (prompt, own) in enumerate(self.rows):
            for layer in range(self.layers):
                self.cache.keys[layer][row, :, len(own)] = new[row, layer, 0]
                self.cache.values[layer][row, :, len(own)] = new[row, layer, 1]
            self.rows[row] = (prompt, [*own, new[row]])
        self.cache.own_lengths_B = self.cache.own_lengths_B + 1
        self.check()

    def change(self, what: str, rows: list[int]) -> None:
        prompts = self.cache.prompt_keys[0]
        getattr(self.cache, what)(torch.tensor(rows, dtype=torch.int64))
        self.check_layout()
        self.rows = [self.rows[row] for row in rows]
        used = sorted({prompt for prompt, _ in self.rows})
        assert (self.cache.prompt_keys[0] is prompts) == (len(used) == len(self.prompts)), "copied where one is gone"
        self.rows = [(used.index(prompt), own) for prompt, own in self.rows]
        self.prompts = [self.prompts[number] for number in used]
        self.offsets = [self.offsets[number] for number in used]
        self.check()

    def check_layout(self) -> None:
        assert self.cache.layout not in self.layouts, "blocks of other rows would be taken for those of these"
        self.layouts.add(self.cache.layout)

    def check(self) -> None:
        cache, lengths = self.cache, [prompt.shape[3] for prompt in self.prompts]
        own, longest = [len(own) for _, own in self.rows], max(lengths, default=0)
        assert cache.num_rows == len(self.rows)
        assert cache.prompt_lengths_P.tolist() == lengths
        assert cache.own_lengths_B.tolist() == own
        assert cache.own_lengths_B.dtype is torch.int64
        assert cache.prompt_of_row_B.tolist() == [prompt for prompt, _ in self.rows]
        totals = [lengths[prompt] + len(own) for prompt, own in self.rows]
        assert cache.lengths_B.tolist() == totals
        assert cache.positions_B.tolist() == [
            total + self.offsets[prompt] for total, (prompt, _) in zip(totals, self.rows, strict=True)
        ]
        assert (cache.longest(), cache.longest_own()) == (max(totals, default=0), max(own, default=0))
        for layer in range(self.layers):
            for store, (found, whole) in enumerate(
                ((cache.prompt_keys, cache.keys), (cache.prompt_values, cache.values))
            ):
                prompts = torch.zeros(len(lengths), HEADS, longest, WIDTH)
                for number, prompt in enumerate(self.prompts):
                    prompts[number, :, : lengths[number]] = prompt[layer, store]
                assert torch.equal(found[layer], prompts)
                columns = torch.zeros(len(own), HEADS, max(own, default=0), WIDTH)
                for row, (_, held) in enumerate(self.rows):
                    for column, token in enumerate(held):
                        columns[row, :, column] = token[layer, store]
                assert torch.equal(whole[layer][: len(own), :, : columns.shape[2]], columns)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_static_cache_holds_what_lists_of_its_rows_hold(layers: int) -> None:
    rows = StaticRows(layers)
    rows.append([4, 1], [1, 2], [-2, 3])
    rows.step()
    rows.step()
    rows.append([2, 6], [1, 1], [0, -5])
    rows.step()
    rows.change("keep", [0, 2, 4])
    rows.append([3], [2])
    rows.step()
    rows.change("keep", [0, 1, 2, 3, 4])
    rows.change("select", [0, 0, 1, 2, 3, 4])
    rows.step()
    rows.change("keep", [0, 2, 3, 4, 5])
    rows.change("select", [0, 1, 4, 3])
    rows.change("keep", [2])
    rows.append([5, 5], [2, 3], [1, 1])
    rows.step()
    rows.change("select", [5, 4, 5])
    rows.step()
    rows.change("keep", [])
    rows.append([1], [1])
    rows.step()
    rows.change("select", [0, 0])
    rows.change("select", [])


def test_a_new_static_cache_has_its_memory_where_and_as_it_is_asked_for() -> None:
    cache = StaticCache(3, 5, HEADS, 7, WIDTH, dtype=torch.float16, device=torch.device("meta"))
    for stores, shape in (
        (cache.keys + cache.values, (5, HEADS, 7, WIDTH)),
        (cache.prompt_keys + cache.prompt_values, (0, HEADS, 0, WIDTH)),
    ):
        assert len(stores) == 6
        assert {(tuple(store.shape), store.dtype, store.device.type) for store in stores} == {
            (shape, torch.float16, "meta")
        }
    assert (cache.max_rows, cache.max_len, cache.num_rows) == (5, 7, 0)
    assert (cache.longest(), cache.longest_own(), cache.recording) == (0, 0, None)
    host = (cache.prompt_lengths_P, cache.position_offsets_P, cache.prompt_of_row_B, cache.own_lengths_B)
    assert {(tensor.shape[0], tensor.dtype, tensor.device.type) for tensor in host} == {(0, torch.int64, "cpu")}
    assert cache.blocks == (-1, [])
    assert cache.layout == 0, "no blocks were made for these rows"


def test_the_first_prompts_are_held_without_a_copy() -> None:
    cache = new_static()
    cache.append(torch.tensor([2]), torch.tensor([1]))
    keys, values = torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH)
    cache.write_prompts(1, keys, values)
    assert cache.prompt_keys[1] is keys
    assert cache.prompt_values[1] is values


def cleared(cache: StaticCache) -> list[list[int]]:
    """Columns of each row that are zero in every store; the others are as they were."""
    found: list[list[int]] = []
    for row in range(cache.max_rows):
        zero = [
            {column for column in range(cache.max_len) if bool((store[row, :, column] == 0).all())}
            for store in (*cache.keys, *cache.values)
        ]
        assert all(one == zero[0] for one in zero)
        found.append(sorted(zero[0]))
    return found


def test_rows_that_come_later_have_zeros_up_to_the_longest_of_those_before() -> None:
    cache = new_static(rows=5)
    cache.append(torch.tensor([3]), torch.tensor([2]))
    assert cleared(cache) == [[]] * 5
    cache.own_lengths_B = torch.tensor([3, 1])
    cache.append(torch.tensor([3]), torch.tensor([2]))
    assert cleared(cache) == [[], [], [0, 1, 2], [0, 1, 2], []]


@pytest.mark.parametrize(
    ("own", "expected"), [([3, 1, 2], [[3], [3], [3], []]), ([2, 2, 2], [[]] * 4), ([0, 1, 1], [[1], [1], [1], []])]
)
def test_the_next_column_is_cleared_in_all_rows_where_one_has_fewer(own: list[int], expected: list[list[int]]) -> None:
    cache = new_static(rows=4)
    cache.append(torch.tensor([3]), torch.tensor([3]))
    cache.own_lengths_B = torch.tensor(own)
    cache.clear_next_column()
    assert cleared(cache) == expected


@pytest.mark.parametrize(
    ("own", "multiple", "end"), [([0, 0], 4, 4), ([3, 1], 4, 4), ([4, 1], 4, 8), ([9, 1], 4, 11), ([5, 5], 3, 6)]
)
def test_columns_are_cleared_up_to_a_whole_multiple_or_the_end(own: list[int], multiple: int, end: int) -> None:
    cache = new_static(rows=3, length=11)
    cache.append(torch.tensor([1]), torch.tensor([2]))
    cache.own_lengths_B = torch.tensor(own)
    assert cache.clear_columns(multiple) == end
    assert cleared(cache) == [list(range(max(own), end))] * 2 + [[]]


def test_a_static_cache_refuses_what_does_not_fit_and_is_then_as_before() -> None:
    rows = StaticRows()
    rows.append([3, 12], [2, 3])
    for lengths, copies in (([1], [2]), ([13], [1]), ([13, 1], [1, 0])):
        with pytest.raises(ValueError, match="asked for"):
            rows.cache.append(torch.tensor(lengths), torch.tensor(copies))
    for change in ([1, 0], [0, 5], [[0]]):
        with pytest.raises(ValueError, match="ascend"):
            rows.cache.keep(torch.tensor(change))
    for change in ([0, 5], [0] * 7):
        with pytest.raises(ValueError, match="rows fit"):
            rows.cache.select(torch.tensor(change))
    with pytest.raises(ValueError, match="order"):
        rows.cache.select(torch.tensor([0, 2, 1]))
    rows.check()
    rows.append([1], [1])


class GrowingRows:
    """The same operations on a `GrowingCache` and on a list of rows."""

    def __init__(self, layers: int) -> None:
        self.cache, self.layers = GrowingCache(6, 12), layers
        self.generator = torch.Generator().manual_seed(1)
        self.columns = 0
        self.rows: list[tuple[int, Tensor]] = []
        """(offset, [layer, store, G, L, D])."""

    def append(self, lengths: list[int], offsets: list[int]) -> None:
        blocks = torch.zeros(self.layers, 2, len(lengths), HEADS, max(lengths), WIDTH)
        for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
            new = tokens(self.generator, self.layers, 2, HEADS, length, WIDTH)
            blocks[:, :, row, :, max(lengths) - length :] = new
            self.rows.append((offset, new))
        self.cache.append(
            list(blocks[:, 0].unbind()), list(blocks[:, 1].unbind()), torch.tensor(lengths), torch.tensor(offsets)
        )
        self.columns = max(self.columns, *lengths)
        self.check()

    def step(self) -> None:
        new = tokens(self.generator, self.layers, 2, len(self.rows), HEADS, 1, WIDTH)
        self.cache.keys = [torch.cat([a, b], 2) for a, b in zip(self.cache.keys, new[:, 0], strict=True)]
        self.cache.values = [torch.cat([a, b], 2) for a, b in zip(self.cache.values, new[:, 1], strict=True)]
        self.cache.lengths = self.cache.lengths + 1
        self.rows = [(offset, torch.cat([held, new[:, :, row]], 3)) for row, (offset, held) in enumerate(self.rows)]
        self.columns += 1
        self.check()

    def change(self, what: str, rows: list[int]) -> None:
        getattr(self.cache, what)(torch.tensor(rows, dtype=torch.int64))
        self.rows = [self.rows[row] for row in rows]
        if what == "keep":
            self.columns = max((held.shape[3] for _, held in self.rows), default=0)
        self.check()

    def check(self) -> None:
        lengths, columns = [held.shape[3] for _, held in self.rows], self.columns
        assert self.cache.num_rows == len(lengths)
        assert self.cache.num_columns == columns
        assert self.cache.lengths.tolist() == lengths
        assert self.cache.offsets.tolist() == [offset for offset, _ in self.rows]
        for store, found in enumerate((self.cache.keys, self.cache.values)):
            assert len(found) == self.layers
            for layer in range(self.layers):
                expected = torch.zeros(len(lengths), HEADS, columns, WIDTH)
                for row, (_, held) in enumerate(self.rows):
                    expected[row, :, columns - lengths[row] :] = held[layer, store]
                assert torch.equal(found[layer], expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_growing_cache_holds_what_lists_of_its_rows_hold(layers: int) -> None:
    rows = GrowingRows(layers)
    rows.append([2, 5], [0, -1])
    rows.step()
    rows.append([7, 1], [3, 0])
    rows.append([4], [-2])
    rows.step()
    rows.change("select", [4, 1, 1, 0, 3, 0])
    rows.step()
    rows.change("keep", [0, 3, 4])
    rows.step()
    rows.change("keep", [0, 1, 2])
    rows.change("keep", [])
    rows.append([3], [1])
    rows.step()


def test_a_growing_cache_refuses_what_does_not_fit() -> None:
    rows = GrowingRows(1)
    rows.append([2, 12], [0, 0])
    block = torch.zeros(5, HEADS, 1, WIDTH)
    with pytest.raises(ValueError, match="asked for 7 of 1"):
        rows.cache.append([block], [block], torch.ones(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="asked for 4 of 13"):
        rows.cache.append([block[:2]], [block[:2]], torch.tensor([13, 1]), torch.tensor([0, 0]))
    for what, change in (("keep", [1, 0]), ("keep", [2]), ("select", [2]), ("select", [0] * 7)):
        with pytest.raises(ValueError, match="rows"):
            getattr(rows.cache, what)(torch.tensor(change))
    rows.check()


def test_nothing_is_kept_or_selected_of_a_growing_cache_without_rows() -> None:
    cache, nothing = GrowingCache(2, 3), torch.empty(0, dtype=torch.int64)
    cache.keep(nothing)
    cache.select(nothing)
    assert (cache.num_rows, cache.num_columns, cache.keys, cache.values) == (0, 0, [], [])
    assert (cache.max_rows, cache.max_len) == (2, 3)
    assert (cache.lengths.dtype, cache.offsets.dtype) == (torch.int64, torch.int64)


def refuses(check: object, *arguments: object) -> bool:
    try:
        check(*arguments)  # type: ignore[operator]
    except ValueError:
        return True
    return False


def test_rows_to_select_are_within_those_there_and_no_more_than_fit() -> None:
    good = ([], [0], [3], [0, 1, 2, 3], [3, 0, 3], [0] * 5)
    bad = ([-1], [4], [-1, 2], [2, 4], [0] * 6, [[0]], [[0], [1]])
    for rows in good:
        assert not refuses(check_places, torch.tensor(rows, dtype=torch.int64), 4, 5), rows
    for rows in bad:
        assert refuses(check_places, torch.tensor(rows), 4, 5), rows


def test_rows_to_keep_ascend_within_those_there() -> None:
    good = ([], [0], [3], [0, 1, 2, 3], [1, 3])
    bad = ([-1], [4], [-1, 2], [2, 4], [1, 0], [1, 1], [0, 2, 1], [[0]], [[0], [1]])
    for rows in good:
        assert not refuses(check_ascending, torch.tensor(rows, dtype=torch.int64), 4), rows
    for rows in bad:
        assert refuses(check_ascending, torch.tensor(rows), 4), rows


def test_room_is_refused_beyond_the_rows_or_the_length_of_a_cache() -> None:
    assert not refuses(check_room, 3, 3, 5, 5)
    assert refuses(check_room, 4, 3, 5, 5)
    assert refuses(check_room, 3, 3, 6, 5)


def test_keys_and_values_are_counted_in_bytes() -> None:
    assert keys_and_values_bytes(3, 5, 7, 11, 13, 2) == 2 * 3 * 5 * 7 * 11 * 13 * 2


def test_the_layers_of_a_transformers_cache_are_split_into_keys_and_values() -> None:
    layers = [SimpleNamespace(keys=torch.full((1,), n), values=torch.full((1,), -n)) for n in (1, 2)]
    keys, values = dynamic_layers(SimpleNamespace(layers=layers))
    assert [int(tensor) for tensor in keys] == [1, 2]
    assert [int(tensor) for tensor in values] == [-1, -2]
