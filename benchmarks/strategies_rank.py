"""One rank of `strategies.py`: FOLDER DEVICE STEPS NAMES... -> FOLDER/<ranks>_<rank>.json, figures by case."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from strategies_cases import CASES, Case
from torch import Tensor

from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_core.packed_tokens import PackedTokens
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group
from rft_dist.planning.live_bytes import LiveBytes
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.dtensor_shards import local
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import AdapterSettings, ModelSettings
from rft_models.tokenization.tokenizer import load_tokenizer

VOCABULARY, ROWS, LENGTH, NUM_MICRO_BATCHES = 2048, 2, 32, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
RATE = 1e-4


def main() -> None:
    """Every named case, one after another, in this process."""
    folder, device, steps, names = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    info = ranks_from_environment()
    ranks = start_process_group(info, torch.device(device))
    machine = Machine(device, info, ranks)
    source = folder / "model"
    if ranks.rank == 0 and not source.exists():
        _make_model(source)
    ranks.gather_bytes(b"")
    found: dict[str, Any] = {}
    for case in (case for case in CASES if case.name in names):
        found[case.name] = _measure(case, source, machine, steps)
        gc.collect()
        if ranks.rank == 0:
            print(f"{case.name}: {found[case.name]['milliseconds']:.0f} ms", flush=True)
    (folder / f"{ranks.world_size}_{ranks.rank}.json").write_text(json.dumps(found))
    ranks.gather_bytes(b"")
    stop_process_group()
    sys.stdout.flush()
    os._exit(0)


def _make_model(path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from rft_models.tiny_models.text import build_character_model

    build_character_model(path, hidden=32, layers=1, heads=2, ffn=32, kv_heads=1)  # for its tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES))
    model.save_pretrained(path)


def _measure(case: Case, source: Path, machine: Machine, steps: int) -> dict[str, float]:
    """Bytes in the second step, of which the first has made the moments, and the median time of later ones."""
    torch.manual_seed(0)
    with LiveBytes(torch.device(machine.device).type, full=True) as live:
        spread = _spread(case, source, machine)
        loading = live.peak
        batches = _own_batches(spread, machine.device)
        norm = _step(spread, batches)
        gc.collect()
        description = _bytes_of_a_step(spread, batches, live)
    times = []
    for _ in range(1 if "fp16" in case.strategy and machine.device == "cpu" else steps):  # emulated there
        machine.collectives.gather_bytes(b"")
        start = time.perf_counter()
        _step(spread, batches)
        if machine.device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return description | {"loading": loading, "norm": norm, "milliseconds": statistics.median(times)}


def _spread(case: Case, source: Path, machine: Machine) -> ParallelModel[CausalPolicy]:
    """As `rft-train` does."""
    settings = ModelSettings(pretrain=str(source), **case.model)
    strategy = StrategySettings(**case.strategy)
    policy = trainable_policy(settings, strategy, source, machine, load_tokenizer(source), AdapterSettings())
    return parallelize(ShardablePolicy(policy), strategy, AdamSettings(), machine, None)


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def _own_batches(spread: ParallelModel[CausalPolicy], device: str) -> list[Batch]:
    """This rank's micro-batches; all ranks together have the same ones in every case."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (NUM_MICRO_BATCHES, ROWS * LENGTH), generator=generator)
    places = torch.arange(LENGTH).repeat(ROWS)
    segments = torch.arange(ROWS).repeat_interleave(LENGTH)
    wanted = torch.ones(ROWS * LENGTH, dtype=torch.bool)
    own = tokens[spread.data.rank :: spread.data.world_size]
    return [tuple(part.to(device) for part in (row, places, segments, wanted)) for row in own]  # pyright: ignore[reportReturnType]


def _loss(spread: ParallelModel[CausalPolicy], batch: Batch) -> Tensor:
    logprobs_T, _ = spread.model.token_logprobs(PackedTokens(*batch))
    return -logprobs_T.sum() / (NUM_MICRO_BATCHES * ROWS * LENGTH)


def _step(spread: ParallelModel[CausalPolicy], batches: list[Batch]) -> float:
    for number, batch in enumerate(batches, start=1):
        spread.optimizer.backward(_loss(spread, batch), last=number == len(batches))
    return float(spread.optimizer.step(RATE).gradient_norm)


def _bytes_of_a_step(spread: ParallelModel[CausalPolicy], batches: list[Batch], live: LiveBytes) -> dict[str, float]:
    """What stays, what a forward keeps, what the backward passes leave, and the most at once."""
    resident = live.now
    parameters = _held(spread, live)
    live.forget_peak()
    activations = 0
    for number, batch in enumerate(batches, start=1):
        before = live.now
        loss = _loss(spread, batch)
        activations = max(activations, live.now - before)
        spread.optimizer.backward(loss, last=number == len(batches))
        del loss
    gradients = live.now - resident
    spread.optimizer.step(RATE)
    return {
        "parameters": parameters,
        "optimizer": resident - parameters,
        "gradients": gradients,
        "activations": activations,
        "peak": live.peak,
    }


def _held(spread: ParallelModel[CausalPolicy], live: LiveBytes) -> int:
    """Bytes of the weights that this rank keeps between two steps, on the device that is counted."""
    parts: list[Tensor] = []
    for _, parameter in spread.model.named_parameters():
        parts.append(getattr(parameter, "ds_tensor", local(parameter.detach())))
    return sum(part.numel() * part.element_size() for part in parts if part.device.type == live.device_type)


if __name__ == "__main__":
    main()
