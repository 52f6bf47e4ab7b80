"""RQ-VAE and RQ-KMeans+."""

from collections.abc import Generator

import pytest
import torch

from rft_core.errors import OptionsError
from rft_genrec.semantic_ids.autoencoder import Networks, Start, hidden_widths, train_autoencoder
from rft_genrec.semantic_ids.codebooks import Quantiser
from rft_genrec.semantic_ids.measures import unexplained_share
from rft_genrec.settings.sid import AutoencoderSettings

SETTINGS = AutoencoderSettings(latent_dim=4, hidden_dims="16", vae_epochs=60, vae_batch_size=32, vae_learning_rate=0.01)


def blobs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 10, generator=generator)
    return centres[torch.arange(96) % 6] + 0.1 * torch.randn(96, 10, generator=generator)


def finished(steps: Generator[str, None, Quantiser]) -> tuple[list[str], Quantiser]:
    lines: list[str] = []
    while True:
        try:
            lines.append(next(steps))
        except StopIteration as stop:
            return lines, stop.value


@pytest.mark.parametrize("passing", ["sum", "per_level"])
def test_training_explains_the_vectors_and_depends_on_the_key_alone(passing) -> None:
    points, settings = blobs(), AutoencoderSettings(**vars(SETTINGS) | {"straight_through": passing})
    lines, trained = finished(train_autoencoder(points, Start("rqvae", (6, 4)), settings, key=1))
    torch.manual_seed(5)
    _, again = finished(train_autoencoder(points, Start("rqvae", (6, 4)), settings, key=1))
    assert "epoch 60 of 60" in lines[-1]
    assert torch.equal(trained.codebooks[0], again.codebooks[0])
    assert unexplained_share(points, trained, points.mean(0)) < 0.5
    assert len({tuple(row) for row in trained.codes(points).tolist()}) >= 6


def test_the_input_is_added_and_the_last_layer_starts_as_nothing() -> None:
    points = blobs()
    start = Start("rqkmeans_plus", (6,), (points[:6],))
    networks = Networks(10, start, SETTINGS, key=1)
    assert torch.equal(networks.latents(points), points)
    settings = AutoencoderSettings(**vars(SETTINGS) | {"vae_epochs": 1})
    _, trained = finished(train_autoencoder(points, start, settings, key=1))
    # one small step away from the codebooks of the file
    torch.testing.assert_close(trained.codebooks[0], points[:6], atol=2e-3, rtol=0)
    torch.testing.assert_close(trained.latents(points), points, atol=1e-2, rtol=0)


def test_codes_that_no_item_takes_are_revived() -> None:
    points = blobs()
    far = torch.full((3, 10), 50.0)
    start = Start("rqkmeans_plus", (5,), (torch.cat([points[:2], far]),))
    for every, used in ((0, 2), (5, 5)):
        settings = AutoencoderSettings(**vars(SETTINGS) | {"revive_epochs": every, "vae_epochs": 30})
        _, trained = finished(train_autoencoder(points, start, settings, key=1))
        assert len(trained.codes(points).unique()) == used


def test_widths_are_numbers() -> None:
    assert hidden_widths("8, 4") == [8, 4]
    assert hidden_widths("") == []
    with pytest.raises(OptionsError, match="hidden_dims = 8,x"):
        hidden_widths("8,x")
