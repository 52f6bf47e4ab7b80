"""Values of packed rows with images, beside a forward of one sequence at a time; critics of images in files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.critic.causal_critic import CausalCritic, load_critic
from rft_models.families.vision import VISION_FAMILIES
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.compatibility import refuse_other_inputs
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor, load_vision_processor

FAMILIES = sorted(VISION_FAMILIES)
Directory = Callable[[str], Path]
Segment = tuple[list[int], int, Media | None]


def noise(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def segments_of(critic: CausalCritic) -> list[Segment]:
    """Two responses to one prompt with an image, a text, and a prompt of two images."""
    tokenizer = critic.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    shared, media = tokenizer.encode_media("<image>what is it? ", [noise(0)])
    double, both = tokenizer.encode_media("one <image> and <image> differ? ", [noise(2, 16, 24), noise(0)])
    text = tokenizer.encode("no image here: ")
    rows = [(shared, "a cat", media), (shared, "two dogs", media), (text, "yes it is", None), (double, "no", both)]
    return [(prompt + tokenizer.encode(answer), len(prompt), images) for prompt, answer, images in rows]


def packed(segments: list[Segment]) -> PackedTokens:
    lengths = [len(tokens) for tokens, _, _ in segments]
    wanted = [torch.arange(length) >= prompt for length, (_, prompt, _) in zip(lengths, segments, strict=True)]
    return PackedTokens(
        torch.tensor([token for tokens, _, _ in segments for token in tokens]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        torch.cat(wanted),
        mm_inputs=tuple(media for _, _, media in segments),
    )


def own_values(critic: CausalCritic, segment: Segment) -> Tensor:
    """[L] by transformers' own forward of the whole model on one sequence; 0 in the prompt."""
    tokens, prompt, media = segment
    ids = torch.tensor(tokens)
    assert critic.tower is not None
    given = {} if media is None else critic.tower.own_inputs(ids, media)
    with native_attention_mode(critic.model, packed=critic.packed):
        states = critic.model(input_ids=ids[None], use_cache=False, **given).last_hidden_state[0]
    after = (states @ critic.head.weight.T)[:, 0]
    return torch.cat([after.new_zeros(prompt), after[prompt - 1 : -1]])


