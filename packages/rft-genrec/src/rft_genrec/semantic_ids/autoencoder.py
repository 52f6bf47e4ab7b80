"""RQ-VAE and RQ-KMeans+: a network around the codes, trained with them."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_algos.quantisation.residual import residual_kmeans
from rft_algos.quantisation.vq_loss import residual_vq, residual_vq_per_level
from rft_core.errors import NumericsError, OptionsError
from rft_core.keyed_random import derive_key, keyed_normal, permutation, uniforms
from rft_genrec.semantic_ids.codebooks import Quantiser, layers_of
from rft_genrec.settings.sid import AutoencoderSettings

_WARM_UP_EPOCHS = 50
_LARGEST_GRADIENT = 1.0
_RATES = {False: 1e-3, True: 1e-4}
"""Published learning rates: of rqvae and, with the input added, of rqkmeans_plus."""
_LINES = 10


@dataclass(frozen=True)
class Start:
    """Start of a training: a method, and codebooks if it has some."""

    method: str
    sizes: tuple[int, ...]
    codebooks: tuple[Tensor, ...] = ()
    """Empty = k-means on the latents of the first networks."""

    @property
    def adds_input(self) -> bool:
        """True where vectors are added to what the encoder gives: Z = X + MLP(X), whose last layer starts as 0."""
        return self.method == "rqkmeans_plus"


class Networks(nn.Module):
    """Encoder, codebooks and decoder; every first value is a function of the key."""

    def __init__(self, dim: int, start: Start, settings: AutoencoderSettings, *, key: int) -> None:
        super().__init__()
        latent_dim = dim if start.adds_input else settings.latent_dim
        widths = hidden_widths(settings.hidden_dims)
        self.adds_input = start.adds_input
        self.encoder = _layers([dim, *widths, latent_dim], derive_key(key, "encoder"))
        self.decoder = _layers([latent_dim, *reversed(widths), dim], derive_key(key, "decoder"))
        if self.adds_input:
            last = self.encoder[-1]
            assert isinstance(last, nn.Linear)
            nn.init.zeros_(last.weight)
        self.codebooks = nn.ParameterList(torch.zeros(size, latent_dim) for size in start.sizes)

    def latents(self, points_ND: Tensor) -> Tensor:
        """Return what is quantised: [N, d]."""
        encoded_Nd = self.encoder(points_ND)
        return points_ND + encoded_Nd if self.adds_input else encoded_Nd

    @torch.no_grad()
    def set_codebooks(self, codebooks: Sequence[Tensor]) -> None:
        """Replace the values of all codes."""
        for parameter, values in zip(self.codebooks, codebooks, strict=True):
            parameter.copy_(values)

    def as_quantiser(self, method: str, scale: float) -> Quantiser:
        """Return what gives codes to vectors that were multiplied by `scale` for training, without gradients."""
        (first, bias), *others = layers_of(self.encoder)
        *before, (last, offset) = layers_of(self.decoder)
        return Quantiser(
            method,
            tuple(codebook.detach() for codebook in self.codebooks),
            ((first * scale, bias), *others),
            (*before, (last / scale, offset / scale)),
            self.adds_input,
        )


def hidden_widths(text: str) -> list[int]:
    """Return the widths of the layers between.

    Raises:
        OptionsError: another form than numbers joined by commas.
    """
    words = [word for word in text.replace(" ", "").split(",") if word]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise OptionsError(
            code="genrec.hidden_dims",
            what=f"hidden_dims = {text}",
            where="--hidden_dims",
            why="widths are numbers above 0, joined by commas; nothing = one layer",
            do="--hidden_dims 512,256,128",
        )
    return [int(word) for word in words]


def train_autoencoder(
    points_ND: Tensor, start: Start, settings: AutoencoderSettings, *, key: int
) -> Generator[str, None, Quantiser]:
    """Train networks and codes; yield a line now and then, and return the quantiser.

    Vectors are first scaled to a mean square of 1, which the quantiser takes back. The loss is
    MSE(decode(sum of codes), x) + codebook loss + `commitment` * commitment loss, by AdamW without decay, with
    a constant rate after a warm-up of 50 epochs and gradients clipped to norm 1. Each `revive_epochs` epochs the codes
    that no item took are set to what their level had to quantise of items drawn with probability in proportion to
    their squared error there, and their moments to 0.

    Raises:
        NumericsError: the loss is no longer a number.
    """
    # entries of a mean square of 1, for which rates and first weights are meant; with the input added the codes that
    # training starts from are those of the vectors as they are
    scale = 1.0 if start.adds_input else float(points_ND.square().mean().clamp(min=1e-12).rsqrt())
    points_ND = points_ND * scale
    networks = Networks(points_ND.shape[1], start, settings, key=key).to(points_ND.device)
    with torch.no_grad():
        latents_Nd = networks.latents(points_ND)
    networks.set_codebooks(
        start.codebooks or residual_kmeans(latents_Nd, start.sizes, key=derive_key(key, "codebooks")).codebooks
    )
    rate = settings.vae_learning_rate or _RATES[start.adds_input]
    optimizer = torch.optim.AdamW(networks.parameters(), lr=rate, weight_decay=0.0)
    quantise = residual_vq if settings.straight_through == "sum" else residual_vq_per_level
    used = [torch.zeros(size, dtype=torch.bool, device=points_ND.device) for size in start.sizes]
    num_revived = 0
    for epoch in range(settings.vae_epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (epoch + 1) / _WARM_UP_EPOCHS)
        order_N = permutation(derive_key(key, "order", epoch), len(points_ND)).to(points_ND.device)
        loss = torch.zeros((), device=points_ND.device)
        for rows in order_N.split(settings.vae_batch_size):
            batch_ND = points_ND[rows]
            found = quantise(networks.latents(batch_ND), list(networks.codebooks))
            rebuilt_ND = networks.decoder(found.quantised_ND)
            loss = F.mse_loss(rebuilt_ND, batch_ND) + found.codebook_loss + settings.commitment * found.commitment_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(networks.parameters(), _LARGEST_GRADIENT)
            optimizer.step()
            for level, codes in enumerate(found.codes_NL.unbind(1)):
                used[level][codes] = True
        if settings.revive_epochs and (epoch + 1) % settings.revive_epochs == 0:
            # not in the last tenth: what was set anew needs steps to be learned
            if epoch < 0.9 * settings.vae_epochs:
                num_revived += _revive(networks, points_ND, optimizer, used, derive_key(key, "revive", epoch))
            for one in used:
                one.zero_()
        if epoch % max(1, settings.vae_epochs // _LINES) == 0 or epoch + 1 == settings.vae_epochs:
            yield _line(epoch + 1, settings, float(loss.detach()), num_revived)
    return networks.as_quantiser(start.method, scale)


def _line(epoch: int, settings: AutoencoderSettings, loss: float, num_revived: int) -> str:
    if not math.isfinite(loss):
        raise NumericsError(
            code="genrec.vae_loss",
            what=f"the loss of epoch {epoch} is {loss}",
            where="--vae_learning_rate",
            why="codes cannot be learned from it",
            do=f"--vae_learning_rate {(settings.vae_learning_rate or _RATES[False]) / 10:g}",
        )
    return f"epoch {epoch:,} of {settings.vae_epochs:,}: loss {loss:.5f}, {num_revived:,} codes revived"


@torch.no_grad()
def _revive(
    networks: Networks, points_ND: Tensor, optimizer: torch.optim.Optimizer, used: Sequence[Tensor], key: int
) -> int:
    left_Nd, num = networks.latents(points_ND), 0
    for level, parameter in enumerate(networks.codebooks):
        dead = (~used[level]).nonzero().flatten()
        codes_N = torch.cdist(left_Nd, parameter).argmin(1)
        rest_Nd = left_Nd - parameter[codes_N]
        if len(dead):
            errors_N = rest_Nd.double().square().sum(1).cumsum(0)
            draws = uniforms([derive_key(key, "code", level)], len(dead))[0].to(errors_N.device) * errors_N[-1]
            parameter[dead] = left_Nd[torch.searchsorted(errors_N, draws).clamp(max=len(left_Nd) - 1)]
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][moment][dead] = 0.0
            num += len(dead)
        left_Nd = rest_Nd
    return num


def _layers(widths: Sequence[int], key: int) -> nn.Sequential:
    """Linear layers with ReLU between: weights from N(0, 2 / (inputs + outputs)) (Glorot and Bengio 2010), biases 0."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        # without memory: values of its own would be drawn from torch's generator
        layer = nn.Linear(inputs, outputs, device="meta")
        drawn = keyed_normal((outputs, inputs), derive_key(key, "layer", number))
        layer.weight = nn.Parameter(drawn * math.sqrt(2 / (inputs + outputs)))
        layer.bias = nn.Parameter(torch.zeros(outputs))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
