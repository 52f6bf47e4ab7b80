"""Losses of a residual vector quantiser inside a network, and where the gradient passes the codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rft_algos.quantisation.kmeans import nearest_centres


class QuantisedLatents(NamedTuple):
    """Latents after a residual quantiser, and its two losses, each a mean over levels, rows and dimensions."""

    quantised_ND: Tensor
    """Sum of the code vectors, with the gradient of the latents."""
    codes_NL: Tensor
    codebook_loss: Tensor
    """[] mean_l MSE(e_l, sg(r_l)): moves the codes to what they stand for."""
    commitment_loss: Tensor
    """[] mean_l MSE(sg(e_l), r_l): moves the latents to their codes."""


def straight_through(latents_ND: Tensor, quantised_ND: Tensor) -> Tensor:
    """Return the quantised values with the gradient of the latents: z + sg(e - z).

    Source: Bengio, Leonard and Courville 2013 (arXiv 1308.3432), as van den Oord et al. 2017 (arXiv 1711.00937) use it.

    Args:
        latents_ND: [N, D] z.
        quantised_ND: [N, D] e.

    Returns:
        [N, D]. Example: z = 0.3 and e = 1 give 1, whose derivative by z is 1 and by e is 0.
    """
    return latents_ND + (quantised_ND - latents_ND).detach()


def residual_vq(latents_ND: Tensor, codebooks: Sequence[Tensor]) -> QuantisedLatents:
    """Quantise latents level by level; every level pulls the latents, and the gradient passes once.

    r_1 = z; k_l = argmin_k ||r_l - e_{l,k}||^2; r_{l+1} = r_l - sg(e_{l,k_l}); the result is
    z + sg(sum_l e_{l,k_l} - z).
    As every r_l has the gradient of z, the commitment of every level reaches the encoder.

    Source: Lee et al. 2022, "Autoregressive image generation using residual quantization" (arXiv 2203.01941), section
    3.1, whose commitment is on partial sums, which is the same.

    Args:
        latents_ND: [N, D] z.
        codebooks: of level l [K_l, D].

    Returns:
        `QuantisedLatents`. Example: z = 9 with the codebooks (0, 8) and (0, 2) has the codes (1, 0), both losses are
        (1 + 1) / 2.
    """
    left_ND, total_ND = latents_ND, torch.zeros_like(latents_ND)
    codes, pulls, pushes = list[Tensor](), list[Tensor](), list[Tensor]()
    for codebook_KD in codebooks:
        code_N, code_ND = _chosen(left_ND, codebook_KD)
        codes.append(code_N)
        pulls.append(F.mse_loss(code_ND, left_ND.detach()))
        pushes.append(F.mse_loss(left_ND, code_ND.detach()))
        left_ND, total_ND = left_ND - code_ND.detach(), total_ND + code_ND.detach()
    return QuantisedLatents(
        straight_through(latents_ND, total_ND),
        torch.stack(codes, 1),
        torch.stack(pulls).mean(),
        torch.stack(pushes).mean(),
    )


def residual_vq_per_level(latents_ND: Tensor, codebooks: Sequence[Tensor]) -> QuantisedLatents:
    """Quantise latents level by level, with the gradient passing at every level, as it was published.

    r_1 = z; q_l = r_l + sg(e_{l,k_l} - r_l); r_{l+1} = r_l - q_l; the result is sum_l q_l. The derivative of r_{l+1} by
    z is 0, so of all commitments only the first level's reaches the encoder; values are those of `residual_vq`.

    Source: LC-Rec (arXiv 2311.09049) and MiniOneRec (arXiv 2510.24431), their code.

    Args:
        latents_ND: [N, D] z.
        codebooks: of level l [K_l, D].

    Returns:
        `QuantisedLatents`. Example: z = 9 with the codebooks (0, 8) and (0, 2): the derivative of the commitment by z
        is 1, that of level 1, in place of 2.
    """
    left_ND, total_ND = latents_ND, torch.zeros_like(latents_ND)
    codes, pulls, pushes = list[Tensor](), list[Tensor](), list[Tensor]()
    for codebook_KD in codebooks:
        code_N, code_ND = _chosen(left_ND, codebook_KD)
        codes.append(code_N)
        pulls.append(F.mse_loss(code_ND, left_ND.detach()))
        pushes.append(F.mse_loss(left_ND, code_ND.detach()))
        passed_ND = straight_through(left_ND, code_ND)
        left_ND, total_ND = left_ND - passed_ND, total_ND + passed_ND
    return QuantisedLatents(total_ND, torch.stack(codes, 1), torch.stack(pulls).mean(), torch.stack(pushes).mean())


def _chosen(left_ND: Tensor, codebook_KD: Tensor) -> tuple[Tensor, Tensor]:
    code_N, _ = nearest_centres(left_ND.detach(), codebook_KD.detach())
    return code_N, codebook_KD[code_N]
