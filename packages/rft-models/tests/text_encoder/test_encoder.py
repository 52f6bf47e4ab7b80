"""Texts as vectors by a Hugging Face directory."""

from pathlib import Path

import pytest
import torch

from rft_core.errors import DataError
from rft_models.text_encoder.encoder import load_text_encoder, pool, stated_pooling
from rft_models.tiny_models.text import build_character_model

TEXTS = ["12+3=", "1", "3+4=7", ""]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    build_character_model(folder, hidden=16, layers=1, heads=2, ffn=16, init_std=0.4)
    return folder


def encoded(directory: Path, batch_size: int, **more) -> torch.Tensor:
    encoder = load_text_encoder(directory, **more)
    found = torch.empty(len(TEXTS), encoder.dim)
    for places, vectors in encoder.encode(TEXTS, batch_size=batch_size):
        found[torch.tensor(places)] = vectors
    return found


def test_a_vector_does_not_depend_on_its_batch(directory: Path) -> None:
    for pooling in ("mean", "last"):
        together, alone = encoded(directory, 4, pooling=pooling), encoded(directory, 1, pooling=pooling)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    # a decoder is read at its last token
    assert torch.equal(encoded(directory, 4), encoded(directory, 4, pooling="last"))


def test_what_is_beyond_the_most_tokens_is_cut_off(directory: Path) -> None:
    cut = encoded(directory, 1, pooling="mean", max_tokens=1)
    assert torch.equal(cut[0], cut[1])
    assert not torch.equal(cut[0], encoded(directory, 1, pooling="mean")[0])


def test_pooling_leaves_padding_out() -> None:
    states = torch.tensor([[[1.0], [3.0], [99.0]], [[5.0], [7.0], [9.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pool(states, mask, "mean").flatten().tolist() == [2, 7]
    assert pool(states, mask, "last").flatten().tolist() == [3, 9]


def test_the_pooling_that_a_directory_states_is_used(tmp_path: Path) -> None:
    assert stated_pooling(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}')
    assert stated_pooling(tmp_path) == "mean"
    config.write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(DataError, match="pooling_mode_cls_token"):
        stated_pooling(tmp_path)
