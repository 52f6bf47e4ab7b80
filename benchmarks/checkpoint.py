"""How long a save holds training up: written at once, written beside training, and by others.

    python benchmarks/checkpoint.py [--mib 64 256 1024] [--rounds 5] [--threads 1] [--directory DIR]

The state is that of AdamW: weights and two moments in float32, in matrices of 4 MiB and small vectors.
Sides: `sync` is `CheckpointStore.save`; `async` is `BackgroundSaves.begin` (its stall; and the whole time
until the checkpoint is on the disk and verified); `safetensors` is the library's `save_file` with one fsync;
`dcp` and `dcp async` are those of torch.distributed.checkpoint. No peer hashes, renames or reads back. Before
any timing the files of `sync` and `async` have the same SHA-256. Sides take turns; medians. The physical floors: one
memory copy of the state for the stall, one write with fsync for the save. The last line is
`worst_ratio=<x> against <peer> at <case>`: the peer's stall over that of `async`, the first save, which
makes the buffers, left out and shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint import state_dict_saver as saver

from rft_dist.checkpoint_format.file_operations import write_file
from rft_dist.checkpoint_format.safetensors_pieces import file_pieces
from rft_dist.checkpoints.async_writer import BackgroundSaves, Copy
from rft_dist.checkpoints.reader import open_verified
from rft_dist.checkpoints.store import CheckpointStore

RESULTS = Path(__file__).resolve().parent / "results" / "checkpoint.json"
MATRIX, VECTOR = (1024, 1024), (1024,)
PEERS = ("sync", "safetensors", "dcp", "dcp async")
LIMIT = 0.05
"""The stall of a save beside training, as a share of a save at once."""


class State:
    """Weights and moments of `mib` MiB, changed in place by `train` as an update would."""

    def __init__(self, mib: int) -> None:
        generator = torch.Generator().manual_seed(0)
        count = max(mib // 12, 1)
        self.weights = {f"layers.{i}.weight": torch.randn(MATRIX, generator=generator) for i in range(count)}
        self.weights |= {f"layers.{i}.norm": torch.ones(VECTOR) for i in range(count)}
        self.moments = {
            f"{kind}/{name}": torch.rand(value.shape, generator=generator)
            for kind in ("exp_avg", "exp_avg_sq")
            for name, value in self.weights.items()
        }
        self.num_bytes = sum(t.numel() * t.element_size() for t in (*self.weights.values(), *self.moments.values()))

    def train(self) -> None:
        """A change, so that no side finds the bytes of its save before."""
        for tensor in (*self.weights.values(), *self.moments.values()):
            tensor.mul_(0.999)

    def everything(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {**self.weights, **self.moments}

    def snapshot(self, copy: Copy) -> Callable[[Path], None]:
        """What writes the model's directory."""
        weights = {name: copy(name, tensor) for name, tensor in self.weights.items()}

        def write(directory: Path) -> None:
            write_file(directory / "model.safetensors", file_pieces(weights, {"format": "pt"}))

        return write


def save_now(store: CheckpointStore, state: State, step: int) -> None:
    """The save that training waits for."""
    store.save(
        step,
        tensors={"optimizer": state.moments},
        records={"progress": {"step": 1}},
        model_writer=state.snapshot(lambda _, tensor: tensor),
        metadata={},
    )


def begin(saves: BackgroundSaves, state: State, step: int) -> None:
    """The save that training does not wait for."""
    parts = {"optimizer": state.moments}
    saves.begin(step, tensors=parts, records={"progress": {"step": 1}}, snapshot=state.snapshot, metadata={})


