"""Scores of packed texts against transformers' classifiers and plain twins, and the directories they are kept in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rft_core.errors import DataError, OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.critic.causal_critic import load_critic
from rft_models.reward_model.head import AttentionPooling, last_tokens, new_head
from rft_models.reward_model.loading import load_reward_model, make_reward_model, new_reward_model
from rft_models.reward_model.model import RewardModel
from rft_models.reward_model.spec import RewardSpec

VOCAB = 61
Build = Callable[..., Any]
LENGTHS = (7, 1, 12, 3, 9)
PLAIN = RewardSpec()
TWO = RewardSpec(heads=("helpful", "safe"), weights=(1.0, 0.5))
ATTENTION = RewardSpec(pooling="attention", attention_heads=4)
PROBE = RewardSpec(layer=1)
ALL = RewardSpec(heads=("a", "b"), weights=(1.0, -2.0), pooling="attention", layer=1, scale_for_train=True)


def packed_batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids without padding, positions, segment ids)."""
    ids = torch.randint(2, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids, positions, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def a_model(model: Any, spec: RewardSpec, *, packed: bool = True) -> RewardModel:
    width = model.config.get_text_config().hidden_size
    return make_reward_model(model.get_decoder(), new_head(spec, width, seed=4), packed=packed)


def rows(scores: dict[str, Tensor]) -> Tensor:
    """[S, K]."""
    return torch.stack(list(scores.values()), 1)


def one_at_a_time(model: RewardModel, ids: Tensor, segments: Tensor) -> Tensor:
    """[S, K]: every text alone."""
    found: list[Tensor] = []
    for number in segments.unique().tolist():
        own = ids[segments == number]
        found.append(rows(model.scores(PackedTokens(own, torch.arange(len(own)), torch.zeros_like(own)))))
    return torch.cat(found)


def classifier_directory(tiny_model: Build, tokenizer_of: Path, path: Path, num_labels: int = 1) -> Any:
    """A sequence classifier of transformers on disk, and in memory."""
    from transformers import AutoModelForSequenceClassification

    config = tiny_model("qwen2").config
    config.vocab_size, config.num_labels = 15, num_labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, path / name)
    return model


def theirs(model: Any, texts: list[list[int]], pad_id: int = 0) -> Tensor:
    """[S, K] of transformers on right-padded rows."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad_id] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


def packed(texts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows laid one after another."""
    return (
        torch.tensor([token for text in texts for token in text]),
        torch.tensor([place for text in texts for place in range(len(text))]),
        torch.tensor([number for number, text in enumerate(texts) for _ in text]),
    )


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("spec", [PLAIN, TWO, ATTENTION, PROBE, ALL], ids=["last", "two", "attn", "probe", "all"])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gemma2"])
def test_packed_scores_are_those_of_texts_alone(
    model_type: str, spec: RewardSpec, packs: bool, tiny_model: Build
) -> None:
    ids, positions, segments = packed_batch()
    model = a_model(tiny_model(model_type), spec, packed=packs)
    found = model.scores(PackedTokens(ids, positions, segments))
    assert list(found) == list(spec.heads)
    assert all(scores.dtype is torch.float32 and scores.shape == (len(LENGTHS),) for scores in found.values())
    torch.testing.assert_close(rows(found), one_at_a_time(model, ids, segments), atol=1e-5, rtol=1e-5)
    assert rows(found).std() > 0.05  # there is something to compare


