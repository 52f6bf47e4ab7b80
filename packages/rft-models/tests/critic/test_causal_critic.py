"""Values of packed tokens against an unpacked forward, and the directories that critics are read from."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rft_core.errors import DataError, OptionsError, PreflightError
from rft_core.keyed_random import derive_key
from rft_core.packed_tokens import PackedTokens
from rft_models.critic.causal_critic import CausalCritic, load_critic, make_critic
from rft_models.critic.value_head import initial_head
from rft_models.policy.load import load_policy

VOCAB = 61
Build = Callable[..., Any]
LENGTHS = (7, 1, 12, 3, 9)


def packed_batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, positions, segment ids)."""
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def shared_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two prompts of 9 and 5 tokens with three and two responses: (token ids, positions, segment ids, wanted)."""
    generator = torch.Generator().manual_seed(5)
    parts: list[Tensor] = []
    for prompt_length, responses in ((9, (4, 4, 2)), (5, (3, 6))):
        prompt = torch.randint(0, VOCAB, (prompt_length,), generator=generator)
        parts += [torch.cat([prompt, torch.randint(0, VOCAB, (r,), generator=generator)]) for r in responses]
    lengths = torch.tensor([len(part) for part in parts])
    segments = torch.repeat_interleave(torch.arange(5), lengths)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(parts), positions, segments, positions >= torch.tensor([9, 9, 9, 5, 5])[segments]


def a_critic(model: Any, *, packed: bool = True, **options: Any) -> CausalCritic:
    width = model.config.get_text_config().hidden_size
    return make_critic(model.get_decoder(), initial_head(width, seed=4), packed=packed, **options)


def one_by_one(model: Any, head_1D: Tensor, ids: Tensor, segments: Tensor) -> Tensor:
    """The head on the model's own states of each segment alone, moved one token on."""
    rows: list[Tensor] = []
    for number in segments.unique().tolist():
        states = model.get_decoder()(input_ids=ids[segments == number][None], use_cache=False).last_hidden_state[0]
        rows.append(torch.cat([torch.zeros(1, dtype=head_1D.dtype), (states @ head_1D.T)[:-1, 0]]))
    return torch.cat(rows)


def gradients(critic: CausalCritic, loss: Tensor) -> dict[str, Tensor]:
    critic.model.zero_grad()
    critic.head.zero_grad()
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in critic.named_parameters()}


def refuse_other_gradient(name: str, ours: Tensor, theirs: Tensor) -> None:
    """transformers' norms compute in float32 whatever the weights are."""
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm() + 1e-6, name


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "qwen3_moe", "llama"])
def test_packed_values_are_those_of_an_unpacked_forward(model_type: str, packed: bool, tiny_model: Build) -> None:
    ids, positions, segments = packed_batch()
    critic = a_critic(tiny_model(model_type), packed=packed)
    found = critic.values(PackedTokens(ids, positions, segments))
    expected = one_by_one(tiny_model(model_type), critic.head.weight, ids, segments)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.abs().max() > 0.1  # there is something to compare


def test_gradients_are_those_of_an_unpacked_forward(tiny_model: Build) -> None:
    ids, positions, segments = packed_batch()
    weights = torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    critic = a_critic(tiny_model("qwen2", dtype=torch.float64))
    found = critic.values(PackedTokens(ids, positions, segments))
    assert found.dtype is torch.float64
    ours = gradients(critic, (found * weights).sum())
    reference = tiny_model("qwen2", dtype=torch.float64)
    reference.set_attn_implementation("sdpa")
    head = critic.head.weight.detach().clone().requires_grad_()
    (one_by_one(reference, head, ids, segments) * weights).sum().backward()
    assert head.grad is not None
    refuse_other_gradient("score.weight", ours["score.weight"], head.grad)
    for name, parameter in reference.get_decoder().named_parameters():
        refuse_other_gradient(name, ours[f"model.{name}"], parameter.grad)
    assert all(gradient.abs().max() > 0 for gradient in ours.values())


def test_a_value_is_estimated_before_its_token_is_sampled(tiny_model: Build) -> None:
    ids, positions, segments = packed_batch()
    critic = a_critic(tiny_model("qwen2"))
    before = critic.values(PackedTokens(ids, positions, segments))
    assert (before[positions == 0] == 0).all()
    place = 8 + 4  # token 4 of the segment of 12, which starts at 8
    changed = ids.clone()
    changed[place] = (changed[place] + 5) % VOCAB
    after = critic.values(PackedTokens(changed, positions, segments))
    torch.testing.assert_close(after[: place + 1], before[: place + 1], atol=1e-6, rtol=0)
    assert abs(after[place + 1] - before[place + 1]) > 1e-3
    others = segments != 2
    torch.testing.assert_close(after[others], before[others], atol=1e-6, rtol=0)


