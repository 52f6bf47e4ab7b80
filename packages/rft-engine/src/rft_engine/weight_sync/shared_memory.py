"""Weight snapshots in shared memory, by version: loaded by replicas, and loaded again after a restart.

The trainer goes on changing its parameters while replicas draw. A version is therefore copied once, in
the engine's type, into a file (shared memory where there is room), and stays until no replica can need it:
a replica that dies is started again with exactly the weights that it had. Each holds one digest a tensor,
which every replica answers with after a load. A set takes as much memory as the weights; up to
`max_staleness + 1` sets are held where sequences finish under the version they began with, else two.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rft_engine.weight_sync.fingerprints import Fingerprint, WeightProvider, element_digest
from rft_engine.weight_sync.private_folder import remove_empty_folders
from rft_engine.weight_sync.weight_file import own_path, read_weight_file, write_weight_file


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """One version of the weights in shared memory."""

    version: int
    path: Path
    digests: Fingerprint
    num_bytes: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors, mapped."""
        yield from read_weight_file(self.path).items()


class SharedWeightStore:
    """Sets of weights by version. One thread puts, another takes and drops.

    Example::

        weight_store = SharedWeightStore(policy.named_parameters, torch.float32, num_bytes=4 * policy.num_parameters)
        weight_store.put(3)
        replica.load(weight_store.get(3))
    """

    def __init__(
        self,
        provider: WeightProvider,
        dtype: torch.dtype,
        *,
        num_bytes: int,
        together: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Make an empty store.

        Args:
            provider: called at every `put`: the policy's present tensors, whole, under their names.
            dtype: of the engine's floating-point tensors.
            num_bytes: of one version, about: decides where the first one is put; later ones go by what was written.
            together: calls what it is given while all ranks do, where `provider` is an exchange of theirs.
        """
        self._provider, self._dtype = provider, dtype
        self._together = together or _call_directly
        self._sets: dict[int, WeightSnapshot] = {}
        self._lock = threading.Lock()
        self._num_bytes, self._num_tensors = num_bytes, 1000
        self._serial = 0
        atexit.register(self.close)

    @property
    def versions(self) -> list[int]:
        """Versions in the store, ascending."""
        with self._lock:
            return sorted(self._sets)

    def put(self, version: int) -> WeightSnapshot:
        """Copy the policy's present tensors; a version that is there is replaced.

        Raises:
            StorageError: there is no room for them.
        """
        digests: Fingerprint = {}

        def converted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._provider():
                value = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
                digests[name] = element_digest(value, value.shape, value.dtype)
                yield name, value

        # a new file name each time: replicas may still map the old file of the same version
        self._serial += 1
        path = own_path(f"weights-{id(self):x}-{version}-{self._serial}", 2 * self._num_bytes)

        def copy() -> None:
            self._num_bytes = write_weight_file(path, converted(), self._num_tensors)

        try:
            self._together(copy)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._num_tensors = 2 * len(digests)
        # listed when it is whole: `get` must not hand out a file that is being written
        snapshot = WeightSnapshot(version, path, digests, self._num_bytes)
        with self._lock:
            old = self._sets.get(version)
            self._sets[version] = snapshot
        if old is not None:
            # a replica that has mapped it reads on; the pages go with the last mapping
            old.path.unlink(missing_ok=True)
        return snapshot

    def get(self, version: int) -> WeightSnapshot:
        """A version that was put and not dropped."""
        with self._lock:
            assert version in self._sets, f"version {version} is not among {sorted(self._sets)}"
            return self._sets[version]

    def drop_below(self, version: int) -> None:
        """Give the memory of older versions back."""
        with self._lock:
            gone = [self._sets.pop(old) for old in sorted(self._sets) if old < version]
        for snapshot in gone:
            snapshot.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all versions. Does nothing the second time."""
        atexit.unregister(self.close)
        with self._lock:
            gone, self._sets = list(self._sets.values()), {}
        for snapshot in gone:
            snapshot.path.unlink(missing_ok=True)
        remove_empty_folders()


def _call_directly(call: Callable[[], None]) -> None:
    """Run the call where no other rank takes part."""
    call()
