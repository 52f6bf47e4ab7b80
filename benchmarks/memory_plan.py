"""The peak of memory that `rft-train plan` tells, beside the peak of the same steps on a GPU.

    python benchmarks/memory_plan.py [--cases pretrain_amp ...] [--device cuda] [--small]

Every case is a process of its own: the plan first (`rft-train plan COMMAND ... --gpu_memory 80`, traced on tensors
without values), then the run itself, three steps on rows that are as long as they may be. Measured is
`torch.cuda.max_memory_allocated` of the second and the third step (`memory/peak_device_mib` of the metrics), from the
end of a step to the end of the next, so that the optimizer's moments are there. The plan's number is the larger of its
peaks in training and in generation.
Models have random weights. `--small --device cpu` tries the program where there is no GPU: the plan alone is made, and
the run is checked to end. The last line is `largest_gap=<x> at <case>`: |plan / measured - 1|.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "memory_plan_gpu.json"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = 3
MIB = 2**20

Sizes = dict[str, Any]
DENSE: Sizes = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "ffn": 2048, "vocab": 50_304}
LARGE: Sizes = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "ffn": 3072, "vocab": 151_936}
MIXTURE: Sizes = {"hidden": 768, "layers": 6, "heads": 12, "kv_heads": 4, "ffn": 1024, "vocab": 50_304, "experts": 8}
SMALL: Sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512}

PRETRAIN = {"context": 1024, "micro": 8, "batch": 16}
CASES: dict[str, dict[str, Any]] = {
    "pretrain_float32": {"command": "pretrain", "model": DENSE, **PRETRAIN, "settings": {}},
    "pretrain_amp": {"command": "pretrain", "model": DENSE, **PRETRAIN, "settings": {"amp": True}},
    "pretrain_one_batch": {
        "command": "pretrain", "model": DENSE, "context": 1024, "micro": 16, "batch": 16, "settings": {"amp": True},
    },
    "pretrain_bf16": {"command": "pretrain", "model": DENSE, **PRETRAIN, "settings": {"bf16": True}},
    "pretrain_master_copy": {"command": "pretrain", "model": DENSE, **PRETRAIN, "settings": {"use_mp_opt": True}},
    "pretrain_recomputed": {
        "command": "pretrain", "model": DENSE, **PRETRAIN, "settings": {"amp": True, "gradient_checkpointing": True},
    },
    "pretrain_mixture": {"command": "pretrain", "model": MIXTURE, **PRETRAIN, "settings": {"amp": True}},
    "sft_bf16": {
        "command": "sft", "model": LARGE, "context": 2048, "micro": 4, "batch": 8, "settings": {"bf16": True},
    },
    "sft_lora": {
        "command": "sft", "model": LARGE, "context": 2048, "micro": 4, "batch": 8,
        "settings": {"bf16": True, "lora_rank": 16},
    },
    "sft_chunked_head": {
        "command": "sft", "model": LARGE, "context": 2048, "micro": 4, "batch": 8,
        "settings": {"bf16": True, "fused_linear_logprob": True, "chunk_size": 512},
    },
    "dpo_bf16": {
        "command": "dpo", "model": LARGE, "context": 1024, "micro": 2, "batch": 4, "settings": {"bf16": True},
    },
    "rl_bf16": {
        "command": "rl", "model": DENSE, "context": 512, "micro": 16, "batch": 64, "settings": {"bf16": True},
    },
}  # fmt: skip


def make_model(sizes: Sizes, positions: int, folder: Path) -> Path:
    """A Qwen3 decoder, or a mixture of its experts, over letters; the vocabulary is larger than the tokenizer's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rft_models.tiny_models.text import build_character_tokenizer

    widths = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["hidden"] // sizes["heads"],
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    kind = "qwen3"
    if sizes.get("experts"):
        kind = "qwen3_moe"
        widths |= {"num_experts": sizes["experts"], "num_experts_per_tok": 2, "moe_intermediate_size": sizes["ffn"]}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **widths))
    model.cpu().save_pretrained(folder)
    build_character_tokenizer(LETTERS).save_pretrained(folder)
    return folder