def test_wanted_values_are_the_same_with_every_prompt_run_once(tiny_model: Build) -> None:
    ids, positions, segments, wanted = shared_batch()
    weights = torch.linspace(-1, 1, len(ids), dtype=torch.float64)
    critic = a_critic(tiny_model("qwen2", dtype=torch.float64))
    num_tokens: list[int] = []
    critic.model.register_forward_pre_hook(
        lambda module, arguments, options: num_tokens.append(options["input_ids"].numel()), with_kwargs=True
    )
    plain = critic.values(PackedTokens(ids, positions, segments))
    expected = gradients(critic, (plain * weights * wanted).sum())
    found = critic.values(PackedTokens(ids, positions, segments, wanted))
    ours = gradients(critic, (found * weights).sum())
    assert num_tokens == [len(ids), len(ids) - 2 * 9 - 5]
    torch.testing.assert_close(found, torch.where(wanted, plain, 0.0), rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        refuse_other_gradient(name, ours[name], gradient)


def test_gradient_checkpointing_changes_no_gradient(tiny_model: Build) -> None:
    results: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        critic = a_critic(tiny_model("qwen2"), gradient_checkpointing=checkpointing).train()
        assert critic.model.training
        assert critic.model.is_gradient_checkpointing == checkpointing
        results.append(gradients(critic, critic.values(PackedTokens(*packed_batch())).sum()))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, atol=1e-6, rtol=1e-6)


def test_the_head_computes_in_float32_above_a_bfloat16_decoder(tiny_model: Build) -> None:
    critic = a_critic(tiny_model("qwen2", dtype=torch.bfloat16))
    assert critic.dtype is torch.bfloat16
    assert critic.head.weight.dtype is torch.float32
    values = critic.values(PackedTokens(*packed_batch()))
    assert values.dtype is torch.float32
    assert (values != values.bfloat16()).any()


def test_what_looks_ahead_is_refused() -> None:
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]), pytest.raises(PreflightError) as caught:
        make_critic(BertModel(BertConfig(**sizes)), initial_head(16, seed=0), packed=False)
    assert caught.value.problem.code == "models.looks_ahead"


def test_a_decoder_that_does_more_than_is_known_is_found_out(tiny_model: Build) -> None:
    critic = a_critic(tiny_model("qwen2"))
    longest_probe = 5
    critic.model.norm.register_forward_hook(
        lambda module, arguments, output: output * (1.01 if output.shape[1] > longest_probe else 1.0)
    )
    with pytest.raises(PreflightError, match="Qwen2Model") as caught:
        critic.verify()
    assert caught.value.problem.code == "models.forward_differs"


