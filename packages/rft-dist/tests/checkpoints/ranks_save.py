"""The program of one rank: saves at once and beside training over gloo, and loads what it needs of another's save."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from rft_core.errors import RftError
from rft_dist.checkpoint_format.shards import Shard, ShardRequest
from rft_dist.checkpoints.async_writer import BackgroundSaves
from rft_dist.checkpoints.rank_exchange import StoreExchange
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.launch.process_group import ranks_from_environment, start_process_group, stop_process_group

ROWS, COLUMNS = 10, 6


def state(step: int) -> Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * step


def rows_of(rank: int, world_size: int) -> tuple[int, int]:
    size = -(-ROWS // world_size)
    return min(rank * size, ROWS), min((rank + 1) * size, ROWS)


class Columns:
    """Wants some columns of a tensor that was saved by rows."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.start = COLUMNS * rank // world_size
        self.end = COLUMNS * (rank + 1) // world_size
        self.got: list[Tensor] = []

    def shard_requests(self) -> list[ShardRequest]:
        shape = (ROWS, self.end - self.start)
        return [ShardRequest("w", (ROWS, COLUMNS), torch.float32, (0, self.start), shape)]

    def write(self, name: str, start: tuple[int, ...], tensor: Tensor) -> None:
        self.got.append(tensor)


def main() -> None:
    folder = Path(sys.argv[1])
    collectives = start_process_group(ranks_from_environment(), torch.device("cpu"))
    rank, size = collectives.rank, collectives.world_size
    first, end = rows_of(rank, size)

    def parts(step: int) -> dict[str, list[Shard]]:
        block = state(step)[first:end].clone()
        return {"optimizer": [Shard("w", (ROWS, COLUMNS), (first, 0), block)] if len(block) else []}

    def open_store(exchange) -> CheckpointStore:
        return CheckpointStore(folder, keep_last=2, keep_bytes=None, run_id="r", exchange=exchange)

    records = {"ledger": {"n": 1}}
    now = open_store(collectives).save(
        1, tensors=parts(1), records=records, model_writer=lambda _: None, metadata={}, model_tensors={}
    )
    beside = StoreExchange.beside(collectives, timeout=60)
    saves = BackgroundSaves(open_store(beside))
    sums = []
    for step in (2, 3):
        given = parts(step)
        weights = {f"w{rank}": torch.full((2,), float(rank))}
        saves.begin(
            step,
            tensors=given,
            records=records,
            snapshot=lambda _: lambda path: (path / "config.json").write_text("{}") and None,
            metadata={},
            model_tensors=weights,
        )
        for shard in given["optimizer"]:
            shard.data.zero_()
        sums += [float(collectives.sum(torch.tensor([float(rank)]))) for _ in range(50)]  # while the thread exchanges
    last = saves.wait()
    sink = Columns(rank, size)
    found = open_store(collectives).open(3).load("optimizer", sink)
    error = ""
    try:  # rank 0 alone gives a record that JSON cannot hold
        wrong = {"ledger": {"n": float("nan")}} if rank == 0 else records
        open_store(collectives).save(4, tensors=parts(4), records=wrong, model_writer=lambda _: None, metadata={})
    except RftError as caught:
        error = caught.problem.what
    result = {
        "now": now.step,
        "last": last.step if last else None,
        "sums": sorted(set(sums)),
        "loaded": found,
        "right": bool(torch.equal(sink.got[0], state(3)[:, sink.start : sink.end])) if sink.got else None,
        "error": error,
        "steps": [info.step for info in open_store(collectives).list()],
    }
    (folder.parent / f"rank_{rank}.json").write_text(json.dumps(result))
    collectives.gather_bytes(b"")  # rank 0 serves the store until all are done with it
    stop_process_group()


if __name__ == "__main__":
    main()
