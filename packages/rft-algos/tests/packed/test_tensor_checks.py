from __future__ import annotations

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.packed.tensor_checks import (
    check_alike,
    check_group_ids,
    check_mask,
    check_responses,
    check_vectors,
)


def test_what_fits_passes() -> None:
    check_mask(mask_T=torch.tensor([True]), rows=torch.ones(2, 3, dtype=torch.bool))
    check_vectors(a_T=torch.ones(3), b_T=torch.ones(3, dtype=torch.int64), c_T=None)
    check_group_ids(a=torch.tensor([1, 2]), b=torch.tensor([1], dtype=torch.int32))
    # what differs from these by one tensor does not
    with pytest.raises(InputError, match="mask_T"):
        check_mask(rows=torch.ones(2, 3, dtype=torch.bool), mask_T=torch.tensor([1]))
    with pytest.raises(InputError, match="c_T"):
        check_vectors(a_T=torch.ones(3), b_T=torch.ones(3, dtype=torch.int64), c_T=torch.ones(4))
    with pytest.raises(InputError, match="b must be integers"):
        check_group_ids(a=torch.tensor([1, 2]), b=torch.tensor([1.0]))


@pytest.mark.parametrize("mask", [torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)])
def test_a_mask_is_bool(mask: torch.Tensor) -> None:
    with pytest.raises(InputError, match="given_T must be bool") as caught:
        check_mask(given_T=mask)
    assert caught.value.problem.do == "given_T.bool()"


@pytest.mark.parametrize("other", [torch.ones(2), torch.ones(3, 1), torch.ones(())])
def test_vectors_have_one_length(other: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"'a_T': \(3,\), 'b_T'"):
        check_vectors(a_T=torch.ones(3), b_T=other)


def test_rows_of_one_shape_are_no_vectors() -> None:
    with pytest.raises(InputError, match=r"one shape \[T\]"):
        check_vectors(a_T=torch.ones(2, 3), b_T=torch.ones(2, 3))


def test_the_remedy_for_texts_gives_group_ids() -> None:
    ids = ["b", "a", "b"]
    with pytest.raises(InputError, match="it is a list") as caught:
        check_group_ids(ids=ids)  # type: ignore[arg-type]
    assert caught.value.problem.do == "torch.tensor([list(ids).index(i) for i in ids])"
    assert torch.tensor([list(ids).index(i) for i in ids]).tolist() == [0, 1, 0]
    for values in (torch.ones(2), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(InputError, match="must be integers"):
            check_group_ids(ids=values)


def test_numbers_of_tokens_are_summed_to_one_a_response_first() -> None:
    rows, sums = torch.ones(2, 3), torch.ones(2)
    check_responses(chosen_B=sums, rejected_B=sums)
    with pytest.raises(InputError, match=r"one shape \[B\]") as caught:
        check_responses(chosen_B=rows, rejected_B=rows)
    assert caught.value.problem.do == "(logprobs * mask).sum(1)"
    # of another number of responses no sum is the remedy
    with pytest.raises(InputError, match=r"one shape \[B\]") as caught:
        check_responses(chosen_B=sums, rejected_B=torch.ones(3))
    assert caught.value.problem.do == ""


def test_an_advantage_a_row_is_spread_over_its_row_first() -> None:
    rows = torch.ones(2, 3)
    for advantages, remedy in ((torch.ones(2), "advantages[:, None]"), (torch.ones(2, 4), "")):
        with pytest.raises(InputError, match="must have one shape") as caught:
            check_alike(logprobs_T=rows, advantages_T=advantages)
        assert caught.value.problem.do == remedy
    with pytest.raises(InputError, match="must have one shape") as caught:
        check_alike(logprobs_T=torch.ones(2), advantages_T=rows)
    assert caught.value.problem.do == ""
