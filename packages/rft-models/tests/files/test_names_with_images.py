"""Names of tensors in files: one set whatever wrote them, whatever directory the model came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_core.errors import DataError, RftError
from rft_models.families.vision import VISION_FAMILIES
from rft_models.files.checkpoint_names import to_checkpoint_names, to_module_names
from rft_models.loading.context_length import model_facts
from rft_models.loading.transformers_loading import refuse_other_kinds
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.policy.load_on_meta import load_on_meta
from rft_models.vision.processor import load_vision_processor

FAMILIES = sorted(VISION_FAMILIES)
Directory = Callable[[str], Path]
KINDS = ("as built", "published", "as in memory")


def published(name: str, model_type: str) -> str:
    """Names that the first published files of a family have, from those that a model has in memory."""
    if model_type == "llava":
        name = name.replace("model.language_model.", "language_model.model.").replace("model.vision_tower.", "")
        tower = {"embeddings": "vision_model.embeddings", "encoder": "vision_model.encoder"}
        tower |= {"pre_layrnorm": "vision_model.pre_layrnorm", "post_layernorm": "vision_model.post_layernorm"}
        first = name.split(".")[0]
        if first in tower:
            return f"vision_tower.{tower[first]}{name.removeprefix(first)}"
        return name.replace("model.multi_modal_projector.", "multi_modal_projector.")
    if model_type == "qwen3_vl":
        return name
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def directory_of(source: Path, kind: str, model_type: str, path: Path) -> Path:
    """The model with its tensors under other names that are the same to transformers."""
    if kind == "as built":
        return source
    shutil.copytree(source, path)
    tensors = {name: parameter.detach().clone() for name, parameter in load_policy(source).named_parameters()}
    named = {published(name, model_type) if kind == "published" else name: tensors[name] for name in tensors}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    return path


def same_tensors(policy: CausalPolicy, other: CausalPolicy) -> bool:
    ours, theirs = dict(policy.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_tensor_at_a_time_has_the_names_of_a_whole_save_and_of_the_source(
    vision_directory: Directory, model_type: str, kind: str, tmp_path: Path
) -> None:
    source = directory_of(vision_directory(model_type), kind, model_type, tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    policy = load_policy(source)
    assert same_tensors(policy, load_policy(vision_directory(model_type)))
    policy.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    one_by_one = dict(to_checkpoint_names(policy.model, policy.named_parameters)())
    assert stored.keys() == saved.keys() == one_by_one.keys()
    for name in stored:
        assert torch.equal(stored[name], saved[name]), name
        assert torch.equal(stored[name], one_by_one[name]), name
    own = to_module_names(policy.model, policy.named_parameters())
    assert own.keys() == stored.keys()
    parameters = dict(policy.named_parameters())
    assert all(torch.equal(parameters[own[name]], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_without_memory_finds_every_tensor_and_saves_under_the_same_names(
    vision_directory: Directory, model_type: str, kind: str, tmp_path: Path
) -> None:
    source = directory_of(vision_directory(model_type), kind, model_type, tmp_path / "source")
    whole, empty = load_policy(source), load_on_meta(source)
    files = empty.pending_weights
    assert files is not None
    assert all(parameter.is_meta for _, parameter in empty.named_parameters())
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        shape = tuple(parameter.shape)
        assert torch.equal(files.block(name, (0,) * len(shape), shape), parameter), name
    for (name, ours), (other, theirs) in zip(empty.model.named_buffers(), whole.model.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs), name
    assert to_module_names(empty.model, empty.named_parameters()) == to_module_names(
        whole.model, whole.named_parameters()
    )


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("qwen3_vl_moe", {"model_type": "qwen3_vl_moe_text", "num_experts": 4}),
        ("qwen3_5_moe", {"model_type": "qwen3_5_moe_text", "num_experts": 4}),
        ("llava_next", {"model_type": "llama"}),
        ("llava_onevision", {"model_type": "qwen2"}),
        ("internvl", {"model_type": "qwen2"}),
        ("a_model_of_tomorrow", {}),
    ],
)
def test_other_architectures_with_images_are_refused_by_name(
    vision_directory: Directory, model_type: str, text: dict[str, object], tmp_path: Path
) -> None:
    directory = tmp_path / "other"
    shutil.copytree(vision_directory("qwen3_vl"), directory)
    config = {"model_type": model_type, "architectures": ["SomeForConditionalGeneration"], "vision_config": {}}
    (directory / "config.json").write_text(json.dumps({**config, "text_config": text}))
    for attempt in (load_policy, load_on_meta, model_facts, load_vision_processor):
        with pytest.raises(RftError) as caught:
            attempt(directory)
        problem = caught.value.problem
        assert problem.code == "vision.unknown_family"
        assert model_type in problem.what
        assert "Qwen3-VL (qwen3_vl)" in problem.why
        assert ("mixture of experts" in problem.why) == ("num_experts" in text)


def test_a_model_of_images_that_is_known_is_not_refused(vision_directory: Directory) -> None:
    for model_type in FAMILIES:
        path = vision_directory(model_type)
        config = json.loads((path / "config.json").read_text())
        refuse_other_kinds(path, config, takes_images=True)
        with pytest.raises(DataError):
            refuse_other_kinds(path, config)