def gradients(critic: CausalCritic, values_T: Tensor) -> dict[str, Tensor]:
    critic.model.zero_grad(set_to_none=True)
    critic.head.zero_grad(set_to_none=True)
    (values_T * torch.linspace(0.5, 1.5, len(values_T))).sum().backward()
    return {n: p.grad.clone() for n, p in critic.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        error = float((found[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        assert error < 1e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize("attention", ["packed", "native"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_and_gradients_are_those_of_one_sequence_at_a_time(
    vision_directory: Directory, model_type: str, attention: Any
) -> None:
    critic = load_critic(vision_directory(model_type), seed=3, attention=attention)
    segments = segments_of(critic)
    found = critic.values(packed(segments))
    expected = torch.cat([own_values(critic, segment) for segment in segments])
    assert float((found - expected).detach().abs().max()) < 1e-5
    assert float(found.detach().abs().max()) > 0.1
    ours = gradients(critic, found)
    assert any("vis" in name and float(value.abs().sum()) > 0 for name, value in ours.items())
    assert_close(ours, gradients(critic, expected))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_value_depends_on_the_image_and_on_nothing_behind_it(vision_directory: Directory, model_type: str) -> None:
    critic = load_critic(vision_directory(model_type), seed=3)
    tokenizer = critic.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    tokens, prompt, _ = segments_of(critic)[0]
    values = [
        critic.values(packed([(tokens, prompt, tokenizer.encode_media("<image>what is it? ", [noise(seed)])[1])]))
        for seed in (0, 1)
    ]
    assert float((values[0] - values[1])[prompt:].detach().abs().min()) > 1e-5
    longer = packed([(tokens + tokens[-2:], prompt, tokenizer.encode_media("<image>what is it? ", [noise(0)])[1])])
    torch.testing.assert_close(critic.values(longer)[: len(tokens)], values[0], atol=1e-5, rtol=0)


def test_recomputed_layers_and_adapters_take_images_too(vision_directory: Directory) -> None:
    plain = load_critic(vision_directory("qwen3_vl"), seed=3)
    row = packed(segments_of(plain))
    expected = gradients(plain, plain.values(row))
    again = load_critic(vision_directory("qwen3_vl"), seed=3, gradient_checkpointing=Checkpointing()).train()
    assert_close(gradients(again, again.values(row)), expected)
    adapted = load_critic(vision_directory("qwen3_vl"), seed=3)
    adapters = add_adapters(adapted, AdapterRules(rank=2, targets=("q_proj", "linear_fc1")), seed=1)
    assert any("visual" in name for name in adapters.layers)
    torch.testing.assert_close(adapted.values(row), plain.values(row), atol=1e-5, rtol=0)
    trained = gradients(adapted, adapted.values(row))
    assert all("lora_" in name or name == "score.weight" for name in trained)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_saved_and_loaded_again_is_the_same_critic(
    vision_directory: Directory, model_type: str, tmp_path: Path
) -> None:
    critic = load_critic(vision_directory(model_type), seed=3)
    with torch.no_grad():
        for _, parameter in critic.named_parameters():
            parameter += 0.01
    critic.save_pretrained(tmp_path / "once")
    again = load_critic(tmp_path / "once", seed=9)
    assert again.head_was_loaded
    for (name, ours), (other, theirs) in zip(critic.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs), name
    row = packed(segments_of(critic))
    assert torch.equal(critic.values(row), again.values(row))
    again.save_pretrained(tmp_path / "twice")
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_a_critic_of_text_refuses_images(vision_directory: Directory, character_directory: Path) -> None:
    media = segments_of(load_critic(vision_directory("llava"), seed=0))[0][2]
    critic = load_critic(character_directory, seed=0)
    with pytest.raises(PreflightError) as caught:
        critic.values(packed([([3] * 20, 4, media)]))
    assert caught.value.problem.code == "vision.no_tower"


def test_a_changed_tower_does_not_load_as_a_critic(
    vision_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft_models.vision import tower

    own = tower.VisionTower.features

    def shifted(self: Any, images: Any) -> Any:
        found = own(self, images)
        return found._replace(main_FD=found.main_FD.roll(1, 0))

    monkeypatch.setattr(tower.VisionTower, "features", shifted)
    with pytest.raises(PreflightError) as caught:
        load_critic(vision_directory("qwen2_5_vl"), seed=0)
    assert caught.value.problem.code == "models.forward_differs"


def test_a_critic_that_prepares_images_otherwise_is_refused(
    vision_directory: Directory, character_directory: Path, tmp_path: Path
) -> None:
    tokenizer = load_vision_processor(vision_directory("qwen2_5_vl"))
    refuse_other_inputs(tokenizer, vision_directory("qwen2_5_vl"), flag="--critic_pretrain")
    others = {"text": character_directory, "family": vision_directory("llava")}
    finer = VisionSizes(hidden=32, ffn=48, vision_hidden=32, patch_size=8, image_size=64, window_size=32)
    letters = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789?: \n")
    others["patches"] = build_vision_model(tmp_path / "patches", letters, model_type="qwen2_5_vl", sizes=finer)
    shutil.copytree(vision_directory("qwen2_5_vl"), tmp_path / "colours")
    other = load_vision_processor(tmp_path / "colours")
    other.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    other.save_pretrained(tmp_path / "colours")
    others["colours"] = tmp_path / "colours"
    told = {
        "text": "a qwen2 model, which takes no images",
        "family": "its ",
        "patches": "its shape of pixel values for one image: (48, 384), the policy's: (48, 96)",
        "colours": "its pixel values for one image",
    }
    for kind, directory in others.items():
        with pytest.raises(OptionsError) as caught:
            refuse_other_inputs(tokenizer, directory, flag="--critic_pretrain")
        assert caught.value.problem.code == "images.other_inputs"
        assert told[kind] in caught.value.problem.what, kind


def test_policy_and_critic_of_one_directory_take_the_same_media(vision_directory: Directory) -> None:
    policy = load_policy(vision_directory("qwen3_vl"))
    critic = load_critic(vision_directory("qwen3_vl"), seed=0, tokenizer=policy.tokenizer)
    segments = segments_of(critic)
    assert policy.token_logprobs(packed(segments))[0].shape == critic.values(packed(segments)).shape
