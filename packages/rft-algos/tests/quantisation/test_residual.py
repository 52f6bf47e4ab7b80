"""Residual quantisation: each level quantises what is left."""

import pytest
import torch

from rft_algos.input_checks import InputError
from rft_algos.quantisation.balanced import balanced_kmeans
from rft_algos.quantisation.residual import reconstruct, residual_codes, residual_kmeans


def points(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed))


def test_two_levels_explain_two_pairs() -> None:
    x = torch.tensor([[0.0], [1.0], [8.0], [9.0]])
    fit = residual_kmeans(x, [2, 2], key=1)
    assert fit.inertias == (1, 0)
    assert torch.equal(reconstruct(fit.codes_NL, fit.codebooks), x)
    assert len({tuple(row) for row in fit.codes_NL.tolist()}) == 4


def test_codes_are_those_of_a_loop_over_points() -> None:
    x, books = points(40, 5).double(), [points(6, 5, 1).double(), points(4, 5, 2).double() / 2]
    expected = []
    for row in x:
        left, codes = row, []
        for book in books:
            codes.append(min(range(len(book)), key=lambda k: float((left - book[k]).square().sum())))
            left = left - book[codes[-1]]
        expected.append(codes)
    assert residual_codes(x, books).tolist() == expected


def test_levels_of_different_sizes_fit_and_every_level_leaves_less() -> None:
    x = points(300, 8)
    fit = residual_kmeans(x, [16, 8, 4], key=2)
    assert [tuple(book.shape) for book in fit.codebooks] == [(16, 8), (8, 8), (4, 8)]
    assert fit.inertias[0] > fit.inertias[1] > fit.inertias[2]
    # the fitted codes are those that the codebooks give
    assert torch.equal(residual_codes(x, fit.codebooks), fit.codes_NL)
    left = (x - reconstruct(fit.codes_NL, fit.codebooks)).square().sum()
    assert float(left) == pytest.approx(fit.inertias[2], rel=1e-4)
    coarse = (x - reconstruct(fit.codes_NL[:, :1], fit.codebooks)).square().sum()
    assert float(coarse) == pytest.approx(fit.inertias[0], rel=1e-4)


def test_another_clustering_serves_every_level() -> None:
    fit = residual_kmeans(points(64, 4), [8, 8], key=2, cluster=lambda x, k, key: balanced_kmeans(x, k, key=key))
    for codes in fit.codes_NL.unbind(1):
        assert torch.bincount(codes).tolist() == [8] * 8


def test_no_level_is_refused() -> None:
    with pytest.raises(InputError, match="at least one level"):
        residual_kmeans(points(4, 2), [], key=1)
