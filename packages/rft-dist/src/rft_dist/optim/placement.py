"""Check that what the settings keep in host memory is there: an offload without effect fills the GPU in silence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rft_core.errors import OptionsError

_NAMED = 3


def require_on_host(tensors: Mapping[str, Tensor], setting: str) -> None:
    """Raise `OptionsError` naming the tensors that are not in host memory although `setting` keeps them there.

    Numbers, such as the count of a parameter's steps, may be anywhere. Called once an update has made all of them.
    """
    elsewhere = {name: each for name, each in tensors.items() if each.numel() > 1 and each.device.type != "cpu"}
    if not elsewhere:
        return
    names = ", ".join(list(elsewhere)[:_NAMED])
    more = f" and {len(elsewhere) - _NAMED} more" if len(elsewhere) > _NAMED else ""
    found = sum(each.numel() * each.element_size() for each in elsewhere.values())
    total = sum(each.numel() * each.element_size() for each in tensors.values())
    devices = ", ".join(sorted({str(each.device) for each in elsewhere.values()}))
    sizes = f"{found / 2**20:,.1f} of {total / 2**20:,.1f} MiB"
    raise OptionsError(
        code="strategy.offload_without_effect",
        what=f"{sizes} that --{setting} keeps in host memory are on {devices}: {names}{more}",
        where="the first update of this process",
        why="memory was planned without them on the device, and a later step would run out of it",
        state="one update was made, and it was not saved",
        do=f"--no-{setting}, with as much memory on each device as rft-train plan then names",
    )
