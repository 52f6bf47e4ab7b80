"""Runs with adapters: learned, resumed to the bit, exported, and with a reference that is no second model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.compare import checkpoints, differing_tensors, read_rows, tensors
from support.trainer_task import TrainerTask
from torch import Tensor
from transformers import AutoModelForCausalLM

from rft.build.engines import engine_check, native_engine
from rft.stages import rl_loop
from rft_cli.main import main
from rft_core.errors import ServiceError
from rft_core.packed_tokens import PackedTokens
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.settings import DecodingEngineSettings
from rft_models.lora.adapters import AdapterRules
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy

pytestmark = pytest.mark.xdist_group("lora")

LORA = ("--lora_rank", "4", "--lora_alpha", "8")
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(trainer_task: TrainerTask) -> Run:
    """A run with adapters; its directory."""

    def start(name: str, *more: str, code: int = 0) -> Path:
        path = trainer_task.folder / name
        assert main(["rl", *trainer_task.words(), *LORA, *more, "--save_path", str(path)]) == code
        return path

    return start


@pytest.fixture(scope="module")
def whole(run: Run) -> Path:
    """Three steps."""
    return run("lora_whole")


def model_of(path: Path) -> Path:
    return checkpoints(path)[-1] / "model"


def adapters_of(path: Path) -> dict[str, Tensor]:
    return load_file(model_of(path) / "adapter" / "adapter_model.safetensors")


def logprobs(policy: CausalPolicy) -> Tensor:
    ids = torch.arange(2, 14)
    with torch.no_grad():
        return policy.eval().token_logprobs(PackedTokens(ids, torch.arange(12), torch.zeros_like(ids), ids > 0))[0]


def peft_logprobs(model: Any) -> Tensor:
    ids = torch.arange(2, 14)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]])


def test_adapters_alone_are_trained_and_have_moments(whole: Path, trainer_task: TrainerTask) -> None:
    moments = tensors(whole, "state/optimizer.safetensors")
    assert {name.split(".lora_")[-1] for name in moments} == {"A.default.weight", "B.default.weight"}
    merged, base = tensors(whole, "model/model.safetensors"), load_file(trainer_task.folder / "model/model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert all(bool(value.any()) for name, value in adapters_of(whole).items())


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(run: Run, whole: Path) -> None:
    part = run("lora_part", "--max_steps", "2", "--lr_schedule", "constant")
    assert main(["resume", str(part), "--max_steps", "3"]) == 0
    ours, theirs = adapters_of(part), adapters_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for file in ("model/model.safetensors", "state/optimizer.safetensors"):
        assert differing_tensors(tensors(part, file), tensors(whole, file)) == []


def test_a_run_on_another_base_is_not_continued(
    run: Run, trainer_task: TrainerTask, capsys: pytest.CaptureFixture[str]
) -> None:
    base = trainer_task.folder / "moved"
    shutil.copytree(trainer_task.folder / "model", base)
    part = run("lora_moved", "--pretrain", str(base), "--max_steps", "2", "--lr_schedule", "constant")
    policy = load_policy(base)
    with torch.no_grad():
        next(iter(policy.model.parameters())).add_(0.01)
    policy.save_pretrained(base)
    capsys.readouterr()
    assert main(["resume", str(part), "--max_steps", "3"]) != 0
    told = capsys.readouterr().err
    assert "weights" in told
    assert str(base) in told
    accepted = told.rpartition("--accept_changes ")[2].split()[0]
    assert main(["resume", str(part), "--max_steps", "3", "--accept_changes", accepted]) != 0
    told = capsys.readouterr().err
    assert "the base weights differ from those in" in told, "adapters are of the weights that they were trained on"
    assert str(base) in told


def test_the_reference_is_the_policy_without_its_adapters(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = ("--init_kl_coef", "0.1", "--use_kl_loss", "--max_epochs", "2")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a second model was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(rl_loop, "load_frozen", never)
        free = run("lora_free_reference", *kl)
    assert "no second model is loaded" in capsys.readouterr().out
    loaded = list[Path]()

    def apart_from(policy: CausalPolicy) -> CausalPolicy:
        loaded.append(Path(policy.where))
        return load_policy(policy.where).eval()

    monkeypatch.setattr(rl_loop, "BaseModelView", apart_from)
    apart = run("lora_apart_reference", *kl)
    assert len(loaded) == 1
    for ours, theirs in zip(read_rows(free / "metrics.jsonl"), read_rows(apart / "metrics.jsonl"), strict=True):
        for name in ("policy/kl_loss", "kl/reference", "policy/loss"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
    ours, theirs = adapters_of(free), adapters_of(apart)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-6


def test_an_exported_adapter_loads_in_plain_peft_with_equal_log_probs(
    whole: Path, trainer_task: TrainerTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(whole), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert main(["export", str(whole), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "folded")]) == 0
    told = capsys.readouterr().out
    assert "adapters of 7 layers" in told
    assert str(trainer_task.folder / "model") in told
    assert not (tmp_path / "folded" / "adapter").exists()
    expected = logprobs(load_policy(model_of(whole)))
    base = AutoModelForCausalLM.from_pretrained(trainer_task.folder / "model")
    through_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(peft_logprobs(through_peft), expected, atol=1e-5, rtol=1e-5)
    for name in ("merged", "folded"):
        torch.testing.assert_close(logprobs(load_policy(tmp_path / name)), expected, atol=1e-5, rtol=1e-5)
        assert (tmp_path / name / "tokenizer.json").is_file()


def test_what_peft_wrote_is_folded_in_and_a_run_without_adapters_has_none(
    trainer_task: TrainerTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(trainer_task.folder / "model")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    theirs.save_pretrained(str(tmp_path / "theirs"))
    assert main(["export", str(tmp_path / "theirs"), str(tmp_path / "folded")]) == 0
    found = logprobs(load_policy(tmp_path / "folded"))
    torch.testing.assert_close(found, peft_logprobs(theirs.eval()), atol=1e-5, rtol=1e-5)
    words = ["rl", *trainer_task.words(), "--pretrain", str(tmp_path / "theirs")]
    assert main([*words, "--save_path", str(tmp_path / "run")]) != 0
    assert f"rft-train export {tmp_path / 'theirs'}" in capsys.readouterr().err
    full = tmp_path / "full"
    assert main(["rl", *trainer_task.words(), "--max_steps", "1", "--save_path", str(full)]) == 0
    assert main(["export", str(full), str(tmp_path / "none"), "--adapter"]) != 0
    assert "holds no adapters" in capsys.readouterr().err


def test_a_run_with_adapters_learns(run: Run) -> None:
    more = ("--num_episodes", "9", "--max_steps", "25", "--n_samples_per_prompt", "8", "--train_batch_size", "16")
    path = run("lora_learns", *more, "--actor_learning_rate", "0.03")
    rewards = [row["reward/mean"] for row in read_rows(path / "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    evals = read_rows(path / "evals.jsonl")
    assert evals[-1]["eval/reward"] >= evals[0]["eval/reward"]


def test_a_critic_and_dora_train_and_resume_to_the_bit(run: Run) -> None:
    more = ("--advantage_estimator", "gae", "--lora_type", "dora", "--critic_learning_rate", "0.01")
    expected = run("lora_ppo", *more, "--save_value_network")
    part = run("lora_ppo_part", *more, "--save_value_network", "--max_steps", "2", "--lr_schedule", "constant")
    assert main(["resume", str(part), "--max_steps", "3"]) == 0
    for file in ("model/model.safetensors", "model/critic/model.safetensors", "state/critic_optimizer.safetensors"):
        assert differing_tensors(tensors(part, file), tensors(expected, file)) == []
    trained = {name.rpartition("/")[2] for name in tensors(expected, "state/critic_optimizer.safetensors")}
    assert all(".lora_" in name or name == "score.weight" for name in trained)
    assert "score.weight" in trained
    assert not any("lora" in name for name in tensors(expected, "model/critic/model.safetensors"))


def test_a_run_from_the_weights_of_one_with_adapters_has_them_as_its_base(run: Run, whole: Path) -> None:
    more = ("--ckpt_path", str(whole), "--ckpt_weights_only", "--lr_schedule", "constant")
    part = run("lora_on_top", *more, "--max_steps", "2")
    base = json.loads((model_of(part) / "adapter" / "base.json").read_text())
    assert Path(base["directory"]) == model_of(whole)
    expected = run("lora_on_top_whole", *more, "--max_steps", "3")
    assert main(["resume", str(part), "--max_steps", "3"]) == 0
    for name, tensor in adapters_of(expected).items():
        assert torch.equal(adapters_of(part)[name], tensor), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_engine_on_a_copy_serves_the_merged_weights_and_a_stale_one_is_found(
    dtype: torch.dtype | None, trainer_task: TrainerTask
) -> None:
    policy = load_policy(trainer_task.folder / "model")
    adapters = add_adapters(policy, AdapterRules(rank=3), seed=0)
    engine = native_engine(policy, 4, 24, "cpu", dtype=dtype, weights=policy.merged_parameters)
    assert isinstance(engine, NativeEngineOnCopy)
    machine: Any = type("Machine", (), {"device": "cpu", "ranks": type("Ranks", (), {"rank": 0})})
    check = engine_check(DecodingEngineSettings(engine_type="native"), machine, policy, engine)
    assert check is not None
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()).view_as(parameter))
    with pytest.raises(ServiceError) as caught:
        check(1)
    assert caught.value.problem.code == "engine.logprob_parity"
    engine.load_weights(2)
    assert check(2)["engine/probe_gap"][0] < (1e-4 if dtype is None else 0.25)


def test_dropout_of_a_supervised_run_depends_on_no_micro_batch_and_no_resume(trainer_task: TrainerTask) -> None:
    folder, rows = trainer_task.folder, [{"input": f"{n}+{n}=", "output": f"{2 * n}"} for n in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(name: str, *more: str) -> dict[str, Tensor]:
        words = ["sft", "--pretrain", str(folder / "model"), "--prompt_data", str(folder / "pairs.jsonl"), *LORA]
        words += [
            "--lr_schedule",
            "constant",
            "--train_batch_size",
            "4",
            "--max_epochs",
            "2",
            "--device",
            "cpu",
            "--learning_rate",
            "0.02",
        ]
        assert main([*words, *more, "--save_path", str(folder / name)]) == 0
        return adapters_of(folder / name)

    first = start("sft_one", "--lora_dropout", "0.3", "--micro_train_batch_size", "1")
    cut = start("sft_cut", "--lora_dropout", "0.3", "--micro_train_batch_size", "4", "--packing_samples")
    plain = start("sft_plain", "--micro_train_batch_size", "4")
    stopped = start("sft_stopped", "--lora_dropout", "0.3", "--micro_train_batch_size", "1", "--max_steps", "3")
    assert main(["resume", str(folder / "sft_stopped"), "--max_steps", "4"]) == 0
    resumed = adapters_of(folder / "sft_stopped")
    assert any(not torch.equal(resumed[name], stopped[name]) for name in stopped)
    assert all(torch.equal(resumed[name], first[name]) for name in first)
    for name, tensor in first.items():
        assert (cut[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-6, name
    assert any((plain[name] - tensor).norm() > 0.05 * tensor.norm() for name, tensor in first.items())
