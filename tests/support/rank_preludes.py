"""What makes one rank of a run different from the others, before the ranks compare themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rft_dist.preflight import process_checks, rank_facts, run_preflight


def differ_at(rank: int, changes: Mapping[str, Any]) -> None:
    """Let this process differ if it is `rank`.

    `words`: more of the command line. `versions`: of libraries, as they are installed here. `code`: packages of which
    a file has one more line here. `directory`: where it stands, so that relative paths are of other files. With
    `two_nodes` every rank takes itself for the only one of its machine.
    """
    own = int(os.environ["RANK"])
    if changes.get("two_nodes"):
        os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(own), "NUM_NODES": "2", "GPUS_PER_NODE": "1"}
        process_checks.refuse_contradictions = _nothing  # two machines would not meet at 127.0.0.1
        run_preflight.gloo_problem = _nothing
    if changes.get("start"):
        os.chdir(changes["start"])
    if own != rank:
        return
    if changes.get("directory"):
        os.chdir(changes["directory"])
    _patch("_version", dict(changes.get("versions", {})))
    _patch("code_hash", dict.fromkeys(changes.get("code", ()), "0123456789ab"))
    sys.argv += changes.get("words", ())


def _nothing(*_: object) -> None:
    """In the place of a check."""


def _patch(name: str, answers: dict[str, str]) -> None:
    """Let a function of the facts answer otherwise for some names."""
    original: Callable[[str], str] = getattr(rank_facts, name)
    setattr(rank_facts, name, lambda asked: answers.get(asked) or original(asked))
