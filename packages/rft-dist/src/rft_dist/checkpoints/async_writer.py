"""Asynchronous saving: the state is copied while training waits, and written in a background thread.

Nothing about a checkpoint changes: the thread calls `CheckpointStore.save`, so it is staged,
published, verified and only then counted. What changes is when one knows: an error of the writing
is raised at the next call, a step boundary, a save or the end of the run, and until then the
checkpoints before it stand. One save is under way at a time: the next waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_core.fault_points import declare, fault_point
from rft_core.host_memory import free_host_memory
from rft_dist.checkpoint_format.safetensors_pieces import num_tensor_bytes
from rft_dist.checkpoint_format.shards import Shard, shards_of
from rft_dist.checkpoints.host_copies import RESERVE_BYTES, HostCopies
from rft_dist.checkpoints.storage_errors import gib
from rft_dist.checkpoints.store import CheckpointInfo, CheckpointStore, Tensors
from rft_dist.checkpoints.writer import encode_record

_LOG = logging.getLogger(__name__)

Copy = Callable[[str, Tensor], Tensor]
"""Name and tensor to a copy of the tensor."""
Snapshot = Callable[[Copy], Callable[[Path], None]]
"""Copies the model's weights through the function that it is given, and gives what writes its directory from them."""

POINT_COPIED = declare("background_save.copied", "the state is copied, and the thread that writes it is about to start")
POINT_WRITTEN = declare("background_save.written", "the thread has written a checkpoint, and nobody was told")


class BackgroundSaves:
    """Saves through a store, in a thread.

    Example::

        saves = BackgroundSaves(store)
        saves.begin(100, tensors={"optimizer": optimizer.checkpoint_tensors()}, records={"ledger": ledger},
                    snapshot=policy.snapshot, metadata={})
        ...                 # training goes on
        saves.wait()        # the checkpoint is on the disk and verified, or its error is raised

    With several ranks the store's exchange must be one that training does not use
    (`rank_exchange.StoreExchange`): the order of two threads' collectives differs from rank to rank.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done: CheckpointInfo | None = None
        self._has_warned = False

    def begin(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensors],
        records: Mapping[str, Any],
        snapshot: Snapshot,
        metadata: Mapping[str, Any],
        model_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Wait for the save before, copy the state, and start to write it.

        Raises the error of the save before, and CheckpointError for a record that is no JSON. Where
        the host's memory does not hold the copies the save is done at once, which is said once.
        """
        # first: until the save before has ended, its thread reads the buffers that are written below
        self.wait()
        shards = {name: shards_of(part) for name, part in tensors.items()}
        if not self._has_room(shards, model_tensors or {}):
            writer = snapshot(lambda _, tensor: tensor.detach()) if self._store.is_first else _nothing
            self._done = self._store.save(
                step,
                tensors=shards,
                records=records,
                model_writer=writer,
                metadata=metadata,
                model_tensors=model_tensors,
            )
            return
        directory = self._store.directory
        # records are encoded before the thread starts: training changes them while it writes
        encoded = {name: encode_record(name, value, step=step, directory=directory) for name, value in records.items()}
        copies = self._copies
        copies.begin()
        copied = {name: [copies.copy_shard(name, shard) for shard in part] for name, part in shards.items()}
        weights = {name: copies.copy(f"model/{name}", value) for name, value in (model_tensors or {}).items()}
        writer: Callable[[Path], None] = _nothing  # rank 0 writes the model's directory
        if self._store.is_first:
            writer = snapshot(lambda name, tensor: copies.copy(f"model/{name}", tensor.detach()))
        # before training goes on and changes what is being copied
        copies.finish()
        fault_point(POINT_COPIED)
        what = dict(tensors=copied, records=encoded, model_writer=writer, metadata=dict(metadata))
        chosen = None if model_tensors is None else weights
        # A daemon: a run that is told to stop at once leaves what a kill would leave, and does not wait for the disk.
        self._thread = threading.Thread(target=self._write, args=(step, what, chosen), daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True where the save that was begun last has ended with an error, which `wait` raises."""
        return self._error is not None

    def wait(self) -> CheckpointInfo | None:
        """Wait until nothing is being written; return the last save, None where there was none; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # taken out: an error is raised once, and the save after it may succeed
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._done

    def _write(self, step: int, what: dict[str, Any], model_tensors: Mapping[str, Tensor] | None) -> None:
        try:
            self._done = self._store.save(step, model_tensors=model_tensors, **what)
            fault_point(POINT_WRITTEN)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, in the thread that trains
            self._error = error

    def _has_room(self, shards: Mapping[str, Sequence[Shard]], model_tensors: Mapping[str, Tensor]) -> bool:
        """Return whether host memory holds the copies, the model's own estimated at half of the others."""
        free = free_host_memory()
        if free is None:
            return True
        own = [shard.data for part in shards.values() for shard in part] + list(model_tensors.values())
        num_bytes = sum(map(num_tensor_bytes, own))
        # the buffers of the save before are used again and take no more memory
        need = max(num_bytes + num_bytes // 2 - self._copies.num_bytes, 0)
        if need + RESERVE_BYTES <= free:
            return True
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("saves wait for the disk: a copy needs %s of memory, %s are free", gib(need), gib(free))
        return False


def _nothing(_: Path) -> None:
    """Write nothing: the model writer of every rank but rank 0."""
