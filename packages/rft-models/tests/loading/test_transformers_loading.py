"""How a model directory is opened: which kinds are refused, which class reads it, and with which words."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from rft_core.errors import DataError, OptionsError
from rft_models.attention.hf_interface import IMPLEMENTATION
from rft_models.critic.causal_critic import load_critic
from rft_models.families import registry
from rft_models.families.registry import CustomFamily
from rft_models.layers import gradient_checkpointing
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.loading import transformers_loading
from rft_models.loading.transformers_loading import (
    auto_class_of,
    choose_packed,
    load_model,
    model_without_weights,
    native_attention,
    prepare,
    refuse_other_kinds,
)
from rft_models.policy.load import load_policy
from rft_models.policy.load_on_meta import load_on_meta
from rft_models.reward_model.loading import load_reward_model
from rft_models.tiny_models.text import build_character_model

VISION = {"model_type": "llava", "vision_config": {}, "architectures": ["LlavaForConditionalGeneration"]}


@pytest.fixture
def own_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that the user registered."""
    monkeypatch.setitem(registry.CUSTOM_FAMILIES, "mine", CustomFamily("MineForCausalLM", packed=False))


def code_of(config: dict[str, Any], **options: bool) -> str:
    try:
        refuse_other_kinds(Path("here"), config, **options)
    except DataError as error:
        return error.problem.code if error.problem.where == str(Path("here/config.json")) else error.problem.where
    return ""


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ""),
        ({"model_type": "llama"}, ""),
        ({"model_type": "llama", "architectures": None, "auto_map": {}}, ""),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "models.not_causal"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "models.not_causal"),
        ({"model_type": "t5"}, "models.not_causal"),
        ({"model_type": "nothing"}, "models.unknown_architecture"),
        ({"model_type": "nothing", "architectures": ["LlamaForCausalLM"]}, "models.unknown_architecture"),
        ({}, "models.unknown_architecture"),
        ({"model_type": "nothing", "auto_map": {}}, "models.needs_remote_code"),
        ({"model_type": "nothing", "vision_config": {}}, "vision.unknown_family"),
        (VISION, "models.not_causal"),
        ({"model_type": "mine", "architectures": ["MineForCausalLM"]}, ""),
        ({"model_type": "mine", "architectures": ["MineModel"]}, "models.unknown_architecture"),
    ],
)
def test_a_causal_language_model_is_taken_and_others_are_refused(
    config: dict[str, Any], code: str, own_family: None
) -> None:
    assert code_of(config) == code
    assert code_of(config, takes_images=True) == ("" if config is VISION else code)


def test_a_vision_model_is_one_that_generates() -> None:
    assert code_of({**VISION, "architectures": ["LlavaModel"]}, takes_images=True) == "models.not_causal"
    assert code_of({"model_type": "llava", "vision_config": {}}, takes_images=True) == ""
    named = {"model_type": "nothing", "architectures": ["LlavaForConditionalGeneration"]}
    assert code_of(named, takes_images=True) == "models.unknown_architecture"


@pytest.mark.parametrize(
    ("model_type", "text_type", "attention", "packed"),
    [
        ("llama", "", "auto", True),
        ("llama", "", "packed", True),
        ("llama", "", "native", False),
        ("gpt2", "", "auto", False),
        ("gpt2", "", "native", False),
        ("gpt2", "llama", "auto", False),
        ("llava", "llama", "auto", True),
        ("llava", "gpt2", "auto", False),
        ("llava", "llama", "native", False),
        ("qwen2_vl", "qwen2_vl_text", "packed", True),
    ],
)
def test_packed_attention_is_used_where_it_is_known_to_be_exact(
    model_type: str, text_type: str, attention: Any, packed: bool
) -> None:
    assert choose_packed(model_type, attention, Path("here"), text_type=text_type) is packed


@pytest.mark.parametrize(("model_type", "text_type"), [("gpt2", ""), ("gpt2", "llama"), ("llava", "gpt2")])
def test_packed_attention_is_refused_where_it_is_not(model_type: str, text_type: str) -> None:
    with pytest.raises(OptionsError) as caught:
        choose_packed(model_type, "packed", Path("here"), text_type=text_type)
    assert (caught.value.problem.code, caught.value.problem.where) == ("models.no_packed_attention", "here")


