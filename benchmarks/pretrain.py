"""Pre-training of this project beside plain torch and transformers' Trainer, on a CPU in float32: tokens a second.

    uv sync --group bench
    RFT_DATA_DIR=... python benchmarks/pretrain.py [--cases dense mixture] [--steps 10] [--rounds 5] [--threads 1]

Every side trains one new model of a few million parameters (Qwen3; the mixture: Qwen3-MoE, 8 experts of which a token
goes to 2) on the same windows of tinyshakespeare in the same order, a batch a step in one piece, without padding, with
AdamW and clipping. `torch` is peers/small_qwen3.py, nanoGPT's way; `trainer` is transformers' Trainer with what it
takes for itself (SDPA, fused AdamW, for the mixture grouped_mm), `trainer_eager` the same with the loop over the
experts. The gate comes first: the loss of every step agrees to 1e-4 relative. Sides take turns, each in a process of
its own (with `--together` in one, where what one side leaves in the allocator is the next one's too); a figure is the
median over rounds of the median step of a round, the first three steps left out, and a ratio the median of the rounds'
ratios; the ratio of CPU times beside it holds on a busy machine too. See README.md. The last line is
`worst_ratio=<x> against <side> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "pretrain.json"
WARM_UP, WITHIN = 2, 1e-4
RATE, BETAS, SEED = 1e-3, (0.9, 0.95), 42
SHAPE: dict[str, Any] = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
CASES: dict[str, dict[str, Any]] = {"dense": {}, "mixture": {"use_moe": True, "num_experts": 8, "top_k": 2}}
SIDES = {"dense": ("torch", "trainer"), "mixture": ("trainer", "trainer_eager")}
Steps = tuple[list[float], list[float], list[float]]
"""(loss, seconds, seconds of CPU) of every step."""


class Clock:
    """Wall and CPU time from the end of a step to that of the next."""

    def __init__(self) -> None:
        """Begin nothing yet: the first step is one of warm-up."""
        self._last: tuple[float, float] | None = None
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def step(self) -> None:
        """End a step."""
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.seconds.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now


def ours(model: Path, text: Path, steps: int, chosen: argparse.Namespace, folder: Path) -> Steps:
    """Train with `rft.pretrain`; the rows of the metrics are written in the steps that are timed."""
    import rft

    clock = Clock()

    class Watch(rft.Callback):
        def on_step(self, *_: Any) -> None:
            clock.step()

    run = rft.pretrain(
        str(text),
        model=str(model),
        save_path=str(folder),
        data_store_path=str(folder.parent / "tokens"),
        max_len=chosen.context + 1,
        max_steps=steps,
        train_batch_size=chosen.batch,
        micro_train_batch_size=chosen.batch,
        learning_rate=RATE,
        lr_schedule="constant",
        lr_warmup_ratio=0.0,
        adam_betas=BETAS,
        seed=SEED,
        device="cpu",
        eval_steps=0,
        save_interval=0,
        panel=False,
        callbacks=[Watch()],
    )
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [row["sft/loss"] for row in rows], clock.seconds, clock.cpu


def trainer(model: Path, batches: list[Any], folder: Path, *, experts: str | None = None) -> Steps:
    """Train with transformers' Trainer."""
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []
    clock = Clock()

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    loaded = AutoModelForCausalLM.from_pretrained(model, **({"experts_implementation": experts} if experts else {}))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=len(batches),
        per_device_train_batch_size=len(batches[0]),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": ids, "labels": ids} for batch in batches for ids in batch]
    InOrder(model=loaded, args=arguments, train_dataset=rows, callbacks=[Watch()]).train()  # type: ignore[arg-type]
    return losses, clock.seconds, clock.cpu


def plain(model: Path, batches: list[Any], folder: Path) -> Steps:
    """Train in plain torch."""
    from peers.small_qwen3 import train

    del folder
    clock = Clock()
    return train(model, batches, RATE, BETAS, clock.step), clock.seconds, clock.cpu


def new_model(case: str, text: Path, context: int, folder: Path) -> Path:
    """A new decoder with a byte-pair tokenizer of the text, by a run whose step changes nothing that is kept."""
    import rft

    os.environ["RFT_CACHE"] = str(folder / "cache")
    settings = SHAPE | CASES[case] | {"max_seq_len": context + 1, "max_len": context + 1, "tokenizer_size": 4096}
    given = {"data_store_path": str(folder / "tokens"), "panel": False, "device": "cpu", "seed": SEED}
    rft.pretrain(str(text), save_path=str(folder / "made"), max_steps=1, eval_steps=0, **settings, **given)
    (found,) = (folder / "cache").rglob("model.safetensors")
    return found.parent


