"""What each rank announces, and the files that follow from it on every rank alike."""

from __future__ import annotations

import pytest
import torch

from rft_dist.checkpoint_format.shards import Shard, full_shard
from rft_dist.checkpoints.save_plan import Plan, RankShards, announce

WHOLE = full_shard("w", torch.zeros(3, 4))
UPPER = Shard("w", (3, 4), (0, 0), torch.zeros(2, 4))
LOWER = Shard("w", (3, 4), (2, 0), torch.zeros(1, 4))


def plan(*ranks: RankShards) -> Plan:
    return Plan(ranks)


def test_a_rank_announces_numbers_bytes_and_whether_its_tensors_are_whole() -> None:
    found = announce(7, {"optimizer": [WHOLE, full_shard("b", torch.zeros(5, dtype=torch.bfloat16))]}, None)
    assert found == RankShards(7, {"optimizer": (2, 48 + 10, True)}, None)
    part = announce(7, {"optimizer": [UPPER], "none": []}, {"w": torch.zeros(3)})
    assert part == RankShards(7, {"optimizer": (1, 32, False), "none": (0, 0, True)}, {"w": 12})
    with pytest.raises(AssertionError):
        announce(7, {"optimizer": [UPPER, UPPER]}, None)


def test_an_announcement_comes_back_from_json_as_it_went_in() -> None:
    for model in (None, {"w": 12}, {}):
        given = RankShards(3, {"a": (1, 2, True), "b": (0, 0, False)}, model)
        assert RankShards.from_json(given.to_json()) == given


def test_a_component_that_one_rank_gives_whole_is_one_file() -> None:
    empty = RankShards(1, {"o": (0, 0, True)}, None)
    for place in range(3):
        ranks = [empty] * 3
        ranks[place] = announce(1, {"o": [WHOLE]}, None)
        made = plan(*ranks)
        assert not made.is_sharded("o")
        files = [made.state_file("o", rank) for rank in range(3)]
        assert files == ["state/o.safetensors" if rank == place else None for rank in range(3)]
    nothing = plan(empty, empty)
    assert [nothing.state_file("o", rank) for rank in range(2)] == ["state/o.safetensors", None]


def test_a_component_of_several_ranks_or_of_parts_is_a_file_a_rank() -> None:
    upper, lower = announce(1, {"o": [UPPER]}, None), announce(1, {"o": [LOWER]}, None)
    other = RankShards(1, {}, None)
    made = plan(upper, other, lower)
    assert made.components == {"o"}
    assert made.is_sharded("o")
    first, none, third = (made.state_file("o", rank) for rank in range(3))
    assert none is None
    assert first is not None
    assert third is not None
    assert first != third
    assert plan(upper, other).is_sharded("o"), "a part, though of one rank"
    both = plan(announce(1, {"o": [WHOLE]}, None), announce(1, {"o": [full_shard("b", torch.zeros(1))]}, None))
    assert both.is_sharded("o")


def test_bytes_of_all_ranks_with_what_describes_the_tensors() -> None:
    made = plan(
        RankShards(1, {"a": (2, 100, True), "b": (1, 10, True)}, None), RankShards(1, {"a": (3, 1, True)}, None)
    )
    assert made.num_tensor_bytes == 100 + 10 + 1 + 200 * 6


def test_the_files_of_a_model_that_ranks_write_together() -> None:
    made = plan(RankShards(1, {}, {"b": 5, "c": 6}), RankShards(1, {}, {}), RankShards(1, {}, {"a": 7}))
    assert made.num_model_bytes == 18
    files = [made.model_file(rank) for rank in range(3)]
    assert files == ["model-00001-of-00002.safetensors", None, "model-00002-of-00002.safetensors"]
    index = made.model_index()
    assert index is not None
    assert index["metadata"] == {"total_size": 18}
    assert list(index["weight_map"].items()) == [("a", files[2]), ("b", files[0]), ("c", files[0])]


def test_a_model_that_its_writer_writes_has_no_files_here() -> None:
    made = plan(RankShards(1, {}, None), RankShards(1, {}, None))
    assert made.num_model_bytes is None
    assert made.model_index() is None
    assert made.model_file(0) is None
    mixed = plan(RankShards(1, {}, None), RankShards(1, {}, {"a": 7}))
    assert mixed.num_model_bytes == 7


def test_a_tensor_without_elements_is_a_block_of_the_rank_that_gives_it() -> None:
    made = plan(RankShards(1, {}, None), announce(1, {"o": [full_shard("w", torch.zeros(0, 4))]}, None))
    assert [made.state_file("o", rank) for rank in range(2)] == [None, "state/o.safetensors"]
    both = plan(*(announce(1, {"o": [full_shard(name, torch.zeros(0))]}, None) for name in "ab"))
    assert both.is_sharded("o")
