"""Loops written by hand with `rft.open_loop`, beside the runs of `rft-train` that they repeat; one rank or several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rft
from rft.build.rl_data import rl_data
from rft.build.shared_parts import make_ledger
from rft.settings import RlSettings, SftSettings
from rft.stages.sft import sft_data
from rft_algos.advantages.group_relative import group_norm
from rft_cli.config.resolve import resolve
from rft_models.tiny_models.text import build_character_model
from rft_models.tokenization.tokenizer import load_tokenizer

NUM_STEPS = 5
REWARD = """def digits(responses, labels):
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]
"""
SHARED = {"device": "cpu", "lr_schedule": "constant", "lr_warmup_ratio": 0.0, "max_norm": 0.5}
SAMPLING = {"generate_max_len": 6, "prompt_max_len": 8, "temperature": 0.8}
PAIRS = [(f"{a}+{a}=", f"{2 * a:02d}", f"{a:02d}") for a in range(1, 9)]


@dataclass(frozen=True, slots=True)
class LoopTask:
    """A model of hidden size 16, rows, and a reward, in one folder."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def rl_words(self, save_path: Path, *more: str) -> list[str]:
        """`rft-train rl` of five steps, each of one prompt more than two ranks share evenly."""
        words = ["rl", "--pretrain", str(self.model), "--prompt_data", str(self.folder / "train.jsonl")]
        words += ["--reward", f"{self.folder / 'reward.py'}:digits", "--rollout_batch_size", "3"]
        words += ["--n_samples_per_prompt", "4", "--train_batch_size", "12", "--max_steps", str(NUM_STEPS)]
        words += ["--micro_train_batch_size", "2", "--micro_rollout_batch_size", "3", "--actor_learning_rate", "0.01"]
        words += _words(SHARED | SAMPLING)
        return [*words, "--save_path", str(save_path), *more]

    def sft_words(self, save_path: Path, *more: str) -> list[str]:
        """`rft-train sft` of five steps."""
        words = ["sft", "--pretrain", str(self.model), "--prompt_data", str(self.folder / "train.jsonl")]
        words += ["--output_key", "label", "--train_batch_size", "3", "--micro_train_batch_size", "2"]
        words += ["--learning_rate", "0.01", "--max_steps", str(NUM_STEPS), *_words(SHARED)]
        return [*words, "--save_path", str(save_path), *more]


