"""Reward models that see: scores of each pair as transformers' own forward gives them, whatever it is packed with."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rft_models.critic.causal_critic import load_critic
from rft_models.families.vision import VISION_FAMILIES
from rft_models.files.vision_tower_sizes import tower_sizes
from rft_models.reward_model.loading import load_reward_model, new_reward_model
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.shared_images import SharedImages
from rft_models.reward_model.spec import RewardSpec
from rft_models.vision.image_files import PixelRules
from rft_models.vision.processor import HfProcessor, load_vision_processor
from rft_models.vision.token_counts import PlannedImages

FAMILIES = sorted(VISION_FAMILIES)
Directory = Callable[[str], Path]


def png(seed: int, width: int = 16, height: int = 16) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


FIRST, SECOND = png(0), png(1, 24, 16)
PROMPTS = ["<image>what is it?"] * 3 + ["<image>or<image>?", "no image?", "<image>what is it?"]
RESPONSES = ["a cat", "a dog", "", "b", "yes", "a cat"]
IMAGES = [(FIRST,)] * 3 + [(FIRST, SECOND), (), (SECOND,)]


def scorer(directory: Path, *, max_tokens: int = 8192, **spec: Any) -> RewardTextScorer:
    return RewardTextScorer(new_reward_model(directory, RewardSpec(**spec), seed=5), max_tokens=max_tokens)


def values(made: RewardTextScorer, *, places: Any = slice(None)) -> list[float]:
    """Of the pairs above."""
    rows = made.score(PROMPTS[places], [()] * len(PROMPTS[places]), RESPONSES[places], IMAGES[places])
    assert all(isinstance(row, dict) for row in rows), rows
    return [row["score"] for row in rows if isinstance(row, dict)]


def own_score(directory: Path, made: RewardTextScorer, place: int) -> float:
    """By the processor and the model of transformers, one pair alone."""
    from transformers import AutoModel, AutoProcessor

    marker = load_vision_processor(directory).family.marker
    processor: Any = AutoProcessor.from_pretrained(str(directory), local_files_only=True)
    model: Any = AutoModel.from_pretrained(str(directory), local_files_only=True, attn_implementation="eager").eval()
    question = PROMPTS[place].replace("<image>", marker)
    text = f"user: {question}\nassistant: {RESPONSES[place]}\n{processor.tokenizer.eos_token}"
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in IMAGES[place]]
    given = processor(text=[text], images=images or None, return_tensors="pt")
    if "image_grid_thw" in given:
        kinds = (given["input_ids"] == model.config.image_token_id).to(torch.int64)
        given["mm_token_type_ids"] = kinds
    with torch.no_grad():
        states = model(**given).last_hidden_state[0]
    ids = given["input_ids"][0]
    last = int((ids != processor.tokenizer.pad_token_id).nonzero()[-1])
    return float(made.model.head.score(states[last]).detach()[0])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_scores_are_those_of_the_models_own_forward(vision_directory: Directory, model_type: str) -> None:
    directory = vision_directory(model_type)
    made = scorer(directory)
    found = values(made)
    assert found == pytest.approx([own_score(directory, made, place) for place in range(len(PROMPTS))], abs=2e-5)
    assert abs(found[0] - found[5]) > 1e-4, "another image has another score"


def test_scores_do_not_depend_on_what_a_text_is_packed_with(vision_directory: Directory) -> None:
    directory = vision_directory("qwen3_vl")
    expected = [
        value for place in range(len(PROMPTS)) for value in values(scorer(directory), places=slice(place, place + 1))
    ]
    for max_tokens in (1, 60, 8192):
        assert values(scorer(directory, max_tokens=max_tokens)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("model_type", "spec"),
    [
        ("qwen2_5_vl", {}),
        ("llava", {}),
        ("qwen2_5_vl", {"pooling": "attention", "layer": 1}),
        ("qwen3_vl", {"heads": ("score", "kind"), "weights": (1.0, 0.5), "layer": 1}),
    ],
)
def test_a_saved_model_loads_as_it_was(
    vision_directory: Directory, tmp_path: Path, model_type: str, spec: dict[str, Any]
) -> None:
    made = scorer(vision_directory(model_type), **spec)
    made.model.save_pretrained(tmp_path / "rm")
    loaded = load_reward_model(tmp_path / "rm")
    assert loaded.spec == made.model.spec
    ours, theirs = dict(made.model.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert values(RewardTextScorer(loaded)) == pytest.approx(values(made), abs=1e-6)
    assert isinstance(loaded.tokenizer, HfProcessor)


def test_a_classifier_of_another_program_is_read_by_its_score_tensor(
    vision_directory: Directory, tmp_path: Path
) -> None:
    source = vision_directory("qwen2_5_vl")
    made = scorer(source, heads=("good", "bad"), weights=(1.0, 1.0))
    path = tmp_path / "classifier"
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    tensors["score.weight"] = made.model.head.score.weight.detach().clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["Qwen2_5_VLForSequenceClassification"]
    config["id2label"] = {"0": "good", "1": "bad"}
    (path / "config.json").write_text(json.dumps(config))
    loaded = RewardTextScorer(load_reward_model(path))
    assert (loaded.heads, loaded.model.spec.weights) == (("good", "bad"), None)
    for row, other in zip(*(s.score(PROMPTS, [()] * 6, RESPONSES, IMAGES) for s in (loaded, made)), strict=True):
        assert isinstance(row, dict)
        assert isinstance(other, dict)
        assert row == pytest.approx(other, abs=1e-6)


def test_a_critic_starts_from_such_a_reward_model(vision_directory: Directory, tmp_path: Path) -> None:
    made = scorer(vision_directory("qwen2_5_vl"))
    made.model.save_pretrained(tmp_path / "rm")
    critic = load_critic(tmp_path / "rm", seed=0)
    assert critic.head_was_loaded
    assert torch.equal(critic.head.weight, made.model.head.score.weight)


def test_conversations_with_parts_are_read_as_texts_with_markers(vision_directory: Directory) -> None:
    made = scorer(vision_directory("qwen2_vl"))
    parts = [{"type": "text", "text": "left "}, {"type": "image"}, {"type": "text", "text": " right"}]
    in_parts, media = made.encode("rendered", [{"role": "user", "content": parts}], "yes", (FIRST,))
    as_text, same = made.encode("rendered", [{"role": "user", "content": "left <image> right"}], "yes", (FIRST,))
    assert in_parts == as_text
    assert media is not None
    assert same is not None
    assert media.spans == same.spans


def test_a_response_takes_no_image_whatever_it_spells(vision_directory: Directory) -> None:
    tokenizer = SharedImages(load_vision_processor(vision_directory("qwen2_5_vl")))
    assert tokenizer.of_response("a <image> and <|image_pad|>") == "a (image) and (image)"
    made = scorer(vision_directory("llava"))
    [told] = made.score(["<image><image>?"], [()], ["x"], [(FIRST,)])
    assert isinstance(told, str)
    assert "cannot read it" in told


def test_images_of_one_prompt_are_prepared_once(vision_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own = HfProcessor._inputs  # pyright: ignore[reportPrivateUsage]

    def counted(self: HfProcessor, image: Any, where: str) -> Any:
        calls.append(where)
        return own(self, image, where)

    made = scorer(vision_directory("qwen2_5_vl"))
    monkeypatch.setattr(HfProcessor, "_inputs", counted)
    values(made)
    assert len(calls) == 1 + 2 + 1


def test_a_reward_model_of_text_says_that_it_sees_nothing(character_directory: Path) -> None:
    made = RewardTextScorer(new_reward_model(character_directory, RewardSpec(), seed=1))
    assert made.score(["1+1="], [()], ["2"], [(FIRST,)]) == ["the reward model takes no images"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_are_counted_without_an_image(vision_directory: Directory, model_type: str) -> None:
    tokenizer = load_vision_processor(vision_directory(model_type))
    planned = PlannedImages(tokenizer)
    for number, (width, height) in enumerate(((16, 16), (40, 8), (64, 48), (1, 1), (200, 3))):
        ids, media = tokenizer.encode_media("a <image>?", [png(number, width, height)])
        assert media is not None
        assert planned.image_tokens(width, height) == media.num_tokens
        assert planned.text_tokens("a <image>?") + media.num_tokens - 1 == len(ids)
    assert planned.scales == (model_type != "llava")
    if planned.scales:
        assert planned.image_tokens(2000, 3) is None, "the processor refuses such a shape"
        capped = load_vision_processor(vision_directory(model_type), pixels=PixelRules(max_pixels=256, min_pixels=64))
        _, media = capped.encode_media("<image>", [png(9, 64, 48)])
        assert media is not None
        assert (
            planned.image_tokens(64, 48, most_pixels=256)
            == media.num_tokens
            == PlannedImages(capped).image_tokens(64, 48)
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_tower_is_counted_without_weights(vision_directory: Directory, model_type: str) -> None:
    from rft_models.policy.load import load_policy

    found = tower_sizes(vision_directory(model_type))
    assert found is not None
    policy = load_policy(vision_directory(model_type))
    text = {id(weight) for weight in policy.model.get_decoder().parameters()}
    text |= {id(weight) for weight in policy.model.get_output_embeddings().parameters()}
    assert found.parameters == sum(w.numel() for w in policy.model.parameters() if id(w) not in text)
    assert (found.layers, found.hidden, found.heads) == (2, 32, 4)
    assert found.ffn == 128
    assert found.patches_per_token == (1 if model_type == "llava" else 4)


def test_a_model_of_text_has_no_tower(character_directory: Path) -> None:
    assert tower_sizes(character_directory) is None
