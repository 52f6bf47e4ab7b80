from __future__ import annotations

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.packed.padded_rows import PaddedRows

MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])


def test_rows_lie_end_to_end_and_come_back() -> None:
    rows = PaddedRows.of(MASK)
    assert rows.segment_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rows.loss_mask_T.tolist() == MASK.flatten().tolist()
    assert (int(rows.num_loss_tokens), int(rows.num_sequences)) == (4, 2)
    values = torch.arange(9.0).reshape(3, 3)
    assert rows.pack(values).tolist() == list(range(9))
    assert rows.unpack(rows.pack(values)).tolist() == torch.where(MASK, values, 0.0).tolist()
    assert rows.unpack(torch.arange(9)).dtype == torch.int64


def test_one_value_a_sequence_stands_at_each_of_its_tokens() -> None:
    assert PaddedRows.of(MASK).pack(torch.tensor([5.0, 6.0, 7.0])).tolist() == [5.0] * 3 + [6.0] * 3 + [7.0] * 3


def test_gradients_flow_both_ways_and_nan_at_masked_places_does_not() -> None:
    rows, values = PaddedRows.of(MASK), torch.where(MASK, 2.0, torch.nan).requires_grad_()
    found = rows.unpack(rows.pack(values).square())
    found.sum().backward()
    assert values.grad is not None
    assert found.tolist() == torch.where(MASK, 4.0, 0.0).tolist()
    assert values.grad[MASK].tolist() == [4.0] * 4


def test_an_empty_batch_has_no_token() -> None:
    rows = PaddedRows.of(torch.zeros(0, 5, dtype=torch.bool))
    assert (int(rows.num_loss_tokens), int(rows.num_sequences), rows.segment_ids_T.shape) == (0, 0, (0,))


@pytest.mark.parametrize("values", [torch.ones(3, 2), torch.ones(9), torch.ones(2, 3), torch.ones(3, 3, 1)])
def test_other_shapes_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(InputError, match="3 rows of 3 positions"):
        PaddedRows.of(MASK).pack(values)


def test_a_mask_is_bool_and_has_two_axes() -> None:
    with pytest.raises(InputError, match="must be bool"):
        PaddedRows.of(MASK.float())
    with pytest.raises(InputError, match=r"\[batch, time\]"):
        PaddedRows.of(MASK[0])