def windows(model: Path, text: Path, steps: int, chosen: argparse.Namespace, folder: Path) -> list[Any]:
    """[B, T + 1] batches: the windows that ours reads, in its order."""
    import torch

    from rft_models.tokenization.tokenizer import load_tokenizer
    from rft_trainer.data.token_shards.open import open_windows
    from rft_trainer.settings.pretraining import PretrainDataSettings

    data = PretrainDataSettings(prompt_data=str(text), data_store_path=str(folder / "tokens"))
    rows = open_windows(data, load_tokenizer(model), window=chosen.context + 1, seed=SEED)
    order = rows.order(0)
    ids = [rows.training[order[place]][0].token_ids for place in range(steps * chosen.batch)]
    return list(torch.tensor(ids).split(chosen.batch))


def one_side(name: str, model: Path, text: Path, chosen: argparse.Namespace, folder: Path) -> Steps:
    """Train one side."""
    import torch

    torch.set_num_threads(chosen.threads)
    if name == "ours":
        return ours(model, text, chosen.steps, chosen, folder)
    batches = windows(model, text, chosen.steps, chosen, folder.parent)
    if name == "torch":
        return plain(model, batches, folder)
    return trainer(model, batches, folder, experts="eager" if name == "trainer_eager" else None)


def in_a_process(*arguments: Any) -> Steps:
    """Train one side in a process of its own: what the memory of one side is like, no other one meets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(one_side, *arguments).result()


def compare(case: str, text: Path, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Pass the gate, then take turns; the medians of all sides, and their ratios to ours."""
    folder.mkdir()
    model = new_model(case, text, chosen.context, folder)
    train = one_side if chosen.together else in_a_process
    sides: dict[str, Callable[[Path], Steps]] = {
        name: partial(train, name, model, text, chosen) for name in ("ours", *SIDES[case])
    }
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    apart: dict[str, float] = {}
    outside: list[float] = []
    for turn in range(chosen.rounds):
        losses = {}
        # every other round backwards, so that what a side leaves behind is not always the same side's to bear
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            losses[name], taken, computed = sides[name](folder / f"{name}_{turn}")
            rounds[name].append(statistics.median(taken[WARM_UP:]))
            cpu[name].append(statistics.median(computed[WARM_UP:]))
        outside.append(outside_training(folder / f"ours_{turn}"))
        if turn == 0:
            apart = {name: difference(losses["ours"], losses[name]) for name in SIDES[case]}
            if max(apart.values()) > WITHIN:
                sys.exit(f"gate of {case}: {losses}")
        print(case, turn, {name: (round(rounds[name][-1], 3), round(cpu[name][-1], 3)) for name in sides}, flush=True)
    tokens = chosen.batch * chosen.context
    found: dict[str, Any] = {}
    for name in sides:
        row = found[name] = {
            "tokens_per_second": tokens / statistics.median(rounds[name]),
            "tokens_per_cpu_second": tokens / statistics.median(cpu[name]),
        }
        if name == "ours":
            row["outside_training"] = statistics.median(outside)
        else:
            ratios = [theirs / mine for mine, theirs in zip(rounds["ours"], rounds[name], strict=True)]
            of_cpu = [theirs / mine for mine, theirs in zip(cpu["ours"], cpu[name], strict=True)]
            row |= {"ratio": statistics.median(ratios), "ratios": ratios}
            row |= {"cpu_ratio": statistics.median(of_cpu), "cpu_ratios": of_cpu, "largest_difference": apart[name]}
    return found


def outside_training(folder: Path) -> float:
    """Return the median share of a step that is not forward, backward and optimizer: rows, data, watch."""
    (file,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return statistics.median(1 - row["time/share_train"] for row in rows[WARM_UP:])


def difference(losses: list[float], others: list[float]) -> float:
    """Largest relative difference of the steps' losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    for name, value in {"steps": 10, "rounds": 5, "threads": 1, "context": 256, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--together", action="store_true", help="all sides in one process")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(chosen.threads)
    text = Path(os.environ.get("RFT_DATA_DIR", "")) / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        sys.exit(f"{text} is not there: RFT_DATA_DIR names the directory that holds tinyshakespeare/input.txt")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen.cases:
            found[case] = compare(case, text, chosen, Path(folder) / case)
            for name, row in found[case].items():
                line = f"{case:<8} {name:<13} {row['tokens_per_second']:,.0f} tokens/s"
                if name != "ours":
                    line += (
                        f", ratio {row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}), of CPU "
                    )
                    line += f"time {row['cpu_ratio']:.2f}; losses within {row['largest_difference']:.1e}"
                print(line)
    packages = {name: version(name) for name in ("transformers", "torch", "rft")}
    arguments = {name: str(value) if name == "output" else value for name, value in vars(chosen).items()}
    arguments.pop("output")
    chosen.output.write_text(
        json.dumps({"packages": packages, "arguments": arguments, "cases": found}, indent=1) + "\n"
    )
    ratio, side, case = min((found[case][side]["ratio"], side, case) for case in found for side in SIDES[case])
    print(f"worst_ratio={ratio:.2f} against {side} at {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
