"""Losses of a residual quantiser, and where their gradients go."""

import pytest
import torch

from rft_algos.quantisation.vq_loss import residual_vq, residual_vq_per_level, straight_through

BOOKS = (torch.tensor([[0.0], [8.0]]), torch.tensor([[0.0], [2.0]]))


def test_the_gradient_passes_a_code() -> None:
    z, e = torch.tensor([0.3], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    passed = straight_through(z, e)
    assert passed.item() == 1
    passed.sum().backward()
    assert z.grad is not None
    assert z.grad.item() == 1
    assert e.grad is None


@pytest.mark.parametrize("quantise", [residual_vq, residual_vq_per_level])
def test_values_are_the_same_wherever_the_gradient_passes(quantise) -> None:
    found = quantise(torch.tensor([[9.0]]), BOOKS)
    assert found.codes_NL.tolist() == [[1, 0]]
    assert found.quantised_ND.item() == 8
    # what is left is 1 after the first level, and 1 after the second, whose code is 0
    assert (found.codebook_loss.item(), found.commitment_loss.item()) == (1, 1)


@pytest.mark.parametrize(("quantise", "slope"), [(residual_vq, 2.0), (residual_vq_per_level, 1.0)])
def test_every_level_pulls_the_latents_unless_the_gradient_stops_at_each(quantise, slope) -> None:
    z = torch.tensor([[9.0]], requires_grad=True)
    quantise(z, BOOKS).commitment_loss.backward()
    # mean over two levels of (r - e)^2, with r - e = 1 at both
    assert z.grad is not None
    assert z.grad.item() == slope


@pytest.mark.parametrize("quantise", [residual_vq, residual_vq_per_level])
def test_reconstruction_reaches_the_latents_and_the_codebook_loss_the_codes_alone(quantise) -> None:
    z = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    books = [torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = quantise(z, books)
    (to_z,) = torch.autograd.grad(found.quantised_ND.sum(), z, retain_graph=True)
    assert torch.equal(to_z, torch.ones_like(z))
    grads = torch.autograd.grad(found.codebook_loss, [z, *books], allow_unused=True)
    assert grads[0] is None or not grads[0].any()
    residual, expected = z.detach(), []
    for level, book in enumerate(books):
        codes = found.codes_NL[:, level]
        gradient = torch.zeros_like(book)
        for row, code in enumerate(codes.tolist()):
            gradient[code] += 2 * (book[code].detach() - residual[row]) / z.numel() / len(books)
        expected.append(gradient)
        residual = residual - book.detach()[codes]
    for gradient, wanted in zip(grads[1:], expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
