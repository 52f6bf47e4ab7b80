"""`rft-train plan`: the arithmetic by hand, the number of parameters of real models, and the refusals of a start."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft.decoder_sizes import model_sizes
from rft_cli.commands import plan
from rft_core.errors import DataError, OptionsError, PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_dist.planning.memory_estimate import (
    BUCKET_BYTES,
    DecoderSizes,
    TrainingMemoryConfig,
    activation_bytes_of_block,
    estimate,
    host_peak,
    peak_bytes,
)
from rft_dist.planning.run_layout import RunLayout
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import SHARDINGS, run_dims, run_layout
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model

SMALL = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PARAMETERS = 2 * 100 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40 + 32) + 16


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds config.json alone."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


def test_a_step_is_traced_in_place_of_the_bound(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "--pretrain", str(model), "--train_batch_size", "4", "--micro_train_batch_size", "2"]
    traced, bound = (planned(*words, *more, capsys=capsys) for more in ((), ("--by_formula",)))
    terms, at_most = ({term["name"]: term for term in told["memory"]} for told in (traced, bound))
    assert terms["activations"]["formula"] == terms["logits"]["formula"] == "2 x 64 tokens, traced"
    assert terms["activations"]["num_bytes"] < at_most["activations"]["num_bytes"]
    assert 0.5 * bound["training_bytes"] < traced["training_bytes"] < bound["training_bytes"]
    assert "traced on tensors without values, with all its layers" in traced["notes"][-1]
    assert not any("traced" in note for note in bound["notes"])


def test_a_plan_that_does_not_fit_names_the_flags_with_which_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # two layers of width 512, a batch of 128 x 512 and a vocabulary of 50,257 in float32
    shape = {"vocab_size": 50257, "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | shape | heads))
    words = ["sft", "--pretrain", str(tmp_path), "--train_batch_size", "128", "--micro_train_batch_size", "128"]
    told = planned(*words, "--gpu_memory", "8", capsys=capsys)
    assert told["training_bytes"] > 8 * 2**30
    ladder = told["ladder"]
    assert ladder["fits"]
    assert ladder["training_bytes"] < 0.9 * 8 * 2**30
    assert ladder["flags"].startswith("--fused_linear_logprob")
    assert "train_batch_size 128 / 1 = 128 samples" in told["batches"][0]
    again = planned(*words, *ladder["flags"].split(), "--gpu_memory", "8", capsys=capsys)
    assert (again["ladder"], again["training_bytes"]) == (None, ladder["training_bytes"])
    assert plan.run([*words, "--gpu_memory", "8"]) == 0
    page = capsys.readouterr().out
    assert f"write {ladder['flags']}" in page


def test_a_family_is_gone_through_up_to_the_first_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "--max_len", "2048", "--bf16", "--train_batch_size", "8", "--largest", "qwen2.5"]
    fitting: list[int] = []
    for memory in ("24", "40"):
        told = planned(*words, "--gpu_memory", memory, capsys=capsys)
        assert [model["fits"] for model in told["models"]] == [True] * (len(told["models"]) - 1) + [False]
        assert all(model["peak_bytes"] <= 0.9 * int(memory) * 2**30 for model in told["models"][:-1])
        fitting.append(len(told["models"]))
    assert 1 < fitting[0] <= fitting[1]
    assert plan.run([*words, "--gpu_memory", "24"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("predicted    qwen2.5 on 24 GiB a GPU, by formula")
    assert "does not fit" in page
    for more, code in ((["--gpu_memory", "24", "--pretrain", "x"], "plan.two_models"), ([], "plan.no_memory")):
        with pytest.raises(OptionsError) as caught:
            plan.run([*words, *more])
        assert caught.value.problem.code == code


def test_samples_a_minute_need_a_measured_rate_and_a_stage_that_only_trains(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--pretrain", str(model), "--by_formula"]
    assert planned("sft", *words, capsys=capsys)["speed"] is None
    speed = planned("sft", *words, "--model_tflops", "2.5", capsys=capsys)["speed"]
    assert speed["samples_a_minute"] == pytest.approx(60 * 2.5e12 / speed["flops_a_sample"])
    assert speed["num_tokens"] == 64
    assert plan.run(["sft", *words, "--model_tflops", "2.5"]) == 0
    assert "speed        predicted: " in capsys.readouterr().out
    told = planned("rl", *words, "--model_tflops", "2.5", capsys=capsys)
    assert told["speed"] is None
    assert any("no samples a minute" in note for note in told["notes"])
    with pytest.raises(OptionsError, match="model_tflops"):
        plan.run(["sft", *words, "--model_tflops", "fast"])


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan.run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_grid_the_shares_and_the_bytes_are_those_of_a_hand_calculation(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rl", "--pretrain", str(model), "--world-size", "16", "--nodes=2", "--train_batch_size", "128"]
    words += ["--micro_train_batch_size", "4", "--rollout_batch_size", "32", "--n_samples_per_prompt", "4"]
    words += ["--prompt_max_len", "20", "--generate_max_len", "30", "--init_kl_coef", "0.01", "--by_formula"]
    told = planned(*words, capsys=capsys)
    assert (told["world_size"], told["nodes"], told["ranks_per_node"], told["dp_size"]) == (16, 2, 8, 16)
    assert told["batches"][0] == "train_batch_size 128 / 16 = 8 samples a rank = 2 micro-batches of 4"
    assert told["batches"][1].startswith("rollout_batch_size 32 prompts / 16 = 2 a rank x 4 samples = 8, scored in 1 ")
    assert told["parameters"] == PARAMETERS
    found = {term["name"]: term["num_bytes"] for term in told["memory"]}
    block = 4 * (6 * 16 + 4 * 16 + 5 * 8 + 5 * 40) + 16 * 16
    assert found == {
        "parameters": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "Adam moments": 8 * PARAMETERS,
        "gradient exchange": 2 * min(BUCKET_BYTES, 4 * PARAMETERS),
        "reference model": 4 * PARAMETERS,
        "activations": 4 * 50 * 2 * block,
        "logits": 2 * 4 * 50 * 100 * 4,
        "keys and values": 8 * 50 * (2 * 2 * 8 * 4),
        "joined matrices": 4 * 2 * (16 * (16 + 2 * 8) + 2 * 16 * 40),
        "checkpoint copy": 12 * PARAMETERS,
    }
    # gradients are exchanged when activations and logits have gone
    elsewhere = ("keys and values", "checkpoint copy", "gradient exchange")
    assert told["training_bytes"] == sum(found.values()) - sum(found[name] for name in elsewhere)
    assert told["host_bytes"] == found["checkpoint copy"]
    resting = ("parameters", "Adam moments", "reference model", "keys and values", "joined matrices")
    assert told["rollout_bytes"] == sum(found[name] for name in resting)


SIZES = DecoderSizes(vocab=100, hidden=16, layers=4, query_width=16, kv_width=8, ffn=40, tied=False)


def layout_of(settings: StrategySettings, world_size: int) -> RunLayout:
    return run_layout(settings, run_dims(settings, world_size))


def of(name: str, run: TrainingMemoryConfig, sizes: DecoderSizes = SIZES) -> int:
    return {term.name: term.num_bytes for term in estimate(sizes, run)}[name]


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [
        ("replicated", (1, 1, 1)),
        ("zero1", (1, 1, 8)),
        ("zero2", (1, 8, 8)),
        ("zero3", (8, 8, 8)),
        ("fsdp", (8, 8, 8)),
    ],
)
def test_each_way_of_sharding_divides_its_parts_among_the_ranks(sharding: str, parts: tuple[int, int, int]) -> None:
    count = SIZES.parameters
    run = TrainingMemoryConfig(layout=layout_of(SHARDINGS[sharding], 8), weight_bytes=2, master_copy=True)
    for name, size, part in zip(("parameters", "gradients", "Adam moments"), (2, 4, 8), parts, strict=True):
        assert of(name, run) == -(-count * size // part), name
    if parts[0] > 1:
        grouped = replace(run, layout=replace(run.layout, shard_size=4))
        assert of("parameters", grouped) == -(-count * 2 // 4)
    assert of("master copy", run) == -(-count * 4 // parts[2])


def test_offloads_take_their_parts_out_of_the_device_and_into_the_host() -> None:
    count = SIZES.parameters
    layout = layout_of(StrategySettings(fsdp=True), 4)
    plain = TrainingMemoryConfig(layout=layout, weight_bytes=4, narrow_compute=True, average=True)
    moments, everything = replace(plain, host_moments=True), replace(plain, host_moments=True, host_weights=True)
    training = [peak_bytes(estimate(SIZES, run))[0] for run in (plain, moments, everything)]
    share = -(-4 * count // 4)
    assert host_peak(estimate(SIZES, plain)) == 0
    assert host_peak(estimate(SIZES, moments)) == -(-8 * count // 4) + share
    assert training[0] - training[1] == -(-8 * count // 4) + share
    assert training[1] - training[2] == 2 * share
    outside = 2 * 100 * 16 + 16
    assert of("gathered weights", plain) == 2 * (outside + 2 * (count - outside) // 4)


def test_activations_fall_with_recomputation_and_with_sequence_parallel_ranks() -> None:
    block = activation_bytes_of_block(SIZES, 4)
    pairs = layout_of(StrategySettings(sp_size=2), 2)
    assert of("activations", TrainingMemoryConfig(micro_tokens=100)) == 100 * 4 * block
    assert of("activations", TrainingMemoryConfig(micro_tokens=100, layout=pairs)) == 50 * 4 * block
    assert of("activations", TrainingMemoryConfig(micro_tokens=100, recomputes=True)) == 100 * (4 * 16 * 4 + block)
    every = TrainingMemoryConfig(micro_tokens=100, recomputes=True, recompute_every=2)
    assert of("activations", every) == 100 * (2 * 16 * 4 + 2 * block)
    assert of("logits", TrainingMemoryConfig(micro_tokens=100, head_rows=10)) == 2 * 10 * 100 * 4


def test_not_everything_is_alive_at_once() -> None:
    terms = estimate(
        SIZES, TrainingMemoryConfig(micro_tokens=10, cache_rows=2, cache_tokens=5, reference=True, critic=True)
    )
    training, rollout = peak_bytes(terms)
    names = {term.name for term in terms}
    assert {"critic parameters", "critic gradients", "reference model", "keys and values"} <= names
    by_name = {term.name: term.num_bytes for term in terms}
    assert training + by_name["keys and values"] == sum(by_name.values())
    assert rollout < training


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_parameters_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        kind, **({name: value for name, value in SMALL.items() if name != "model_type"} | KINDS[kind])
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    sizes, notes = model_sizes(tmp_path)
    assert notes == []
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_bytes_that_blocks_keep_are_within_the_bound(tmp_path: Path) -> None:
    folder = build_character_model(tmp_path / "real", hidden=64, layers=3, heads=4, ffn=160, kv_heads=2)
    sizes, notes = model_sizes(folder)
    policy = load_policy(folder)
    assert notes == []
    assert sizes.parameters == policy.num_parameters
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for _, parameter in policy.trainable_parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(2, sizes.vocab, (96,), generator=torch.Generator().manual_seed(0))
    places, segments = torch.arange(48).repeat(2), torch.arange(2).repeat_interleave(48)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = policy.token_logprobs(PackedTokens(tokens, places, segments, torch.ones(96, dtype=torch.bool)))
    assert logprobs.requires_grad
    terms = {term.name: term.num_bytes for term in estimate(sizes, TrainingMemoryConfig(micro_tokens=96))}
    bound = terms["activations"] + terms["logits"]
    assert bound / 2.5 < sum(kept.values()) <= bound, (sum(kept.values()), bound)


@pytest.mark.parametrize(
    "words", [["--world_size", "16", "--nodes", "3"], ["--world_size", "16", "--nodes", "2", "--gpus_per_node", "4"]]
)
def test_a_grid_that_cannot_be_is_refused_as_at_the_start(words: list[str], model: Path) -> None:
    with pytest.raises(PreflightError) as caught:
        plan.run(["--pretrain", str(model), *words])
    assert "16 (--world_size)" in caught.value.problem.what
    assert "(--nodes)" in caught.value.problem.what


def test_batches_and_flags_that_the_start_refuses_are_refused(model: Path) -> None:
    words = ["--pretrain", str(model), "--train_batch_size", "700", "--rollout_batch_size", "64"]
    with pytest.raises(OptionsError, match="train_batch_size = 700") as caught:
        plan.run(words)
    assert caught.value.problem.code == "batch.not_a_multiple"
    with pytest.raises(OptionsError, match="no_such_flag") as caught:
        plan.run(["--pretrain", str(model), "--no_such_flag", "1"])
    assert caught.value.problem.code == "option.unknown"
    with pytest.raises(OptionsError, match="'x'") as caught:
        plan.run(["--pretrain", str(model), "--nodes", "x"])
    assert caught.value.problem.code == "option.bad_value"
    with pytest.raises(OptionsError, match="'eval'") as caught:
        plan.run(["eval", "--pretrain", str(model)])
    assert caught.value.problem.code == "plan.unknown_command"
    (model / "config.json").write_text(json.dumps({"model_type": "x", "vocab_size": 3}))
    with pytest.raises(DataError, match="hidden_size") as caught:
        plan.run(["--pretrain", str(model)])
    assert caught.value.problem.code == "plan.unknown_sizes"


def test_numbers_of_the_environment_fill_in_and_say_so(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUM_NODES", "4")
    monkeypatch.setenv("GPUS_PER_NODE", "8")
    told = planned("--pretrain", str(model), capsys=capsys)
    assert told["world_size"] == 32
    assert told["origins"]["nodes"] == "NUM_NODES (the environment)"
    told = planned("sft", "--pretrain", str(model), "--nodes", "1", "--gpus_per_node", "2", capsys=capsys)
    assert told["world_size"] == 2


def test_the_page_names_what_is_left_of_a_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(["--pretrain", str(model), "--gpu_memory", "80", "--world_size", "2", "--sharding", "zero2"]) == 0
    page = capsys.readouterr().out
    assert "80.0 GiB of 80 are left" in page
    assert "(by division)" in page
    assert "nothing was measured" in page


def test_a_plan_by_formula_needs_no_torch(model: Path) -> None:
    code = f"from rft_cli.main import main\nmain(['plan', '--pretrain', {str(model)!r}, '--by_formula'])\n"
    code += "import sys; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "while training" in done.stdout
