"""Families and files of a person's own: registered by one file, loaded, trained, saved and loaded again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_core.errors import DataError, OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.critic.causal_critic import load_critic
from rft_models.decode.fast_decoder import decoder_for
from rft_models.families import custom, patches, registry
from rft_models.families.custom import load_model_code, register_family
from rft_models.families.patches import is_patched, registered_patches
from rft_models.policy.load import load_policy

FAMILY = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rft_models.families.custom import register_family


class OwnConfig(LlamaConfig):
    model_type = "own_toy"


class OwnLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return MIX(super().forward(hidden_states, **kwargs))


class OwnModel(LlamaModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers[0] = OwnLayer(config, 0)
        self.post_init()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()


register_family(OwnForCausalLM, decoder=OwnModel, packed=PACKED)
"""
PATCH = """
from rft_models.families.patches import register_patch


def widen(model):
    model.model.norm.variance_epsilon = 0.5


register_patch("qwen2", widen)
"""


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patches, "_PATCHES", {})
    monkeypatch.setattr(custom, "_FROM_FILES", {})
    monkeypatch.setattr(registry, "CUSTOM_FAMILIES", {})
    from transformers import CONFIG_MAPPING

    yield
    CONFIG_MAPPING._extra_content.pop("own_toy", None)


def a_family(path: Path, *, mix: str = "lambda hidden: 2 * hidden", packed: bool = True) -> Path:
    path.write_text(FAMILY.replace("MIX", f"({mix})").replace("PACKED", str(packed)))
    return path


def a_directory(source: Path, target: Path) -> Path:
    """The small Qwen2 directory with weights of the new family in its place."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    config = AutoConfig.for_model(
        "own_toy",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def logprobs(policy: Any) -> torch.Tensor:
    tokens = torch.tensor([2, 5, 7, 3, 9])
    with torch.no_grad():
        return policy.token_logprobs(
            PackedTokens(tokens, torch.arange(5), torch.zeros(5, dtype=torch.int64), tokens >= 0)
        )[0]


def test_one_file_adds_a_family_that_is_loaded_trained_and_loaded_again(
    character_directory: Path, tmp_path: Path
) -> None:
    file = a_family(tmp_path / "family.py")
    assert load_model_code(str(file)) == [f"{file}: family own_toy"]
    directory = a_directory(character_directory, tmp_path / "model")
    assert json.loads((directory / "config.json").read_text())["model_type"] == "own_toy"
    policy = load_policy(directory)
    assert policy.packed
    assert type(policy.model).__name__ == "OwnForCausalLM"
    decoder = decoder_for(policy)
    tokens = torch.tensor([[2, 5, 7, 3]])
    logits = decoder.prefill(decoder.new_cache(1, 8), tokens, torch.tensor([4]), [1])
    assert float(logits[0].log_softmax(-1)[9]) == pytest.approx(float(logprobs(policy)[4]), abs=1e-5)
    policy.save_pretrained(tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert torch.equal(logprobs(again), logprobs(policy))
    assert torch.allclose(logprobs(load_policy(directory, attention="native")), logprobs(policy), atol=1e-5), (
        "packed and padded are the same"
    )
    assert type(load_critic(directory, seed=0).model).__name__ == "OwnModel"


def test_a_family_that_mixes_tokens_elsewhere_may_not_be_packed(character_directory: Path, tmp_path: Path) -> None:
    mixing = "lambda hidden: hidden + hidden.cumsum(1)"
    load_model_code(str(a_family(tmp_path / "family.py", mix=mixing)))
    directory = a_directory(character_directory, tmp_path / "model")
    with pytest.raises(Exception, match="differ from those of its own forward"):
        load_policy(directory)
    load_model_code(str(a_family(tmp_path / "family.py", mix=mixing, packed=False)))
    assert not load_policy(directory).packed


def test_without_its_file_the_family_is_unknown_and_the_error_names_the_flag(
    character_directory: Path, tmp_path: Path
) -> None:
    load_model_code(str(a_family(tmp_path / "family.py")))
    directory = a_directory(character_directory, tmp_path / "model")
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING._extra_content.pop("own_toy")
    registry.CUSTOM_FAMILIES.clear()
    with pytest.raises(DataError) as caught:
        load_policy(directory)
    assert "--model_code" in caught.value.problem.do


def test_the_files_of_a_folder_act_once_each_however_often_they_are_read(
    character_directory: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "b_patch.py").write_text(PATCH)
    a_family(folder / "a_family.py")
    told = load_model_code(f"{folder}")
    assert [line.partition(": ")[2] for line in told] == ["family own_toy", "widen for qwen2"]
    load_model_code(f" {folder / 'b_patch.py'} , {folder}")
    assert len(registered_patches("qwen2")) == 1
    (tmp_path / "b_patch.py").write_text(PATCH.replace("0.5", "0.25"))
    load_model_code(str(tmp_path / "b_patch.py"))
    assert len(registered_patches("qwen2")) == 2, "a file of the same name elsewhere is another one"
    patches.unregister_patch("qwen2", registered_patches("qwen2")[1])
    policy = load_policy(character_directory)
    assert is_patched(policy.model)
    assert policy.model.model.norm.variance_epsilon == 0.5
    assert load_model_code("") == []
    assert not custom.has_manual_patches()
    patches.register_patch("llama", print)
    assert custom.has_manual_patches()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (None, "there is no such file"),
        ("x = 1", "registers neither a patch nor a family"),
        ("raise ValueError('my own')", "ValueError: my own"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_does_nothing_useful_is_refused(source: str | None, what: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(OptionsError, match=what) as caught:
        load_model_code(str(file))
    assert caught.value.problem.code == "models.model_code"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"\.py") as caught:
        load_model_code(str(tmp_path))
    assert caught.value.problem.code == "models.model_code"


def test_a_family_needs_a_name_of_its_own() -> None:
    from transformers import LlamaForCausalLM, LlamaModel

    with pytest.raises(OptionsError, match="'llama'") as caught:
        register_family(LlamaForCausalLM, decoder=LlamaModel, packed=True)
    assert caught.value.problem.code == "models.family_name"
    with pytest.raises(OptionsError, match="model_type ''") as caught:
        register_family(torch.nn.Linear, decoder=LlamaModel, packed=True)
    assert caught.value.problem.code == "models.family_name"
