"""New decoders in a supervised run: their dropout and their routers depend on no micro-batch and on no resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import read_rows, tensors
from torch import Tensor

from rft_cli.main import main
from rft_models.new_decoders.build import build_new_decoder
from rft_models.settings import DecoderSettings
from rft_models.tiny_models.text import build_character_tokenizer

pytestmark = pytest.mark.xdist_group("new_decoders")

OWN: dict[str, Any] = {"dropout": 0.2, "use_glu": False}
MIXTURE: dict[str, Any] = {"family": "dots1", "use_moe": True, "num_experts": 4, "shared_experts": 1}
RATE = ("--balance_bias_rate", "0.003", "--balance_bias_rate_end", "0.003")  # constant, as the learning rate
ROUTERS = (*RATE, "--router_z_loss_coef", "0.1", "--aux_loss_coef", "0.01")
BIAS = "mlp.gate.e_score_correction_bias"
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A supervised run of four steps of a decoder with these settings; its directory."""
    folder = tmp_path_factory.mktemp("new_decoders")
    rows = [{"input": f"{n}+{n}=", "output": f"{2 * n}"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_character_tokenizer("0123456789+=").save_pretrained(str(folder / "tokenizer"))

    def start(name: str, decoder: dict[str, Any], *more: str) -> Path:
        chosen = DecoderSettings(hidden_size=32, num_heads=4, max_seq_len=32, **decoder)
        model = build_new_decoder(folder / f"model-{name}", chosen, folder / "tokenizer", seed=3)
        words = ["sft", "--pretrain", str(model), "--prompt_data", str(folder / "rows.jsonl"), "--device", "cpu"]
        words += ["--train_batch_size", "4", "--max_epochs", "2", "--learning_rate", "0.01", *more]
        assert main([*words, "--lr_schedule", "constant", "--save_path", str(folder / name)]) == 0
        return folder / name

    return start


def weights_of(path: Path) -> dict[str, Tensor]:
    return tensors(path, "model/model.safetensors")


@pytest.mark.parametrize(("name", "decoder", "more"), [("own", OWN, ()), ("mixture", MIXTURE, ROUTERS)])
def test_a_run_depends_on_no_micro_batch_and_no_resume(
    name: str, decoder: dict[str, Any], more: tuple[str, ...], run: Run
) -> None:
    whole = run(f"{name}_whole", decoder, *more, "--micro_train_batch_size", "1")
    cut = run(f"{name}_cut", decoder, *more, "--micro_train_batch_size", "4", "--packing_samples")
    stopped = run(f"{name}_stopped", decoder, *more, "--micro_train_batch_size", "1", "--max_steps", "3")
    assert main(["resume", str(stopped), "--max_steps", "4"]) == 0
    expected, resumed = weights_of(whole), weights_of(stopped)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[key], tensor) for key, tensor in expected.items())
    for key, tensor in weights_of(cut).items():
        assert (tensor - expected[key]).norm() <= 2e-3 * expected[key].norm() + 1e-6, key
    # a row of metrics of each, whose loads are those of whole steps
    for first, other in zip(read_rows(whole / "metrics.jsonl"), read_rows(cut / "metrics.jsonl"), strict=True):
        assert first["sft/loss"] == pytest.approx(other["sft/loss"], rel=1e-4)
        for key in (key for key in first if key.startswith("router/")):
            assert first[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), key


def test_dropout_acts_in_training(run: Run) -> None:
    with_masks, without = weights_of(run("masks", OWN)), weights_of(run("no_masks", OWN | {"dropout": 0.0}))
    assert any(not torch.allclose(with_masks[key], tensor) for key, tensor in without.items() if tensor.dim() > 1)


def test_the_bias_of_the_routers_moves_and_is_saved(run: Run) -> None:
    path = run("biased", MIXTURE, *ROUTERS)
    biases = [tensor for key, tensor in weights_of(path).items() if key.endswith(BIAS)]
    assert len(biases) == 2
    for bias in biases:
        assert bias.abs().max() >= 0.001
        assert float(bias.mean()) == pytest.approx(0.0, abs=1e-6)
    names = {"router/z_loss", "router/entropy", "router/dead_experts", "router/max_violation_layer_1"}
    assert all(names <= row.keys() for row in read_rows(path / "metrics.jsonl"))