def test_the_class_and_the_attention_follow_from_the_configuration() -> None:
    assert auto_class_of({"model_type": "llava"}) == "AutoModelForImageTextToText"
    assert auto_class_of({"model_type": "llama"}) == "AutoModelForCausalLM"
    assert native_attention({"attn_logit_softcapping": 50.0}) == "eager"
    assert native_attention({"attn_logit_softcapping": None}) == native_attention({}) == "sdpa"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What transformers is asked for, and what it reports."""
    told: dict[str, Any] = {"missing": [], "error": None}

    def from_pretrained(path: str, **words: Any) -> Any:
        told["asked"] = (path, words)
        if told["error"] is not None:
            raise told["error"]
        return "the model", {"missing_keys": told["missing"]}

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    told["config"] = SimpleNamespace(sub_configs={"text_config": None, "audio_config": None}, audio_config=None)
    told["config"].text_config = SimpleNamespace()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda path, **words: told["config"])
    return told


@pytest.mark.parametrize("more", [None, {"device_map": "cpu"}])
def test_local_safetensors_are_read_and_no_code(more: dict[str, Any] | None, opened: dict[str, Any]) -> None:
    loaded = load_model(Path("here"), torch.bfloat16, "sdpa", auto_class="AutoModelForCausalLM", more=more)
    assert loaded == "the model"
    asked = {"dtype": torch.bfloat16, "attn_implementation": "sdpa", "output_loading_info": True, **(more or {})}
    asked |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    assert opened["asked"] == ("here", asked | {"config": opened["config"]})
    for part in (opened["config"], opened["config"].text_config):
        assert part._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("missing", "error", "code"),
    [
        ({"b", "a"}, None, "models.missing_weights"),
        ([], OSError("cut off"), "models.damaged_weights"),
        ([], KeyError("a"), "models.damaged_weights"),
    ],
)
def test_weights_that_are_damaged_or_missing_are_refused(
    missing: Any, error: Exception | None, code: str, opened: dict[str, Any]
) -> None:
    opened |= {"missing": missing, "error": error}
    with pytest.raises(DataError) as caught:
        load_model(Path("here"), torch.float32, "sdpa", auto_class="AutoModelForCausalLM")
    assert (caught.value.problem.code, caught.value.problem.where) == (code, "here")
    if missing:
        assert caught.value.problem.what.endswith("the first is a")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(tmp_path_factory.mktemp("m") / "m", hidden=16, layers=1, heads=2, ffn=16, seed=0)


@pytest.mark.parametrize("named", ["flash_attention_2", "someone/kernel"])
def test_the_attention_that_a_file_names_is_not_used(tiny: Path, tmp_path: Path, named: str) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"_attn_implementation": named}))
    model = load_model(tmp_path / "m", torch.float32, "sdpa", auto_class="AutoModelForCausalLM")
    without = model_without_weights(tmp_path / "m")
    on_meta = load_on_meta(tmp_path / "m").model
    assert {one.config._attn_implementation for one in (model, without)} == {"sdpa"}
    assert on_meta.config._attn_implementation != named


def test_adapters_beside_a_model_do_not_lead_to_other_weights(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny)}))
    for load in (load_policy, load_on_meta, partial(load_critic, seed=1), load_reward_model):
        with pytest.raises(DataError) as caught:
            load(tmp_path / "m")
        assert caught.value.problem.code == "models.adapters_beside"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("num_hidden_layers", [1], "num_hidden_layers"),
        ("head_dim", [8], "validate_rope"),
        ("hidden_act", "nope", "nope"),
        ("layer_types", ["nope"], "layer_type"),
        ("rope_parameters", {"rope_type": "nope", "rope_theta": 1.0}, "nope"),
        ("vocab_size", None, "vocab_size"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "optimum"),
    ],
)
def test_values_that_an_architecture_refuses_are_named(
    tiny: Path, tmp_path: Path, field: str, value: object, named: str
) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {field: value}))
    for load in (load_policy,) if field in ("quantization_config",) else (load_policy, load_on_meta):
        with pytest.raises(DataError) as caught:
            load(tmp_path / "m")
        problem = caught.value.problem
        assert problem.code in ("models.config_refused", "models.damaged_weights")
        assert named in problem.what


def test_a_model_without_weights_has_their_shapes(tiny: Path) -> None:
    model = model_without_weights(tiny)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    assert type(model) is type(loaded)
    shapes = [{name: one.shape for name, one in each.named_parameters()} for each in (model, loaded)]
    assert shapes[0] == shapes[1]


def test_the_configuration_is_read_from_local_files_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Asked(Exception):
        pass

    def from_pretrained(path: str, **words: bool) -> Any:
        asked.append((path, words))
        raise Asked

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(Asked):
        model_without_weights(Path("here"))
    assert asked == [("here", {"local_files_only": True, "trust_remote_code": False})]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("asked", [None, False, True, Checkpointing()])
def test_a_model_is_switched_to_the_computations_used_here(
    packed: bool, asked: Checkpointing | bool | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[Any] = []
    linears: list[Any] = []
    monkeypatch.setattr(gradient_checkpointing, "apply", lambda *given: applied.append(given))
    monkeypatch.setattr(transformers_loading, "use_fast_linears", linears.append)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="sdpa").train()
    prepare(model, packed=packed, gradient_checkpointing=asked)
    assert model.config._attn_implementation == (IMPLEMENTATION if packed else "sdpa")
    assert not model.training
    assert linears == [model]
    assert applied == ([(model, Checkpointing())] if asked else [])
    if isinstance(asked, Checkpointing):
        assert applied[0][1] is asked