def make_loop_task(folder: Path) -> LoopTask:
    """Write the model, sixteen rows and the reward."""
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 16, "max_positions": 32}
    build_character_model(folder / "model", alphabet="0123456789+=", seed=0, init_std=0.4, **sizes)
    rows = [{"input": f"{n}+{n}=", "label": f"{2 * n:02d}"} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return LoopTask(folder)


def _words(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def share_of_digits(text: str) -> float:
    """The reward of the rows' file."""
    return sum(letter.isdigit() for letter in text) / (1 + len(text))


def grpo(task: LoopTask, save: Path, **more: Any) -> list[dict[str, float]]:
    """Five steps of GRPO by hand, over the prompts in the order of the run; returns the metrics of each."""
    settings: RlSettings = resolve("rl", task.rl_words(save)[1:]).settings
    data = rl_data(settings, load_tokenizer(task.model), 1)
    ledger = make_ledger(data.mixture, data.data_hash, len(data.prompts), 1, settings.run.seed)
    told: list[dict[str, float]] = []
    options = SHARED | SAMPLING | {"actor_learning_rate": 0.01, "micro_train_batch_size": 2} | more
    with rft.open_loop(task.model, reference=True, micro_rollout_batch_size=3, **options) as loop:
        for _ in range(NUM_STEPS):
            prompts = [data.prompts[entry.prompt_index] for entry in ledger.reserve(3)]
            sampled = loop.policy.sample(prompts, n=4)
            rewards = torch.tensor([share_of_digits(c.response_text) for c in sampled.completions], dtype=torch.float64)
            batch = sampled.batch(group_norm(rewards, sampled.group_ids))
            batch = batch.with_logprobs(reference=loop.policy.reference_logprobs(batch))
            metrics = loop.trainer.forward_backward(batch, rft.objective("grpo"))
            outcome = loop.trainer.step()
            loop.trainer.publish()
            told.append(
                {**metrics, "policy/gradient_norm": outcome.gradient_norm, "reward/mean": float(rewards.mean())}
            )
        loop.trainer.save(save)
    return told


def sft(task: LoopTask, save: Path, **more: Any) -> None:
    """Five steps on demonstrations by hand, in the order of the run."""
    settings: SftSettings = resolve("sft", task.sft_words(save)[1:]).settings
    data = sft_data(settings, load_tokenizer(task.model), 32)
    ledger = make_ledger(data.mixture, data.data_hash, len(data.samples), 1, settings.run.seed)
    options = SHARED | {"actor_learning_rate": 0.01, "micro_train_batch_size": 2} | more
    with rft.open_loop(task.model, **options) as loop:
        for _ in range(NUM_STEPS):
            chosen = [data.samples[entry.prompt_index] for entry in ledger.reserve(3)]
            texts = [(sample.token_ids[: sample.prompt_length], _answer(sample, loop)) for sample in chosen]
            loop.trainer.forward_backward(loop.policy.demonstrations(texts), rft.objective("sft"))
            loop.trainer.step()
        loop.trainer.save(save)


def _answer(sample: rft.TrainingSample, loop: rft.CustomLoop) -> str:
    """The response as text, without its end token, which the batch adds."""
    return loop.policy.tokenizer.decode(sample.token_ids[sample.prompt_length :], skip_special_tokens=True)


def dpo_loss(logprobs: torch.Tensor, batch: rft.TokenBatch, counts: rft.Counts) -> Any:
    """DPO of every pair, divided by the pairs of the step; with its margin as a metric."""
    assert batch.reference_logprobs_T is not None
    gaps = rft.sequence_sums(logprobs - batch.reference_logprobs_T, batch)
    chosen, rejected = rft.pair_values(gaps, batch)
    losses = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected))
    return losses.sum() / counts.num_units, {"dpo/margin": ((chosen - rejected).sum(), len(chosen))}


def dpo(task: LoopTask, save: Path, **more: Any) -> list[dict[str, float]]:
    """Five steps of DPO by hand."""
    told: list[dict[str, float]] = []
    options = SHARED | {"actor_learning_rate": 0.01, "micro_train_batch_size": 2} | more
    with rft.open_loop(task.model, reference=True, **options) as loop:
        whole = loop.policy.pairs(PAIRS)
        whole = whole.with_logprobs(reference=loop.policy.reference_logprobs(whole))
        for step in range(NUM_STEPS):
            batch = whole.split(3)[step % 2]
            told.append(loop.trainer.forward_backward(batch, dpo_loss))
            loop.trainer.step()
        loop.trainer.save(save)
    return told


LOOPS = {"grpo": grpo, "sft": sft, "dpo": dpo}


def main(words: list[str]) -> None:
    """Every case of `[[loop, folder of the result, keywords], ...]` one after the other, as one rank of several.

    Ranks meet once at a port, so that every case has its own.
    """
    task, ports, cases = LoopTask(Path(words[0])), json.loads(words[1]), json.loads(words[2])
    for port, (name, save, keywords) in zip(ports, cases, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        LOOPS[name](task, Path(save), **keywords)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_on_ranks(task: LoopTask, num_ranks: int, cases: list[tuple[str, Path, dict[str, Any]]]) -> None:
    """Run the cases in so many processes; each must end well."""
    words = [str(task.folder), json.dumps(free_ports(len(cases))), json.dumps([[n, str(p), k] for n, p, k in cases])]
    command = [sys.executable, "-m", "support.custom_loops", *words]
    shared = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-4000:]


if __name__ == "__main__":
    main(sys.argv[1:])