def make_data(case: dict[str, Any], folder: Path) -> Path:
    """Rows as long as they may be, no two alike."""
    length, batch = case["context"], case["batch"]

    def text(number: int, size: int) -> str:
        return "".join(LETTERS[(number + place * (1 + number % 7)) % len(LETTERS)] for place in range(size))

    rows: list[dict[str, Any]] = []
    for number in range(batch * (STEPS + 1)):
        if case["command"] == "pretrain":
            rows.append({"text": text(number, 2 * (length + 1))})
        elif case["command"] == "sft":
            rows.append({"input": text(number, 1), "output": text(number, length - 2)})
        elif case["command"] == "dpo":
            answers = {name: text(number + k, length - 2) for k, name in enumerate(("chosen", "rejected"))}
            rows.append({"input": text(number, 1), **answers})
        else:
            rows.append({"input": text(number, length // 2), "label": "1"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of(case: dict[str, Any], model: Path, data: Path, folder: Path, device: str) -> dict[str, Any]:
    """The settings of the run and of its plan, by their flat names."""
    length = case["context"]
    given: dict[str, Any] = {
        "pretrain": str(model),
        "prompt_data": str(data),
        "save_path": str(folder / "run"),
        "device": device,
        "train_batch_size": case["batch"],
        "micro_train_batch_size": case["micro"],
        "eval_steps": 0,
        "max_steps": STEPS + 1,
        "dataloader_pin_memory": True,
        "seed": 0,
    }
    if case["command"] == "pretrain":
        given |= {"max_len": length + 1, "data_store_path": str(folder / "tokens"), "save_interval": 0}
    elif case["command"] in ("sft", "dpo"):
        given |= {"max_len": length, "save_steps": 0}
    else:
        samples = 8
        given |= {
            "prompt_max_len": length // 2,
            "generate_max_len": length // 2,
            "rollout_batch_size": case["batch"] // samples,
            "n_samples_per_prompt": samples,
            "micro_rollout_batch_size": case["micro"],
            "save_steps": 0,
        }
    return given | case["settings"]


def plan(command: str, given: dict[str, Any]) -> dict[str, Any]:
    """What the command says."""
    words = [sys.executable, "-m", "rft_cli.main", "plan", command, "--gpu_memory", "80", "--json"]
    for name, value in given.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


class _Measured(Exception):
    """The steps are done, and the last checkpoint is not needed."""


def measure(command: str, given: dict[str, Any], device: str) -> dict[str, Any]:
    """Run the steps; the largest peak of the second and the third."""
    import rft

    peaks: list[float] = []

    class Watch(rft.Callback):
        def on_step(self, run: rft.Run, step: int, metrics: Any) -> None:
            if device == "cuda" and step > 1:
                peaks.append(metrics["memory/peak_device_mib"] * MIB)
            if step == STEPS and peaks:
                raise _Measured

    given = dict(given)
    model, data = given.pop("pretrain"), given.pop("prompt_data")
    more: dict[str, Any] = {"callbacks": [Watch()], "panel": False}
    ended: dict[str, Any] = {}
    try:
        if command == "pretrain":
            rft.pretrain(data, model=model, **more, **given)
        elif command == "rl":
            rft.rl(model, data, rewarded, **more, **given)
        else:
            {"sft": rft.sft, "dpo": rft.dpo}[command](model, data, **more, **given)
    except Exception as error:
        # what ends a run behind its last measured step is in the results, and takes no measurement with it
        if len(peaks) < STEPS - 1:
            raise
        ended = {"ended_with": f"{type(error).__name__}: {error}"}
    return {"measured": max(peaks), **ended} if peaks else ended


def rewarded(completion: str) -> float:
    """A number that differs between texts."""
    return len(set(completion)) / len(LETTERS)


def work(name: str, chosen: argparse.Namespace) -> None:
    """One case: the plan and the run; a line of JSON."""
    case = dict(CASES[name])
    if chosen.small:
        case |= {"model": {**case["model"], **SMALL, "layers": min(case["model"]["layers"], 6)}}
        case |= {"context": 64, "micro": max(case["micro"] // 4, 1), "batch": max(case["batch"] // 4, 2)}
        case["batch"] = 16 if case["command"] == "rl" else case["batch"]
    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        model = make_model(case["model"], case["context"] + 8, folder / "model")
        given = settings_of(case, model, make_data(case, folder), folder, chosen.device)
        told = plan(case["command"], given)
        row: dict[str, Any] = {"case": name, "planned": max(told["training_bytes"], told["rollout_bytes"])}
        row |= {"in_training": told["training_bytes"], "in_generation": told["rollout_bytes"]}
        row |= {"terms": told.get("terms") or told.get("memory"), "notes": told.get("notes")}
        row |= {"shape": {key: value for key, value in case.items() if key != "command"}, "command": case["command"]}
        row |= measure(case["command"], given, chosen.device)
    print("\n" + json.dumps(row), flush=True)


def run_case(name: str, *, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """One case in a process of its own; None where it fails, with its last words printed."""
    words = [sys.executable, __file__, "--work", name, "--device", chosen.device] + ["--small"] * chosen.small
    try:
        ended = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=chosen.seconds,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired as error:
        print(f"{name}: no end within {chosen.seconds:g} s\n{str(error.stdout)[-1500:]}", flush=True)
        return None
    if ended.returncode:
        print(f"{name}: ended with {ended.returncode}\n{ended.stdout[-3000:]}", flush=True)
        return None
    return json.loads(ended.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the program; writes no file")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time; the card has to hold them all")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a case, at most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.work:
        work(chosen.work, chosen)
        return 0
    import torch

    rows: list[dict[str, Any]] = []
    card = torch.cuda.get_device_name() if chosen.device == "cuda" else "none"
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for name, row in zip(chosen.cases, pool.map(partial(run_case, chosen=chosen), chosen.cases), strict=True):
            if row is None:
                continue
            rows.append(row)
            line = f"{name:<22} planned {row['planned'] / MIB:9.1f} MiB"
            if "measured" in row:
                row["ratio"] = row["planned"] / row["measured"]
                line += f", measured {row['measured'] / MIB:9.1f} MiB, ratio {row['ratio']:.3f}"
            print(line, flush=True)
            if not chosen.small:
                facts = {"card": card, "torch": torch.__version__, "steps": STEPS, "cases": rows}
                chosen.output.write_text(json.dumps(facts, indent=1) + "\n")
    measured = [row for row in rows if "ratio" in row]
    if measured:
        gap, case = max((abs(row["ratio"] - 1), row["case"]) for row in measured)
        print(f"largest_gap={gap:.3f} at {case}")
    return 0 if len(rows) == len(chosen.cases) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
