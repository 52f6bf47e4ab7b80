"""Pre-training of this project beside plain torch and transformers' Trainer on a GPU in bfloat16: tokens a second, MFU.

    RFT_DATA_DIR=... python benchmarks/pretrain_gpu.py [--cases dense mixture] [--steps 24] [--rounds 3] [--compiled]

`dense` is a Qwen3 decoder of the size of GPT-2 (124 M parameters: 12 layers of width 768, 50,304 tokens), `mixture` a
Qwen3-MoE of 6 layers with 8 experts of which a token goes to 2. All sides train the same weights on the same windows of
1,024 tokens in the same order, 16 a step in one piece, float32 weights under autocast to bfloat16, with AdamW and
clipping. The sides are those of pretrain.py; `--compiled` adds ours with `--compile on` and plain torch under
`torch.compile`. The gate: losses of all steps agree to 2e-2 relative. Sides take turns; a figure is the median over
rounds of the median step of a round, the first steps left out. MFU counts 6 N + 12 L D T operations a token (N: active
weights; nanoGPT's count) against the 989 TFLOP/s of the datasheet of an H100 or H200. `--small --device cpu` tries the
program. The last line is `worst_ratio=<x> against <side> at <case>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretrain import BETAS, RATE, SEED, Clock, Steps, difference, windows

RESULTS = Path(__file__).resolve().parent / "results" / "pretrain_gpu.json"
WARM_UP, WITHIN, PEAK = 4, 2e-2, 989e12
TIMES = 4
"""How often the text stands in the file, so that all windows of a round are there."""
DENSE = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "ffn_hidden_size": 2048}
MIXTURE = {"hidden_size": 768, "num_layers": 6, "num_heads": 12, "num_kv_heads": 4, "ffn_hidden_size": 1024}
MIXTURE |= {"use_moe": True, "num_experts": 8, "top_k": 2}
CASES: dict[str, dict[str, Any]] = {"dense": DENSE, "mixture": MIXTURE}
SMALL = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 96}
SIDES = {"dense": ["torch", "trainer"], "mixture": ["trainer", "trainer_eager"]}
OWN_PEAKS: list[float] = []
"""Of the runs of ours, in MiB."""
OWN_PHASES: list[dict[str, float]] = []
"""Median `time/...` of the steps of each run of ours."""
COMPILED = {"dense": ["ours_compiled", "torch_compiled"], "mixture": ["ours_compiled"]}


def ours(model: Path, text: Path, chosen: argparse.Namespace, folder: Path, *, compiled: bool = False) -> Steps:
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
        max_steps=chosen.steps,
        train_batch_size=chosen.batch,
        micro_train_batch_size=chosen.batch,
        learning_rate=RATE,
        lr_schedule="constant",
        lr_warmup_ratio=0.0,
        adam_betas=BETAS,
        seed=SEED,
        device=chosen.device,
        amp=True,
        amp_dtype="bf16",
        dataloader_pin_memory=True,
        compile="on" if compiled else "off",
        eval_steps=0,
        save_interval=0,
        panel=False,
        callbacks=[Watch()],
    )
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    phases = {name for row in rows for name in row if name.startswith("time/") and isinstance(row[name], float)}
    OWN_PHASES.append({name: statistics.median(row[name] for row in rows[WARM_UP:]) for name in sorted(phases)})
    OWN_PEAKS.append(max(row.get("memory/peak_device_mib", 0.0) for row in rows))
    return [row["sft/loss"] for row in rows], clock.seconds, clock.cpu


def trainer(model: Path, batches: list[Any], device: str, folder: Path, *, experts: str | None = None) -> Steps:
    """Train with transformers' Trainer and bf16=True."""
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
        use_cpu=device == "cpu",
        bf16=True,
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


def plain(model: Path, batches: list[Any], device: str, folder: Path, *, compiled: bool = False) -> Steps:
    """Train in plain torch."""
    import torch
    from peers.small_qwen3 import train

    del folder
    clock = Clock()
    how: dict[str, Any] = {"device": device, "autocast": torch.bfloat16, "compiled": compiled}
    return train(model, batches, RATE, BETAS, clock.step, **how), clock.seconds, clock.cpu


def new_model(case: str, text: Path, chosen: argparse.Namespace, folder: Path) -> Path:
    """A new decoder with a byte-pair tokenizer of the text, by a run whose step changes nothing that is kept."""
    import rft

    os.environ["RFT_CACHE"] = str(folder / "cache")
    settings = CASES[case] | {"vocab_size": 50_304, "tokenizer_size": 4096}
    if chosen.small:
        settings |= SMALL | {"vocab_size": 1024, "tokenizer_size": 1024}
    settings |= {"max_seq_len": chosen.context + 1, "max_len": chosen.context + 1, "train_batch_size": 1}
    given = {"data_store_path": str(folder / "tokens"), "panel": False, "device": chosen.device, "seed": SEED}
    given["micro_train_batch_size"] = 1
    rft.pretrain(str(text), save_path=str(folder / "made"), max_steps=1, eval_steps=0, **settings, **given)
    (found,) = (folder / "cache").rglob("model.safetensors")
    return found.parent


