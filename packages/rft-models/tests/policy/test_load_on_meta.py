"""A policy without memory for its weights: all else is as it would be loaded, and the files wait to be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rft_core.errors import DataError, OptionsError
from rft_models.attention.kernels import choose_attention
from rft_models.families import patches
from rft_models.families.registry import packed_families
from rft_models.files.safetensors_reader import WeightFiles
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading.transformers_loading import prepare
from rft_models.policy import load_on_meta as load_on_meta_module
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.freezing import FreezeRules
from rft_models.policy.load import load_policy
from rft_models.policy.load_on_meta import MetaParameters, load_on_meta, load_reference_on_meta

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
JOINED = {"dots1", "qwen2_moe", "qwen3_moe", "mixtral"}
"""Families whose files have a tensor for each expert's matrix."""


def described(policy: CausalPolicy) -> dict[str, Any]:
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in policy.model.named_parameters(remove_duplicate=False)
    }


def buffers(policy: CausalPolicy) -> dict[str, Tensor]:
    return dict(policy.model.named_buffers())


def read(policy: CausalPolicy) -> dict[str, Tensor]:
    """Every tensor that waits in the files, by the name of its parameter."""
    files = policy.pending_weights
    assert isinstance(files, WeightFiles)
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    return {name: files.block(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("model_type", sorted({*packed_families(), "gpt2"} - JOINED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_but_the_values_is_that_of_a_loaded_policy(
    model_type: str, dtype: torch.dtype, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model(model_type).save_pretrained(tmp_path)
    tokenizer: Any = object()
    expected = load_policy(tmp_path, dtype=dtype, tokenizer=tokenizer)
    found = load_on_meta(tmp_path, dtype=dtype, tokenizer=tokenizer)
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert described(found) == described(expected)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected.named_parameters()], "tied"
    assert {name: buffer.dtype for name, buffer in buffers(found).items()} == {
        name: buffer.dtype for name, buffer in buffers(expected).items()
    }
    assert all(torch.equal(buffer, buffers(expected)[name]) for name, buffer in buffers(found).items())
    assert found.tokenizer is tokenizer
    assert found.packed == expected.packed == (model_type in packed_families())
    assert not any(module.training for module in found.model.modules())
    assert type(found.model) is type(expected.model)
    assert found.model.config._attn_implementation == expected.model.config._attn_implementation
    weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    assert all(torch.equal(tensor.to(dtype), weights[name]) for name, tensor in read(found).items())


def test_the_settings_of_generation_and_the_tokenizer_are_those_of_the_directory(
    character_directory: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(character_directory, tmp_path / "model"))
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 5], "max_length": 77}')
    policy = load_on_meta(directory)
    generation = policy.model.generation_config
    assert (generation.eos_token_id, generation.max_length) == ([1, 5], 77)
    assert policy.tokenizer is not None
    assert policy.tokenizer.eos_ids == (1, 5)
    assert policy.where == str(directory)
    (directory / "generation_config.json").unlink()
    assert load_on_meta(directory).model.generation_config.max_length != 77


def test_values_that_a_softcapped_attention_needs_are_computed_without_fusion(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def noted(model: Any, **options: Any) -> None:
        kept.append(model.config._attn_implementation)
        prepare(model, **options)

    monkeypatch.setattr(load_on_meta_module, "prepare", noted)
    tokenizer: Any = object()
    for model_type in ("gemma2", "qwen3"):
        tiny_model(model_type).save_pretrained(tmp_path / model_type)
        load_on_meta(tmp_path / model_type, tokenizer=tokenizer)
    assert kept == ["eager", "sdpa"]


def test_gradient_checkpointing_is_switched_on_where_it_is_asked_for(character_directory: Path) -> None:
    def checkpointed(policy: CausalPolicy) -> list[bool]:
        return [bool(getattr(layer, "gradient_checkpointing", False)) for layer in policy.layers]

    every_second = Checkpointing(every=2)
    expected = load_policy(character_directory, gradient_checkpointing=every_second)
    assert checkpointed(load_on_meta(character_directory, gradient_checkpointing=every_second)) == checkpointed(
        expected
    )
    assert checkpointed(load_on_meta(character_directory)) == [False, False]
    assert checkpointed(load_on_meta(character_directory, gradient_checkpointing=True)) == [True, True]


def test_frozen_parts_are_frozen_before_the_weights_come(character_directory: Path) -> None:
    policy = load_on_meta(character_directory, freeze=FreezeRules(prefixes=("model.layers.0",)))
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {name.startswith("model.layers.0.") for name, _ in policy.named_parameters() if name not in trained} == {
        True
    }
    assert not any(name.startswith("model.layers.0.") for name in trained)
    assert len(trained) > 4
    for freeze in (None, FreezeRules()):
        policy = load_on_meta(character_directory, freeze=freeze)
        assert all(parameter.requires_grad for _, parameter in policy.named_parameters())


def test_a_reference_is_frozen_whole(character_directory: Path) -> None:
    reference = load_reference_on_meta(character_directory, dtype=torch.bfloat16, head_chunk_size=3)
    assert not any(parameter.requires_grad for _, parameter in reference.named_parameters())
    assert not reference.model.training
    assert reference.dtype is torch.bfloat16
    assert reference.head_chunk_size == 3
    assert load_on_meta(character_directory).head_chunk_size is None
    assert load_on_meta(character_directory, head_chunk_size=5).head_chunk_size == 5


@pytest.mark.parametrize("load", [load_on_meta, load_reference_on_meta])
def test_the_kernel_of_attention_is_chosen_for_the_device_and_type_of_the_weights(
    load: Callable[..., CausalPolicy], character_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def noted(device: Any, dtype: torch.dtype, *, flash_attn: bool = False) -> Any:
        asked.append((device, dtype, flash_attn))
        return choose_attention("cpu", dtype)

    monkeypatch.setattr(load_on_meta_module, "choose_attention", noted)
    policy = load(character_directory, device="meta", dtype=torch.bfloat16, flash_attn=True)
    placed = [buffer.device for _, buffer in policy.model.named_buffers()]
    assert set(placed) == {torch.device("meta")}, "buffers are where the weights will be"
    load(character_directory)
    assert asked == [("meta", torch.bfloat16, True), ("cpu", torch.float32, False)]


@pytest.fixture
def larger_epsilon() -> Iterator[None]:
    def larger(model: Any) -> None:
        model.model.norm.variance_epsilon = 0.5

    patches.register_patch("qwen2", larger)
    yield
    patches.unregister_patch("qwen2", larger)


@pytest.mark.usefixtures("larger_epsilon")
def test_a_patch_acts_on_a_model_without_memory_too(character_directory: Path) -> None:
    assert load_on_meta(character_directory).model.model.norm.variance_epsilon == 0.5


def test_tied_matrices_stay_one_and_have_one_name_in_the_files(character_directory: Path) -> None:
    policy = load_on_meta(character_directory)
    names = dict(policy.model.named_parameters(remove_duplicate=False))
    assert names[EMBEDDING] is names[HEAD]
    stored = load_file(character_directory / "model.safetensors")
    values = read(policy)
    assert values.keys() == stored.keys()
    assert all(torch.equal(values[name], stored[name]) for name in stored)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava"])
def test_images_and_their_words_are_read_as_for_a_loaded_policy(
    model_type: str, vision_directory: Callable[[str], Path]
) -> None:
    directory = vision_directory(model_type)
    found, expected = load_on_meta(directory), load_policy(directory)
    assert type(found.model) is type(expected.model)
    assert type(found.tokenizer) is type(expected.tokenizer)
    assert found.packed
    assert described(found) == described(expected)
    assert all(torch.equal(buffer, buffers(expected)[name]) for name, buffer in buffers(found).items())


def test_nothing_is_fetched_and_no_code_of_the_directory_is_run(
    character_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(character_directory, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {name: "code.Mine" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text("raise SystemExit('code of a directory was run')")
    (directory / "generation_config.json").write_text("{}")
    asked: list[tuple[str, Any, Any]] = []

    def note(kind: Any, method: str) -> None:
        own = getattr(kind, method)

        def noted(*given: Any, **options: Any) -> Any:
            asked.append((kind.__name__, options.get("local_files_only"), options.get("trust_remote_code")))
            return own(*given, **options)

        monkeypatch.setattr(kind, method, noted)

    tokenizer: Any = object()
    note(transformers.AutoConfig, "from_pretrained")
    note(transformers.AutoModelForCausalLM, "from_config")
    note(transformers.GenerationConfig, "from_pretrained")
    load_on_meta(directory, tokenizer=tokenizer)
    expected = [("AutoConfig", True, False), ("AutoModelForCausalLM", None, False), ("GenerationConfig", True, None)]
    assert asked == expected


@pytest.fixture
def second_name_and_frozen_gain() -> Iterator[None]:
    """A gain under two names in its module, and one that is not trained; both are made of ones, with memory."""

    def change(model: Any) -> None:
        model.model.norm.gain = model.model.norm.weight
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)

    patches.register_patch("qwen2", change)
    yield
    patches.unregister_patch("qwen2", change)


@pytest.mark.usefixtures("second_name_and_frozen_gain")
def test_what_a_patch_ties_or_freezes_stays_so_without_memory(character_directory: Path) -> None:
    policy = load_on_meta(character_directory)
    norm = policy.model.model.norm
    assert norm.gain is norm.weight
    assert norm.weight.is_meta
    assert norm.weight.requires_grad
    frozen = [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.layers.0.input_layernorm.weight"]


def test_what_is_no_policy_of_this_architecture_is_refused_before_anything_is_built(
    character_directory: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(character_directory, tmp_path / "model"))
    name = "model.norm.weight"
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {name: torch.ones(3)}, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OptionsError) as caught:
        load_on_meta(directory)
    assert caught.value.problem.code == "models.meta_names"
    assert name in caught.value.problem.what
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"qwen2"', '"vit"'))
    with pytest.raises(DataError) as refused:
        load_on_meta(directory)
    assert refused.value.problem.code == "models.not_causal"


def test_a_buffer_that_only_the_file_knows_is_refused_by_name(
    character_directory: Path, tiny_model: Callable[..., Any]
) -> None:
    def with_table(model: Any) -> None:
        model.model.layers[1].register_buffer("table", torch.empty(2, 3, device="meta"))

    patches.register_patch("qwen2", with_table)
    try:
        with pytest.raises(OptionsError) as caught:
            load_on_meta(character_directory)
    finally:
        patches.unregister_patch("qwen2", with_table)
    assert caught.value.problem.code == "models.meta_buffer"
    assert "model.layers.1.table [2, 3]" in caught.value.problem.what


def test_what_is_computed_under_the_mode_keeps_its_values_and_what_is_empty_has_no_memory() -> None:
    with MetaParameters():
        layer = nn.Linear(3, 2)
        placed, named = torch.empty(2, device="cpu"), torch.empty(2, dtype=torch.float64)
        computed = torch.arange(4.0).cumsum(0)
    assert layer.weight.is_meta
    assert placed.is_meta
    assert (named.is_meta, named.dtype) == (True, torch.float64)
    assert computed.tolist() == [0.0, 1.0, 3.0, 6.0]
    assert not torch.empty(2).is_meta