def test_a_new_head_is_drawn_from_the_seed_alone(character_directory: Path) -> None:
    before = torch.random.get_rng_state()
    critic = load_critic(character_directory, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not critic.head_was_loaded
    assert not critic.model.training
    assert critic.head.weight.requires_grad
    assert torch.equal(critic.head.weight, load_critic(character_directory, seed=3, head_prefix="value").head.weight)
    assert not torch.equal(critic.head.weight, load_critic(character_directory, seed=4).head.weight)
    generator = torch.Generator().manual_seed(derive_key(3, "value-head") & (2**63 - 1))
    expected = torch.randn((1, 32), generator=generator) / math.sqrt(33)
    assert torch.equal(critic.head.weight, expected)


def test_a_new_head_has_the_variance_of_one_over_width_plus_one() -> None:
    head = initial_head(9999, seed=1)
    assert head.shape == (1, 9999)
    assert float(head.var()) * 10_000 == pytest.approx(1.0, abs=0.05)
    assert abs(float(head.mean())) * 100 < 0.05


@pytest.mark.parametrize("head_prefix", ["score", "value_head", "v_head.summary"])
def test_saved_and_loaded_again_is_bit_identical(head_prefix: str, character_directory: Path, tmp_path: Path) -> None:
    critic = load_critic(character_directory, seed=3, head_prefix=head_prefix)
    with torch.no_grad():
        for _, parameter in critic.named_parameters():
            parameter += 0.01
    critic.save_pretrained(tmp_path / "once")
    again = load_critic(tmp_path / "once", seed=9, head_prefix=head_prefix)
    assert again.head_was_loaded
    for (name, ours), (other, theirs) in zip(critic.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs), name
    again.save_pretrained(tmp_path / "twice")
    files = sorted(entry.name for entry in (tmp_path / "once").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in files)
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes(), name
    architecture = "Qwen2ForSequenceClassification" if head_prefix == "score" else "Qwen2Model"
    assert json.loads((tmp_path / "once" / "config.json").read_text())["architectures"] == [architecture]
    stored = load_file(tmp_path / "once" / "model.safetensors")
    assert sorted(stored) == sorted(name for name, _ in critic.named_parameters())
    assert stored[f"{head_prefix}.weight"].shape == (1, 32)


def test_experts_are_saved_under_the_names_they_are_loaded_from(tiny_model: Build, tmp_path: Path) -> None:
    critic = a_critic(tiny_model("qwen3_moe"))
    critic.save_pretrained(tmp_path)
    again = load_critic(tmp_path, seed=0, tokenizer=_no_tokenizer())
    assert again.head_was_loaded
    for (name, ours), (_, theirs) in zip(critic.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_transformers_reads_a_saved_critic_as_a_classifier_with_one_label(
    character_directory: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    critic = load_critic(character_directory, seed=3)
    critic.save_pretrained(tmp_path)
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen2ForSequenceClassification"]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.tensor([5, 3, 4, 6, 7])
    with torch.no_grad():
        theirs = model(input_ids=ids[None]).logits
        # the classifier's score of four tokens is the value before the fifth
        ours = critic.values(PackedTokens(ids, torch.arange(5), torch.zeros_like(ids)))
        scores = [float(model(input_ids=ids[None, :n]).logits) for n in range(1, 5)]
    assert theirs.shape == (1, 1)
    torch.testing.assert_close(ours[1:], torch.tensor(scores), atol=1e-5, rtol=0)


def test_a_saved_critic_is_no_policy(character_directory: Path, tmp_path: Path) -> None:
    load_critic(character_directory, seed=3).save_pretrained(tmp_path)
    with pytest.raises(DataError) as caught:
        load_policy(tmp_path)
    assert caught.value.problem.code == "models.not_causal"


def test_a_head_for_tokens_is_left_out_in_silence(
    character_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = _copied(character_directory, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _edit_config(directory, tie_word_embeddings=False)
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    critic = load_critic(directory, seed=0)
    assert not caplog.records
    assert logger.level == level
    assert not any("lm_head" in name for name, _ in critic.named_parameters())


@pytest.mark.parametrize("shape", [(2, 32), (1, 31), (32,)])
def test_a_head_of_another_shape_names_file_tensor_and_shapes(
    shape: tuple[int, ...], character_directory: Path, tmp_path: Path
) -> None:
    directory = _copied(character_directory, tmp_path)
    _add_tensors(directory, {"score.weight": torch.zeros(shape)})
    with pytest.raises(DataError) as caught:
        load_critic(directory, seed=0)
    problem = caught.value.problem
    assert problem.code == "models.value_head_shape"
    assert problem.where == str(directory / "model.safetensors")
    assert f"score.weight has shape {list(shape)}" in problem.what
    assert "[1, 32]" in problem.what
    assert not load_critic(directory, seed=0, head_prefix="value").head_was_loaded


def test_a_head_with_a_bias_is_refused(character_directory: Path, tmp_path: Path) -> None:
    directory = _copied(character_directory, tmp_path)
    _add_tensors(directory, {"score.weight": torch.zeros(1, 32), "score.bias": torch.zeros(1)})
    with pytest.raises(DataError) as caught:
        load_critic(directory, seed=0)
    assert caught.value.problem.code == "models.value_head_bias"
    assert "score.bias" in caught.value.problem.what


def test_a_head_is_found_in_the_shard_that_holds_it(character_directory: Path, tmp_path: Path) -> None:
    directory = _copied(character_directory, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    head = {"score.weight": torch.arange(32.0).reshape(1, 32)}
    names = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": head}
    for file, part in names.items():
        save_file(part, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in names.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    critic = load_critic(directory, seed=0)
    assert critic.head_was_loaded
    assert torch.equal(critic.head.weight, head["score.weight"])


@pytest.mark.parametrize("head_prefix", ["", "a b", ".score", "1x", "score."])
def test_a_prefix_that_names_no_tensor_is_refused(head_prefix: str, character_directory: Path) -> None:
    with pytest.raises(OptionsError) as caught:
        load_critic(character_directory, seed=0, head_prefix=head_prefix)
    assert repr(head_prefix) in caught.value.problem.what


def test_a_missing_tensor_of_the_decoder_is_not_replaced_by_random_values(
    character_directory: Path, tmp_path: Path
) -> None:
    directory = _copied(character_directory, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj") as caught:
        load_critic(directory, seed=0)
    assert caught.value.problem.code == "models.missing_weights"


def test_other_kinds_of_models_and_cut_off_weights_are_refused(character_directory: Path, tmp_path: Path) -> None:
    directory = _copied(character_directory, tmp_path)
    _edit_config(directory, architectures=["Qwen2ForTokenClassification"])
    with pytest.raises(DataError) as caught:
        load_critic(directory, seed=0)
    assert caught.value.problem.code == "models.not_causal"
    _edit_config(directory, architectures=["Qwen2Model"])
    load_critic(directory, seed=0)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-200])
    with pytest.raises(DataError) as caught:
        load_critic(directory, seed=0)
    assert caught.value.problem.code == "models.damaged_weights"


def _copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copied"))


def _edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def _add_tensors(directory: Path, added: dict[str, Tensor]) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, **added}, directory / "model.safetensors", metadata={"format": "pt"})


def _no_tokenizer() -> Any:
    """Stands for a tokenizer where none is needed."""
    return object()
