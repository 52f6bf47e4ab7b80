"""Checkpoints from the command line: export and the way back, weights alone, and some of the weights."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def trained(
    bench: Any, base_words: dict[str, list[str]], memory_root: Path, call: Callable[..., Any]
) -> Iterator[Path]:
    """A supervised run of three steps with a checkpoint of every step."""
    run = memory_root / "checkpoint-commands"
    words = [*base_words["sft"], "--save_path", run, "--save_steps", "1", "--max_ckpt_num", "9"]
    assert call("sft", *words).code == 0
    yield run
    shutil.rmtree(run)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("named", "step"),
    [("", 3), ("checkpoints", 3), ("checkpoints/step_1", 1), ("checkpoints/step_000002/manifest.json", 2)],
)
def test_an_export_of_a_run_a_step_or_a_file_is_that_checkpoints_model(
    rft_train: Any, runs: Path, trained: Path, named: str, step: int
) -> None:
    outcome = rft_train("export", trained / named, "out")
    assert outcome.code == 0, outcome.err
    assert f"step {step}," in outcome.out
    model = trained / "checkpoints" / f"step_{step:06d}" / "model"
    assert equal(weights(runs / "out"), weights(model))
    assert {path.name for path in (runs / "out").iterdir()} == {path.name for path in model.iterdir()}


def test_an_export_can_have_another_type_and_trains_on(
    rft_train: Any, runs: Path, trained: Path, base_words: dict[str, list[str]]
) -> None:
    outcome = rft_train("export", trained, "half", "--dtype", "bfloat16")
    assert outcome.code == 0, outcome.err
    source, found = weights(trained / "checkpoints" / "step_000003" / "model"), weights(runs / "half")
    assert all(torch.equal(found[name], source[name].to(torch.bfloat16)) for name in source)
    assert json.loads((runs / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    words = [*base_words["sft"][2:], "--pretrain", runs / "half", "--save_path", "again", "--max_steps", "1"]
    assert rft_train("sft", *words).code == 0
    start = weights(runs / "again" / "checkpoints" / "step_000000" / "model")
    assert all(torch.equal(start[name], found[name].float()) for name in found)


def test_an_export_is_never_written_over_what_is_there(rft_train: Any, runs: Path, trained: Path) -> None:
    (runs / "full").mkdir()
    (runs / "full" / "mine").write_text("keep")
    outcome = rft_train("export", trained, "full", "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (2, "export.exists")
    assert [path.name for path in (runs / "full").iterdir()] == ["mine"]
    (runs / "empty").mkdir()
    assert rft_train("export", trained, "empty").code == 0
    assert rft_train("export", trained, "more", "--dtype", "int8", "--json_errors").problem["code"] == "export.dtype"
    assert rft_train("export", runs / "nothing", "more", "--json_errors").code == 5
    assert not (runs / "more").exists()


def test_what_reads_back_differently_is_not_exported(
    rft_train: Any, runs: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft_models.policy.causal_policy import CausalPolicy

    written = CausalPolicy.save_pretrained

    def spoiled(self: CausalPolicy, directory: Path, *more: Any) -> None:
        written(self, directory, *more)
        found = weights(directory)
        found["model.norm.weight"] = found["model.norm.weight"] + 1e-3
        save_file(found, directory / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(CausalPolicy, "save_pretrained", spoiled)
    outcome = rft_train("export", trained, "out", "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (4, "export.differs")
    assert "model.norm.weight" in outcome.problem["what"]
    assert list(runs.iterdir()) == []


def test_a_run_starts_from_all_weights_of_a_checkpoint_and_from_step_0(
    rft_train: Any, runs: Path, trained: Path, base_words: dict[str, list[str]]
) -> None:
    words = [*base_words["sft"], "--save_path", "new", "--ckpt_path", trained, "--ckpt_weights_only"]
    outcome = rft_train("sft", *words)
    assert outcome.code == 0, outcome.err
    model = weights(trained / "checkpoints" / "step_000003" / "model")
    assert equal(weights(runs / "new" / "checkpoints" / "step_000000" / "model"), model)
    loaded = len(model)
    assert f"{loaded} loaded, 0 missing, 0 unexpected, 0 mismatched, 0 kept from --pretrain" in outcome.out


def test_a_run_starts_from_the_weights_that_are_named(
    rft_train: Any, runs: Path, trained: Path, bench: Any, base_words: dict[str, list[str]]
) -> None:
    named = "model.layers.0.self_attn,model.norm"
    words = [*base_words["rl"], "--save_path", "new", "--ckpt_path", trained, "--ckpt_partial", named]
    outcome = rft_train("rl", *words, "--init_kl_coef", "0.1")
    assert outcome.code == 0, outcome.err
    start = weights(runs / "new" / "checkpoints" / "step_000000" / "model")
    from_run, own = weights(trained / "checkpoints" / "step_000003" / "model"), weights(bench.model)
    taken = [name for name in start if name.startswith(tuple(named.split(",")))]
    assert 0 < len(taken) < len(start)
    for name, value in start.items():
        assert torch.equal(value, (from_run if name in taken else own)[name]), name
        assert name not in taken or not torch.equal(value, own[name])
    assert f"{len(taken)} loaded, 0 missing, 0 unexpected, 0 mismatched, {len(start) - len(taken)} kept" in outcome.out
    first = json.loads((runs / "new" / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["kl/reference"]) < 1e-9, "the reference is what the run starts from"
    assert rft_train("resume", runs / "new", "--max_steps", "4", "--num_episodes", "2").code == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--ckpt_weights_only"], "checkpoint.no_path"),
        (["--ckpt_partial", "model.norm"], "checkpoint.no_path"),
        (["--ckpt_path", "{run}", "--ckpt_partial"], "option.no_value"),
        (["--ckpt_path", "{run}", "--ckpt_partial", ","], "checkpoint.partial_names_nothing"),
        (["--ckpt_path", "{run}", "--ckpt_partial", "model.norm,modle"], "checkpoint.partial_names_nothing"),
        (["--ckpt_path", "{run}", "--ckpt_weights_only", "--load_checkpoint"], "checkpoint.two_ways"),
        (["--ckpt_path", "{run}", "--ckpt_weights_only", "--pretrain", "{deep}"], "checkpoint.other_weights"),
    ],
)
def test_weights_that_are_not_named_or_not_there_are_refused(
    rft_train: Any, runs: Path, trained: Path, bench: Any, base_words: dict[str, list[str]], words: list[str], code: str
) -> None:
    filled = [word.format(run=trained, deep=bench.deep) for word in words]
    outcome = rft_train("sft", *base_words["sft"], *filled, "--save_path", "new", "--json_errors")
    assert outcome.code in (2, 5)
    assert outcome.problem["code"] == code
    assert list(runs.iterdir()) == []


def test_a_checkpoint_of_the_model_alone_is_small_refused_by_a_resume_and_the_start_of_a_new_run(
    rft_train: Any, runs: Path, base_words: dict[str, list[str]]
) -> None:
    words = [*base_words["sft"], "--save_steps", "1", "--max_ckpt_num", "9", "--save_model_only"]
    assert rft_train("sft", *words, "--run_name", "small").code == 0
    last = runs / "runs" / "small" / "checkpoints" / "step_000003"
    assert not list((last / "state").glob("*.safetensors"))
    outcome = rft_train("resume", "runs/latest", "--max_steps", "5", "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (5, "checkpoint.model_only")
    program, verb, *remedy = shlex.split(outcome.problem["do"])
    assert (program, verb) == ("rft-train", "sft")
    new = rft_train(verb, *remedy)
    assert new.code == 0, new.err
    begun = Path(remedy[remedy.index("--save_path") + 1]) / "checkpoints" / "step_000000" / "model"
    assert equal(weights(begun), weights(last / "model"))
    assert (runs / "runs" / "latest").resolve() == begun.parents[2].resolve()
    averaged = rft_train("sft", *words, "--enable_ema", "--json_errors")
    assert averaged.problem["code"] == "checkpoint.no_average"


def test_the_best_checkpoint_outlives_newer_ones(rft_train: Any, runs: Path, base_words: dict[str, list[str]]) -> None:
    words = [*base_words["rl"], "--eval_steps", "1", "--save_steps", "1", "--max_ckpt_num", "1", "--keep_best"]
    few = rft_train("rl", *words, "--save_path", "run", "--actor_learning_rate", "1e-9", "--max_steps", "2")
    assert few.code == 0, few.err
    folder = runs / "run" / "checkpoints"
    kept = ["step_000000", "step_000002"]
    assert sorted(path.name for path in folder.glob("step_*")) == kept, "no evaluation was better than the first"
    # the resumed run remembers it
    assert rft_train("resume", "run", "--max_steps", "3").code == 0
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000000", "step_000003"]
    told = [json.loads(line)["eval/best_step"] for line in (runs / "run" / "evals.jsonl").read_text().splitlines()]
    assert told == [0] * 4


def test_a_run_on_texts_keeps_the_checkpoint_of_its_lowest_loss(
    rft_train: Any, runs: Path, base_words: dict[str, list[str]]
) -> None:
    words = [*base_words["pretrain"], "--eval_steps", "1", "--save_steps", "1", "--max_ckpt_num", "1", "--keep_best"]
    # a rate that makes it worse from the first step on
    few = rft_train("pretrain", *words, "--save_path", "run", "--learning_rate", "10", "--max_steps", "2")
    assert few.code == 0, few.err
    folder = runs / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000000", "step_000002"]
    # the resumed run remembers it
    assert rft_train("resume", "run", "--max_steps", "3").code == 0
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000000", "step_000003"]
