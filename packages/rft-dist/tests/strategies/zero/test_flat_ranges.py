"""Ranges of flattened tensors, read from objects that are laid out as DeepSpeed's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rft_dist.strategies.zero import flat_ranges
from rft_dist.strategies.zero.flat_ranges import Part, clear_kept_gradients, flat_states, rows_of, stepped_parts


def partitioned(shape: tuple[int, ...], numel: int, values: Tensor) -> nn.Parameter:
    """A parameter of stage 3: this rank's `numel` of its elements."""
    parameter: Any = nn.Parameter(torch.empty(0))
    parameter.ds_shape, parameter.ds_numel = torch.Size(shape), torch.Size(shape).numel()
    parameter.ds_tensor = nn.Parameter(values)
    parameter.ds_tensor.ds_numel = numel
    return parameter


def mapped(group: int, in_flat: int, in_parameter: int, numel: int) -> Any:
    """What stages 1 and 2 note at a parameter."""
    return SimpleNamespace(
        param_group_index=group,
        hp_fragment_address=SimpleNamespace(start=in_flat, numel=numel),
        lp_fragment_address=SimpleNamespace(start=in_parameter, numel=numel),
    )


def test_stages_1_and_2_give_each_parameter_a_range_of_the_flat_tensor_of_its_group() -> None:
    flats = [torch.arange(10.0), torch.arange(5.0)]
    inner = SimpleNamespace(param_groups=[{"params": [flat]} for flat in flats])
    optimizer = SimpleNamespace(optimizer=inner)
    parameters = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("a", "b", "elsewhere", "nothing")}
    parameters["a"]._hp_mapping = mapped(0, 4, 2, 3)  # type: ignore[attr-defined]
    parameters["b"]._hp_mapping = mapped(1, 1, 0, 4)  # type: ignore[attr-defined]
    parameters["nothing"]._hp_mapping = mapped(1, 0, 0, 0)  # type: ignore[attr-defined]
    first, second = stepped_parts(optimizer, parameters, 1)
    assert (first.name, first.shape, first.offset, first.numel, first.start) == ("a", (2, 3), 2, 3, 4)
    assert (second.name, second.offset, second.numel, second.start) == ("b", 0, 4, 1)
    assert first.flat is flats[0]
    assert second.flat is flats[1]
    assert first.of(flats[0]).tolist() == [4.0, 5.0, 6.0]
    first.of(flats[0]).zero_()
    assert flats[0].tolist()[3:8] == [3.0, 0.0, 0.0, 0.0, 7.0]


def test_stage_3_cuts_every_parameter_and_the_last_rank_may_have_less() -> None:
    flat = torch.arange(6.0)
    parameter = partitioned((2, 5), 4, torch.arange(4.0))
    optimizer = SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.zeros(1), flat], grad_position={7: (1, 2, 4)}, get_param_id=lambda p: 7
    )
    for rank, offset, numel in ((0, 0, 4), (1, 4, 4), (2, 8, 2)):
        [part] = stepped_parts(optimizer, {"w": parameter}, rank)
        assert (part.offset, part.numel, part.start, part.shape) == (offset, numel, 2, (2, 5))
        assert part.flat is flat
        held_from, held = flat_ranges.own_weights(parameter, rank)
        assert held_from == offset
        assert held.tolist() == [0.0, 1.0, 2.0, 3.0][:numel]
        assert not held.requires_grad
    assert stepped_parts(optimizer, {"w": parameter}, 3) == []
    assert flat_ranges.own_range(parameter, 3) == (10, 0)


def test_a_parameter_that_every_rank_has_is_held_whole() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    offset, held = flat_ranges.own_weights(parameter, 3)
    assert offset == 0
    assert held.shape == (6,)
    held.fill_(1.0)
    assert parameter.tolist() == [[1.0] * 3] * 2
    assert flat_ranges.shape_of(parameter) == (2, 3)
    assert flat_ranges.shape_of(partitioned((4, 2), 8, torch.zeros(8))) == (4, 2)


def adamw(*flats: Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [flat]} for flat in flats], lr=0.1)


def test_states_are_made_where_there_was_no_step_and_kept_where_there_was() -> None:
    flats = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = SimpleNamespace(optimizer=adamw(*flats))
    found = list(flat_states(optimizer))
    assert [flat for flat, _ in found] == flats
    state = found[0][1]
    assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
    assert state["exp_avg"].shape == (3,)
    state["exp_avg"].fill_(5.0)
    assert next(flat_states(optimizer))[1]["exp_avg"].tolist() == [5.0] * 3
    spread = SimpleNamespace(optimizer=adamw(*flats), fp32_partitioned_groups_flat=[flats[1]])
    assert [flat for flat, _ in flat_states(spread)] == [flats[1]]


def test_gradients_of_a_step_are_cleared_wherever_they_are_kept() -> None:
    flats = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    flats[0].grad = torch.ones(3)
    early = SimpleNamespace(
        optimizer=adamw(*flats),
        single_partition_of_fp32_groups=[],
        averaged_gradients={0: [torch.ones(1)], 1: [torch.ones(1)]},
        accumulated_grads_in_cpu={0: torch.ones(2)},
    )
    clear_kept_gradients(early)
    assert early.averaged_gradients == {0: None, 1: None}
    assert early.accumulated_grads_in_cpu[0].tolist() == [0.0, 0.0]
    assert flats[0].grad is not None
    assert flats[0].grad.tolist() == [0.0] * 3
    del early.accumulated_grads_in_cpu
    clear_kept_gradients(early)
    last = SimpleNamespace(optimizer=adamw(*flats), grad_partitions_flat_buffer=torch.ones(4))
    clear_kept_gradients(last)
    assert last.grad_partitions_flat_buffer.tolist() == [0.0] * 4


def test_a_part_gives_the_same_range_of_any_tensor_of_its_layout() -> None:
    part = Part("w", (5,), 1, 2, torch.zeros(6), 3)
    assert part.of(torch.arange(6.0)).tolist() == [3.0, 4.0]


def test_rows_of_a_part_are_a_part_of_a_tensor_of_these_rows() -> None:
    flat = torch.arange(20.0)
    whole = torch.arange(100.0, 118.0).view(6, 3)

    def part(offset: int, numel: int, start: int) -> Part:
        flat[start : start + numel] = whole.reshape(-1)[offset : offset + numel]
        return Part("w", (6, 3), offset, numel, flat, start)

    for first in range(6):
        found: list[float] = []
        for each in (part(0, 7, 1), part(7, 4, 8), part(11, 7, 12)):
            rows = rows_of(each, first)
            if rows is None:
                continue
            assert (rows.name, rows.shape) == (f"w[{first}:]", (6 - first, 3))
            assert rows.offset == len(found), "ranges lie side by side"
            assert rows.flat is flat
            found += rows.of(flat).tolist()
        assert found == whole[first:].reshape(-1).tolist()
