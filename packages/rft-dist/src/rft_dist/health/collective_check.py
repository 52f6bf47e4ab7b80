"""Check of every collective against that of rank 0 before it is joined: a mismatch would add wrong numbers silently.

gloo adds tensors of unequal shapes without an error, and a rank that leaves out one collective takes part in
the next one under the wrong number. Rank 0 publishes what it is about to join; every other rank waits for that,
which it would do in the collective anyway, and compares.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from rft_core.errors import PeerError
from rft_dist.health.activity import Activity, Call
from rft_dist.health.diagnosis import mismatch

_KEPT = 4096
"""How far rank 0 may be ahead: a broadcast does not wait for those who receive it."""
_WAIT = timedelta(days=7)


class FingerprintCheck:
    """Compares the collectives of the first `steps` steps, or all of them with `always`.

    The number of steps is that of this process, and steps end between the same collectives on all ranks.
    """

    def __init__(self, store: Store, activity: Activity, *, rank: int, steps: int, always: bool) -> None:
        self._store, self._activity, self._rank = store, activity, rank
        self._steps, self._always = steps, always

    @property
    def is_on(self) -> bool:
        """True where the next collective is compared."""
        return self._always or self._activity.steps_done < self._steps

    def compare(self, call: Call) -> None:
        """Raises PeerError, naming both calls, where rank 0 is about to join another collective."""
        if not self.is_on:
            return
        if self._rank == 0:
            self._publish(call)
            return
        first = self._read(call.number)
        if not first.matches(call):
            cause = mismatch(0, first.describe(), self._rank, call.describe())
            raise PeerError(
                code="collective.mismatch",
                what=cause.what,
                where=cause.where,
                why=cause.why,
                state="this step is lost; no wrong number was used; the last checkpoint is untouched",
                do="make both ranks take the same path through the program at these two lines",
            )

    def _publish(self, call: Call) -> None:
        text = "\n".join((call.name, ",".join(map(str, call.shape)), call.dtype, call.site))
        self._store.set(f"call/{call.number}", text)
        # or else the store would grow with every collective of a long run
        if call.number > _KEPT:
            self._store.delete_key(f"call/{call.number - _KEPT}")

    def _read(self, number: int) -> Call:
        key = f"call/{number}"
        self._store.wait([key], _WAIT)  # rank 0 may be in a long phase: the watch looks after that
        name, shape, dtype, site = self._store.get(key).decode().split("\n")
        return Call(number, name, tuple(int(size) for size in shape.split(",") if size), dtype, site)
