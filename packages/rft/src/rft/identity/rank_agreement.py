"""Files and code of a run compared over its ranks, once each has read its rows and before a model loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from rft.identity.record import Content
from rft_core.errors import PreflightError
from rft_dist.collectives import Collectives


def require_equal_contents(ranks: Collectives, contents: Mapping[str, Content]) -> None:
    """Return where every rank has read the same; all ranks call it, and all of them raise the same error.

    Raises:
        PreflightError: rows, a reward or any other content of a rank is not that of rank 0.
    """
    if ranks.world_size == 1:
        return
    own = json.dumps({name: asdict(content) for name, content in contents.items()})
    first, *others = [json.loads(data) for data in ranks.gather_bytes(own.encode())]
    rows = [
        (rank, name)
        for rank, other in enumerate(others, start=1)
        for name in sorted({*first, *other})
        if first.get(name, {}).get("digest") != other.get(name, {}).get("digest")
    ]
    if not rows:
        return
    names = list(dict.fromkeys(name for _, name in rows))
    lines = [
        f"rank {rank}: {name} | rank 0: {_described(first.get(name))} | here: {_described(others[rank - 1].get(name))}"
        for rank, name in rows[:10]
    ]
    lines += [f"and {len(rows) - 10} more"] if len(rows) > 10 else []
    raise PreflightError(
        code="identity.ranks_differ",
        what=f"ranks of this run have read different things: {', '.join(names)}",
        where="\n    " + "\n    ".join(lines),
        why="all ranks train on the same rows, in one order, with the same rewards and models",
        do=f"make {names[0]} the same on all ranks: one directory for all of them, or absolute paths",
    )


def _described(content: Mapping[str, str] | None) -> str:
    return f"{content['digest'][:12]} ({content['covers']}; {content['place']})" if content else "nothing"