@pytest.mark.parametrize("spec", [PLAIN, ATTENTION], ids=["last", "attn"])
def test_prompts_that_run_once_change_no_score_and_no_gradient(spec: RewardSpec, tiny_model: Build) -> None:
    prompt, other = [5, 9, 7, 33, 12, 8, 40], [3, 4, 5, 6]
    texts = [[*prompt, *end] for end in ([2, 3], [4], [2, 8, 9])] + [[*other, *end] for end in ([7], [9, 9])]
    ids, positions, segments = packed(texts)
    own = positions >= torch.tensor([7, 7, 7, 4, 4])[segments]
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for mask in (None, own):
        model = a_model(tiny_model("qwen2", dtype=torch.float64), spec)
        scores = rows(model.scores(PackedTokens(ids, positions, segments, mask)))
        (scores[:, 0] * torch.arange(1.0, 6.0)).sum().backward()
        results.append((scores, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-10, rtol=1e-10)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        # transformers' norms compute in float32 whatever the weights are
        assert (results[1][1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_attention_pooling_is_that_of_torch() -> None:
    width, heads, lengths = 12, 3, (4, 1, 6)
    pooling = AttentionPooling(width, heads, seed=2).double()
    twin = nn.MultiheadAttention(width, heads, bias=False, batch_first=True, dtype=torch.float64)
    query = pooling.query.detach().reshape(1, 1, width)
    with torch.no_grad():
        weights = [torch.eye(width, dtype=torch.float64), pooling.key_weight, pooling.value_weight]
        twin.in_proj_weight.copy_(torch.cat(weights))
        twin.out_proj.weight.copy_(pooling.output_weight)
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(sum(lengths), width, dtype=torch.float64, generator=generator)
    found = pooling(states, torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)), 3)
    for row, part in zip(found, states.split(lengths), strict=True):
        expected, _ = twin(query, part[None], part[None])
        torch.testing.assert_close(row, expected[0, 0], atol=1e-12, rtol=1e-12)
    with pytest.raises(OptionsError, match="attention_heads = 5") as caught:
        AttentionPooling(width, 5, seed=0)
    assert caught.value.problem.code == "models.reward_pooling"


def test_a_probe_reads_the_state_behind_its_layer(tiny_model: Build) -> None:
    ids, positions, segments = packed_batch((9,))
    model = a_model(tiny_model("qwen3", num_hidden_layers=3, dtype=torch.float64), RewardSpec(layer=2))
    whole = tiny_model("qwen3", num_hidden_layers=3, dtype=torch.float64)
    states = whole.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    expected = states[2][0, -1] @ model.head.score.weight[0]
    torch.testing.assert_close(
        model.scores(PackedTokens(ids, positions, segments))["score"][0], expected, atol=1e-6, rtol=1e-6
    )
    assert len(model.model.layers) == model.model.config.num_hidden_layers == 2
    assert not any(p.requires_grad for p in model.model.norm.parameters()), "nothing reads the norm"
    with pytest.raises(OptionsError, match=r"layer 4.*with 3") as caught:
        a_model(tiny_model("qwen3", num_hidden_layers=3), RewardSpec(layer=4))
    assert caught.value.problem.code == "models.reward_layer"


@pytest.mark.parametrize(
    ("tokens", "place"),
    [([5, 6, 7], 2), ([5, 6, 0], 1), ([5, 0, 7, 0, 0], 2), ([0, 0], 0), ([9], 0)],
    ids=["no padding", "an end", "inside", "nothing else", "one"],
)
def test_the_last_token_that_is_no_padding_is_read(tokens: list[int], place: int) -> None:
    ids = torch.tensor([8, 8, *tokens, 0, 8])
    segments = torch.tensor([0, 0, *[1] * len(tokens), 2, 2])
    assert last_tokens(ids, segments, 3, 0).tolist() == [1, 2 + place, 2 + len(tokens) + 1]
    assert last_tokens(ids, segments, 3, None).tolist() == [1, 1 + len(tokens), 3 + len(tokens)]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_of_transformers_has_its_own_scores(
    num_labels: int, tiny_model: Build, character_directory: Path, tmp_path: Path
) -> None:
    reference = classifier_directory(tiny_model, character_directory, tmp_path / "rm", num_labels)
    texts = [[3, 4, 5, 6, 1], [7, 2], [9, 9, 9, 9, 9, 9, 8, 0], [4]]  # with an end token, without, with padding
    model = load_reward_model(tmp_path / "rm")
    assert not model.model.training
    found = rows(model.scores(PackedTokens(*packed(texts))))
    torch.testing.assert_close(found, theirs(reference, texts), atol=1e-5, rtol=1e-5)
    assert model.spec.weights == ((1.0,) if num_labels == 1 else None), "files of transformers know no weights"


@pytest.mark.parametrize("spec", [PLAIN, TWO], ids=["one", "two"])
def test_what_is_written_loads_in_transformers(spec: RewardSpec, character_directory: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = new_reward_model(character_directory, spec, seed=5)
    model.save_pretrained(tmp_path / "rm")
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    texts = [[3, 4, 5, 6, 1], [7, 2], [9, 9, 8]]
    torch.testing.assert_close(
        rows(model.scores(PackedTokens(*packed(texts)))), theirs(reference, texts), atol=1e-5, rtol=1e-5
    )
    assert [reference.config.id2label[i] for i in range(len(spec.heads))] == list(spec.heads)
    assert AutoTokenizer.from_pretrained(tmp_path / "rm").encode("1+2") == [3, 12, 4]


@pytest.mark.parametrize("spec", [PLAIN, TWO, ATTENTION, PROBE, ALL], ids=["last", "two", "attn", "probe", "all"])
def test_a_saved_model_comes_back_to_the_bit(spec: RewardSpec, character_directory: Path, tmp_path: Path) -> None:
    model = new_reward_model(character_directory, spec, seed=5)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "rm")
    again = load_reward_model(tmp_path / "rm")
    assert again.spec == spec
    batch = packed([[3, 4, 5, 6, 1], [7, 2], [9, 9, 8]])
    stored = load_file(tmp_path / "rm" / "model.safetensors")
    for loaded in (dict(again.named_parameters()), stored):
        assert loaded.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())
    torch.testing.assert_close(
        rows(again.scores(PackedTokens(*batch))), rows(model.scores(PackedTokens(*batch))), atol=1e-6, rtol=1e-6
    )
    architectures = json.loads((tmp_path / "rm" / "config.json").read_text())["architectures"]
    assert architectures == (["Qwen2ForSequenceClassification"] if spec.is_classifier else ["Qwen2Model"])