def seconds(work: Callable[[], object]) -> float:
    """Wall time of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def library_save(state: State, directory: Path) -> None:
    """One file, flushed."""
    save_file(state.everything(), directory / "state.safetensors")
    with (directory / "state.safetensors").open("rb") as stream:
        os.fsync(stream.fileno())


def memory_copy(state: State, buffers: dict[str, Tensor]) -> None:
    """The floor of a stall."""
    for name, tensor in state.everything().items():
        buffers[name].copy_(tensor)


def plain_write(state: State, directory: Path) -> None:
    """The floor of a save: the bytes, once, flushed."""
    with (directory / "plain").open("wb", buffering=0) as stream:
        for tensor in state.everything().values():
            stream.write(tensor.numpy().data)
        os.fsync(stream.fileno())


def gate(state: State, home: Path) -> None:
    """Both ways write the same bytes, also when training goes on meanwhile."""
    opened = [CheckpointStore(home / name, keep_last=1, keep_bytes=None, run_id="b") for name in ("a", "b")]
    save_now(opened[0], state, 1)
    saves = BackgroundSaves(opened[1])
    begin(saves, state, 1)
    state.train()
    saves.wait()
    files = [open_verified(home / name / "step_000001").manifest.files for name in ("a", "b")]
    assert files[0] == files[1], "the two ways write different bytes"
    print(f"gate: {len(files[0])} files, the same SHA-256 both ways while training changes the state")


def measure(state: State, home: Path, rounds: int) -> dict[str, Any]:
    """Times of every side, in turns."""
    now = CheckpointStore(home / "now", keep_last=1, keep_bytes=None, run_id="b")
    saves = BackgroundSaves(CheckpointStore(home / "beside", keep_last=1, keep_bytes=None, run_id="b"))
    other = home / "other"
    other.mkdir()
    buffers = {name: torch.zeros_like(tensor) for name, tensor in state.everything().items()}
    first = seconds(lambda: begin(saves, state, 1))
    saves.wait()
    times: dict[str, list[float]] = {}
    for number in range(2, rounds + 2):
        state.train()
        found = {"sync": seconds(lambda n=number: save_now(now, state, n))}
        found["async"] = seconds(lambda n=number: begin(saves, state, n))
        found["async whole"] = found["async"] + seconds(saves.wait)
        found["safetensors"] = seconds(lambda: library_save(state, other))
        place = other / f"d{number}"
        found["dcp"] = seconds(lambda p=place: saver.save(state.everything(), checkpoint_id=p))
        start = time.perf_counter()
        future: Any = saver.async_save(state.everything(), checkpoint_id=other / f"e{number}")
        found["dcp async"] = time.perf_counter() - start
        future.result()
        found["copy"] = seconds(lambda: memory_copy(state, buffers))
        found["write"] = seconds(lambda: plain_write(state, other))
        for folder in other.glob("[de]*"):
            shutil.rmtree(folder)
        for name, value in found.items():
            times.setdefault(name, []).append(value)
    return {"seconds": times, "first stall": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)  # DCP's asynchronous form asks
    results: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    results |= {"threads": options.threads, "rounds": options.rounds, "cases": {}}
    worst: tuple[float, str, str] = (float("inf"), "", "")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        gate(State(24), Path(folder))
        print(f"{'state':>9} {'side':<12} {'median s':>9} {'of sync':>8}   ({options.rounds} rounds)")
        for mib in options.mib:
            state, home = State(mib), Path(folder) / f"{mib}"
            home.mkdir()
            found = measure(state, home, options.rounds)
            medians = {name: statistics.median(values) for name, values in found["seconds"].items()}
            for name, value in {**medians, "first stall": found["first stall"]}.items():
                print(f"{mib:>5} MiB {name:<12} {value:>9.4f} {value / medians['sync']:>8.3f}")
            worst = min(worst, *((medians[peer] / medians["async"], peer, f"{mib} MiB") for peer in PEERS))
            share = medians["async"] / medians["sync"]
            results["cases"][f"{mib} MiB"] = found | {"medians": medians, "stall of sync": share, "met": share < LIMIT}
            shutil.rmtree(home)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    shares = ", ".join(f"{name} {case['stall of sync']:.3f}" for name, case in results["cases"].items())
    print(f"stall as a share of a save at once (limit {LIMIT}): {shares}")
    dist.destroy_process_group()
    print(f"worst_ratio={worst[0]:.2f} against {worst[1]} at {worst[2]}")


if __name__ == "__main__":
    main()
