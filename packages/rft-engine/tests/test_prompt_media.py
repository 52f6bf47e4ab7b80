"""Images of prompts on their way through engines: opaque in process, plain data to vLLM, refused elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import IMAGE_TOKEN, FakeVllm, fake_tensors, write_fake_model
from PIL import Image

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError, RftError
from rft_engine.native.engine import NativeEngine
from rft_engine.testing.table_model import FakeDecodableModel
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.settings import VllmSettings

GREEDY = SamplingOptions(temperature=0.0, max_new_tokens=4)


@contextmanager
def refused(code: str, words: str = "") -> Iterator[pytest.ExceptionInfo[RftError]]:
    """An error of this code, whose text has these words."""
    with pytest.raises(RftError, match=words) as caught:
        yield caught
    assert caught.value.problem.code == code


@dataclass
class OneImage:
    """An image of so many columns, which are its placeholders, behind the first token of its prompt."""

    columns: int
    processor_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    image_token_id: int = IMAGE_TOKEN

    @property
    def files(self) -> Sequence[bytes]:
        buffer = io.BytesIO()
        Image.new("RGB", (self.columns, 2), (10, 20, 30)).save(buffer, format="PNG")
        return (buffer.getvalue(),)

    def prompt(self, text: Sequence[int]) -> list[int]:
        return [text[0], *[IMAGE_TOKEN] * self.columns, *text[1:]]

    def collapsed(self, token_ids: Sequence[int]) -> list[int]:
        return [token_ids[0], IMAGE_TOKEN, *token_ids[1 + self.columns :]]


def test_each_prompt_is_read_with_its_own_images() -> None:
    model = FakeDecodableModel(torch.randn(11, 7, generator=torch.Generator().manual_seed(0)), carry=3)
    engine = NativeEngine(model, max_rows=3, max_len=16)
    prompts, media = [[1, 2], [1, 2], [1, 2], [4]], [5, None, 8, 5]
    answers = engine.generate(prompts, [[1, 2], [3], [4], [5]], GREEDY, media=media)
    for prompt, start, completions in zip(prompts, media, answers, strict=True):
        for completion in completions:
            for place, token in enumerate(completion.token_ids):
                told = [*prompt, *completion.token_ids[:place]]
                assert token == int(model.logits_after(told, start or 0).argmax())
    plain = engine.generate(prompts[:1], [[1]], GREEDY)
    assert plain[0][0].token_ids == answers[1][0].token_ids


def test_media_are_as_many_as_prompts() -> None:
    engine = NativeEngine(FakeDecodableModel(torch.randn(5, 5)), max_rows=2, max_len=16)
    with pytest.raises(OptionsError, match="2 prompts, 1") as caught:
        engine.generate([[1], [2]], [[1], [2]], GREEDY, media=[None])
    assert caught.value.problem.code == "engine.media"


def vllm_engine(tmp_path: Path, *faults: str, **config: Any) -> tuple[VllmEngine, FakeVllm]:
    runtime = FakeVllm(faults=faults)
    settings = VllmSettings(model_dir=write_fake_model(tmp_path / "model", **config), max_rows=4, max_len=32)
    engine = VllmEngine(settings, lambda: list(fake_tensors(0).items()), runtime=runtime)
    engine.load_weights(1)
    return engine, runtime


def test_vllm_gets_one_placeholder_an_image_and_the_image(tmp_path: Path) -> None:
    engine, runtime = vllm_engine(tmp_path)
    images = [OneImage(3), OneImage(2, {"size": {"longest_edge": 64}})]
    prompts = [images[0].prompt([1, 2]), [5, 6], images[1].prompt([4])]
    answers = engine.generate(prompts, [[1], [2], [3]], GREEDY, media=[images[0], None, images[1]])
    again = engine.generate(prompts, [[1], [2], [3]], GREEDY)
    assert [one.token_ids for [one] in answers] == [one.token_ids for [one] in again]  # read as they were meant
    assert runtime.llm is not None
    seen = runtime.llm.llm_engine.images
    assert [image.size for image in seen] == [(3, 2), (2, 2)]
    assert all(image.getpixel((0, 0)) == (10, 20, 30) for image in seen)
    assert runtime.llm.llm_engine.processor_options == [{"size": {"longest_edge": 64}}]


def test_features_of_older_weights_are_dropped(tmp_path: Path) -> None:
    engine, runtime = vllm_engine(tmp_path / "text")
    assert runtime.llm is not None
    assert runtime.llm.llm_engine.num_encoder_resets == 0
    engine, runtime = vllm_engine(tmp_path / "vision", vision_config={"depth": 1})
    engine.load_weights(2)
    assert runtime.llm is not None
    assert runtime.llm.llm_engine.num_encoder_resets == 2
    assert runtime.llm.arguments["skip_tokenizer_init"] is False


def test_other_placeholders_than_the_trainers_are_an_error(tmp_path: Path) -> None:
    engine, _ = vllm_engine(tmp_path, "one_too_few")
    image = OneImage(3)
    with refused("engine.vllm.placeholders", r"read 4 prompt tokens, 5 were expected"):
        engine.generate([image.prompt([1, 2])], [[1]], GREEDY, media=[image])