def test_a_step_of_training_prefers_the_chosen_text(character_directory: Path) -> None:
    for spec in (PLAIN, ALL):
        model = new_reward_model(character_directory, spec, seed=5).train()
        optimizer = torch.optim.Adam([p for _, p in model.trainable_parameters()], lr=1e-3)
        batch = packed([[3, 4, 5], [3, 4, 6]])
        margins: list[float] = []
        for _ in range(8):
            scores = rows(model.scores(PackedTokens(*batch)))[:, 0]
            loss = -torch.nn.functional.logsigmoid(scores[0] - scores[1])
            margins.append((scores[0] - scores[1]).item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert margins[-1] > margins[0] + 0.1
        assert all(p.grad is not None for name, p in model.trainable_parameters() if "log_scale" not in name)


def test_the_scale_acts_in_training_alone(character_directory: Path) -> None:
    model = new_reward_model(character_directory, RewardSpec(scale_for_train=True), seed=5)
    batch = packed([[3, 4, 5]])
    plain = model.scores(PackedTokens(*batch))["score"]
    scaled = model.train().scores(PackedTokens(*batch))["score"]
    torch.testing.assert_close(scaled, plain / 0.07, rtol=1e-5, atol=1e-5)


def test_a_head_computes_in_float32_above_a_bfloat16_decoder(tiny_model: Build) -> None:
    for spec in (PLAIN, ATTENTION):
        model = a_model(tiny_model("qwen2", dtype=torch.bfloat16), spec)
        assert model.dtype is torch.bfloat16
        scores = model.scores(PackedTokens(*packed_batch()))["score"]
        assert scores.dtype is torch.float32
        assert (scores != scores.bfloat16()).any()


def test_a_critic_starts_from_a_reward_model(character_directory: Path, tmp_path: Path) -> None:
    batch = packed([[3, 4, 5, 6]])
    for spec in (PLAIN, TWO):
        path = tmp_path / spec.heads[0]
        model = new_reward_model(character_directory, spec, seed=5)
        model.save_pretrained(path)
        critic = load_critic(path, seed=1)
        assert critic.head_was_loaded
        assert spec.weights is not None
        shorter = packed([[3, 4, 5]])
        reward = sum(
            w * s for w, s in zip(spec.weights, rows(model.scores(PackedTokens(*shorter)))[0].tolist(), strict=True)
        )
        assert critic.values(PackedTokens(*batch))[3].item() == pytest.approx(reward, abs=1e-5), (
            "the reward of what stands before"
        )
        critic.save_pretrained(tmp_path / f"{spec.heads[0]}-critic")
        assert load_reward_model(tmp_path / f"{spec.heads[0]}-critic").spec == PLAIN
    new_reward_model(character_directory, ATTENTION, seed=5).save_pretrained(tmp_path / "pooled")
    assert not load_critic(tmp_path / "pooled", seed=1).head_was_loaded, "its head is not on one state"


def test_directories_that_are_none_are_refused(character_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_reward_model(character_directory)
    assert caught.value.problem.code == "models.no_reward_head"
    new_reward_model(character_directory, ATTENTION, seed=5).save_pretrained(tmp_path / "rm")
    file = tmp_path / "rm" / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != "reward_head.pooling.query"}, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"reward_head\.pooling\.query") as caught:
        load_reward_model(tmp_path / "rm")
    assert caught.value.problem.code == "models.missing_weights"
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    config["reward_head"]["pooling"] = "mean"
    (tmp_path / "rm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as caught:
        load_reward_model(tmp_path / "rm")
    assert caught.value.problem.code == "models.reward_spec_damaged"


def test_a_head_with_a_bias_is_refused(tiny_model: Build, character_directory: Path, tmp_path: Path) -> None:
    classifier_directory(tiny_model, character_directory, tmp_path / "rm")
    file = tmp_path / "rm" / "model.safetensors"
    save_file(load_file(file) | {"score.bias": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(DataError) as caught:
        load_reward_model(tmp_path / "rm")
    assert caught.value.problem.code == "models.value_head_bias"


@pytest.mark.parametrize(
    "fields",
    [
        {"heads": ()},
        {"heads": ("a", "a"), "weights": None},
        {"heads": ("a b",)},
        {"weights": (1.0, 2.0)},
        {"weights": (math.nan,)},
        {"layer": 0},
        {"pooling": "mean"},
    ],
    ids=str,
)
def test_a_spec_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        RewardSpec(**fields)