def operations(model: Path, context: int) -> tuple[float, int]:
    """(operations a token of forward and backward, parameters), by nanoGPT's count with the active experts alone."""
    from safetensors import safe_open

    config = json.loads((model / "config.json").read_text())
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    active = every = 0.0
    with safe_open(str(model / "model.safetensors"), "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # it is no mapping
            size = 1
            for extent in weights.get_slice(name).get_shape():
                size *= extent
            every += size
            share = config["num_experts_per_tok"] / num_experts if ".experts." in name else 1
            active += size * share
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    return 6 * active + 12 * config["num_hidden_layers"] * width * context, int(every)


def compare(case: str, text: Path, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Pass the gate, then take turns; the medians of all sides, and their ratios to ours."""
    import torch

    folder.mkdir()
    model = new_model(case, text, chosen, folder)
    batches = windows(model, text, chosen.steps, chosen, folder)
    device = chosen.device
    known: dict[str, Callable[[Path], Steps]] = {
        "ours": partial(ours, model, text, chosen),
        "ours_compiled": partial(ours, model, text, chosen, compiled=True),
        "torch": partial(plain, model, batches, device),
        "torch_compiled": partial(plain, model, batches, device, compiled=True),
        "trainer": partial(trainer, model, batches, device),
        "trainer_eager": partial(trainer, model, batches, device, experts="eager"),
    }
    names = ["ours", *(chosen.sides or [*SIDES[case], *(COMPILED[case] if chosen.compiled else [])])]
    rounds: dict[str, list[float]] = {name: [] for name in names}
    apart: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for turn in range(chosen.rounds):
        losses = {}
        # every other round backwards, so that what a side leaves behind is not always the same side's to bear
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            losses[name], taken, _ = known[name](folder / f"{name}_{turn}")
            rounds[name].append(statistics.median(taken[WARM_UP:]))
            # ours reads and restarts the peak at every step
            peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
            peaks[name] = max(peak, OWN_PEAKS[-1]) if name.startswith("ours") else peak
            print(case, turn, name, f"{1e3 * rounds[name][-1]:.2f} ms a step", flush=True)
        print({name: round(value, 4) for name, value in OWN_PHASES[-1].items() if value}, flush=True)
        if turn == 0:
            apart = {name: difference(losses["ours"], losses[name]) for name in names[1:]}
            if max(apart.values()) > WITHIN:
                print(f"gate of {case}: {losses}", flush=True)
    tokens = chosen.batch * chosen.context
    a_token, parameters = operations(model, chosen.context)
    found: dict[str, Any] = {"parameters": parameters, "operations_a_token": a_token, "sides": {}}
    for name in names:
        speed = tokens / statistics.median(rounds[name])
        row = found["sides"][name] = {
            "tokens_per_second": speed,
            "mfu": speed * a_token / PEAK,
            "peak_mib": peaks[name],
            "seconds_a_step": rounds[name],
        }
        if name != "ours":
            ratios = [theirs / mine for mine, theirs in zip(rounds["ours"], rounds[name], strict=True)]
            row |= {"ratio": statistics.median(ratios), "ratios": ratios, "largest_difference": apart[name]}
    return found


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    for name, value in {"steps": 24, "rounds": 3, "context": 1024, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--sides", nargs="+", help="beside ours, in place of all")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the program; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import torch

    source = Path(os.environ.get("RFT_DATA_DIR", "")) / "tinyshakespeare" / "input.txt"
    if not source.is_file():
        sys.exit(f"{source} is not there: RFT_DATA_DIR names the directory that holds tinyshakespeare/input.txt")
    found: dict[str, dict[str, Any]] = {}
    card = torch.cuda.get_device_name() if chosen.device == "cuda" else "none"
    facts = {"card": card, "packages": {name: version(name) for name in ("transformers", "torch", "rft")}}
    facts["arguments"] = {name: value for name, value in vars(chosen).items() if name != "output"}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(source.read_text() * (1 if chosen.small else TIMES))
        for case in chosen.cases:
            found[case] = compare(case, text, chosen, Path(folder) / case)
            for name, row in found[case]["sides"].items():
                line = f"{case:<8} {name:<14} {row['tokens_per_second']:9,.0f} tokens/s, MFU {row['mfu']:.3f}, "
                line += f"peak {row['peak_mib']:,.0f} MiB"
                if name != "ours":
                    line += f", ratio {row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}); "
                    line += f"losses within {row['largest_difference']:.1e}"
                print(line, flush=True)
            if not chosen.small:
                chosen.output.write_text(json.dumps({**facts, "cases": found}, indent=1) + "\n")
    ratio, side, case = min(
        (row["ratio"], name, case)
        for case, of in found.items()
        for name, row in of["sides"].items()
        if not name.startswith("ours")
    )
    print(f"worst_ratio={ratio:.2f} against {side} at {case}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
