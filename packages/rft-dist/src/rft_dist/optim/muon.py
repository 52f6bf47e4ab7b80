"""Muon: matrices that are stepped along their orthogonalised momentum.

    m <- mu m + (1 - mu) g,   u = (1 - mu) g + mu m                     (Nesterov, mu = 0.95)
    o = U V' of u = U S V', nearly: five Newton-Schulz steps from u in bfloat16
    w <- (1 - rate l2) w - 0.2 sqrt(max(rows, columns)) rate o

(Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon; scale
and decay are those of Liu et al. 2025, "Muon is scalable for LLM training" (Moonlight), arXiv 2502.16982, section 2.2:
the root mean square of a step is that of AdamW's, so that both take one learning rate.) Where the device multiplies
bfloat16, the same bits as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, which takes no stacks of matrices.

A stack [experts, rows, columns] is that many matrices. What is no hidden matrix (embeddings, the output layer, norms,
biases) is stepped on by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError
from rft_dist.optim.cpu_products import cpu_multiplies_bf16
from rft_dist.optim.parameter_groups import ParameterGroups

MOMENTUM = 0.95
KIND = "momentum"
"""Muon keeps "momentum/<name>" of a matrix, of its shape and type, where AdamW has two moments."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_TINY = 1e-7


class Muon:
    """Muon over named matrices, and stacks of matrices, which change in place.

    Example::

        muon = Muon({"w": w}, ParameterGroups(), weight_decay=0.1)
        w.grad = gradient
        muon.step(learning_rate=1e-3)
    """

    def __init__(self, matrices: Mapping[str, Tensor], groups: ParameterGroups, *, weight_decay: float) -> None:
        """Set up a momentum for each matrix.

        Args:
            matrices: whole ones by name, or this rank's blocks of them.
            groups: has the factors of rates and decays by name, and what orthogonalises blocks.
            weight_decay: per unit of the learning rate.
        """
        self._matrices, self._sharded = dict(matrices), groups.sharded
        self._momenta = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
        self._rates = {name: groups.rate_factor(name) for name in matrices}
        self._decays = {
            name: weight_decay * groups.decay_factor(name, matrix.ndim) for name, matrix in matrices.items()
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step along the gradients, which every matrix has; with `sharded` every rank calls it."""
        for name in self._matrices if self._sharded is None else self._sharded.names:
            matrix = self._matrices.get(name)
            if matrix is None:  # the ranks that hold rows of it need this one for the exchange
                assert self._sharded is not None
                self._sharded.orthogonalised(name, None)
                continue
            gradient, rate = matrix.grad, learning_rate * self._rates[name]
            assert gradient is not None, f"{name} has no gradient"
            momentum = self._momenta[name].lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(momentum, MOMENTUM)
            if self._sharded is None:
                direction, shape = orthogonalised(update), matrix.shape
            else:
                direction, shape = self._sharded.orthogonalised(name, update), self._sharded.shape(name)
            matrix.mul_(1 - rate * self._decays[name])
            matrix.add_(direction, alpha=-rate * 0.2 * math.sqrt(max(shape[-2:])))

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the live state of a matrix."""
        return {KIND: self._momenta[name]}


def orthogonalised(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices near 1: about U V' of U S V'.

    x <- a x + (b x x' + c (x x')^2) x, five times, from x = u / |u|, on the shorter side; a, b, c = 3.4445, -4.7750,
    2.0315 rise most steeply at 0, and end between 0.7 and 1.2 for all but the smallest singular values. u and the end
    are in bfloat16; in between x is in bfloat16 where the device multiplies that, and in float32 elsewhere.

    Args:
        matrices: [rows, columns] or [stack, rows, columns].

    Returns:
        The same shape, bfloat16.
    """
    a, b, c = _COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.bfloat16().to(_product_type(matrices.device.type)).reshape(-1, rows, columns)
    x = x.mT if rows > columns else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if rows > columns else x).reshape(matrices.shape).bfloat16()


@cache
def _product_type(device: str) -> torch.dtype:
    """Return the type in which a device, "cpu" or another, multiplies fastest.

    torch multiplies bfloat16 on a CPU without instructions for it twenty times slower than float32.
    """
    native = cpu_multiplies_bf16() if device == "cpu" else torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def hidden_matrices(
    blocks: Iterable[nn.Module], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> frozenset[str]:
    """Names of what Muon steps on: trained matrices, and stacks of them, inside of the decoder's layers.

    Args:
        blocks: the decoder's layers.
        named_parameters: those that an optimizer may step on, by its names of them.

    Raises:
        OptionsError: none is trained.
    """
    inside = {id(parameter) for block in blocks for parameter in block.parameters() if _is_matrix(parameter)}
    found = frozenset(name for name, each in named_parameters if id(each) in inside and each.requires_grad)
    if not found:
        raise OptionsError(
            code="optimizer.no_matrix",
            what="muon has nothing to step on: no matrix of the decoder's layers is trained",
            where="--optimizer",
            why="muon steps on the matrices of the layers; embeddings, the output layer and norms are AdamW's",
            do="--optimizer adamw",
        )
    return found


def _is_matrix(parameter: Tensor) -> bool:
    """Return whether it is a matrix, or a stack of them; one row is a vector, such as a gate or a filter."""
    return parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
