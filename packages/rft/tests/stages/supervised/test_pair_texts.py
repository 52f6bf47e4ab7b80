"""Texts of pairs with images: the tokens and images that scoring reads later, and which prompts are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rft.build.images import ImageReading
from rft.stages.reward_pairs import RewardData, reward_data
from rft.stages.supervised.pair_texts import PairTextEncoder
from rft_models.reward_model.encoding import RewardTextEncoder
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.processor import HfProcessor, load_vision_processor
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.media_cache import image_digests, load_media
from rft_trainer.settings.reward_model import PairDataSettings, RewardTrainingSettings

SIZES = VisionSizes(hidden=32, kv_heads=4, ffn=64, max_positions=48, vision_hidden=32, vision_ffn=32, image_size=32)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> HfProcessor:
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz? \n:()<>")
    directory = tmp_path_factory.mktemp("seeing") / "model"
    return load_vision_processor(build_vision_model(directory, tokenizer, sizes=SIZES, seed=3))


def read(processor: HfProcessor, folder: Path, *, shuffle: bool = False, **chosen: Any) -> RewardData:
    rows: list[dict[str, str]] = []
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number, 0, 0)).save(folder / f"{number}.png")
        rows.append({"input": "what?", "image": f"{number}.png", "chosen": "a cat", "rejected": "<image>"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = PairTextEncoder(processor, ImageReading(ImageColumn("image"), 1 if shuffle else None))
    data = PairDataSettings(prompt_data=str(folder / "rows.jsonl"), **chosen)
    return reward_data(data, RewardTrainingSettings(), ("score",), encoder, max_positions=96, seed=1)


def test_training_reads_the_tokens_and_images_that_scoring_reads(processor: HfProcessor, tmp_path: Path) -> None:
    scoring = RewardTextEncoder(processor)
    for number, unit in enumerate(read(processor, tmp_path).units):
        file = (tmp_path / f"{number}.png").read_bytes()
        for sample, response in zip(unit, ("a cat", "<image>"), strict=True):
            token_ids, media = scoring.encode("<image>what?", (), response, (file,))
            assert media is not None
            assert list(sample.token_ids) == token_ids
            assert load_media(sample.media).digest == media.digest
            assert load_media(sample.media).spans == media.spans
        assert unit[0].prompt_length >= media.end, "the images are of what both texts share"


def test_the_same_question_about_another_image_is_another_prompt(processor: HfProcessor, tmp_path: Path) -> None:
    found = read(processor, tmp_path, held_out_rows=2)
    assert (len(found.units), len(found.held_out)) == (4, 2 * 2)
    assert not any("trained on too" in note for note in found.notes)


def test_shuffled_images_are_those_of_other_rows_and_count_as_other_data(
    processor: HfProcessor, tmp_path: Path
) -> None:
    own, others = read(processor, tmp_path), read(processor, tmp_path, shuffle=True)
    digests = [[image_digests(unit[0].media) for unit in read.units] for read in (own, others)]
    assert sorted(digests[0]) == sorted(digests[1])
    assert all(one != other for one, other in zip(*digests, strict=True))
    assert own.data_hash != others.data_hash
