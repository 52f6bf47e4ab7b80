"""Names of runs: `<recipe>-<date>-<word>`, pronounceable and not used before; paths where no run can be."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import re
import shlex
from itertools import count
from pathlib import Path

from rft_core.errors import OptionsError

_WORDS = """
acorn amber anchor apple arrow aspen autumn badger bamboo barley basil beacon beaver birch bison blossom
breeze brook butter candle canyon carrot castle cedar cherry chestnut clover cobalt comet copper coral cotton
cricket crystal daisy dawn desert dolphin dragon eagle echo elder ember falcon feather fennel fern fjord flint
forest fossil fox garden garnet ginger glacier granite grove hamlet harbor hazel hedge heron hickory hollow
honey horizon indigo iris island ivory ivy jade jasmine juniper kelp kestrel lagoon lantern larch laurel
lavender lemon lichen lilac linden lotus lupine lynx magnet mango maple marble marsh meadow melon meteor mint
mirror moss mulberry nectar nettle nickel oak oasis ocean olive onyx opal orchard orchid osprey otter owl
oyster paprika pearl pebble pepper pine planet plum pollen poplar poppy prairie quartz quill rabbit raven reed
river robin rocket rose rowan saffron sage sandal sapphire shadow shell silver sparrow spruce squirrel
starling stone summit sunrise swallow sycamore teal thistle thunder thyme tiger topaz tulip turtle valley
velvet violet walnut willow winter wren yarrow zephyr zinc
"""
WORDS = tuple(_WORDS.split())
RUNS = Path("runs")
"""Folder of the runs whose directory the settings do not name."""
LATEST = "latest"
"""Link in that folder to the run that began last."""


def run_name(recipe: str, *, today: datetime.date | None = None, under: Path | None = None) -> str:
    """Return a name whose directory does not exist in `under`; letters, digits, dots, dashes and underscores only.

    Not a function of the run's seed: two runs of one recipe and seed need two names.
    """
    date = (today or datetime.date.today()).isoformat()
    stem = f"{_safe(recipe)}-{date}"
    order = random.SystemRandom().sample(WORDS, len(WORDS))
    candidates = [f"{stem}-{word}" for word in order]
    for name in candidates:
        if under is None or not (under / name).exists():
            return name
    number = 2
    while under is not None and (under / f"{candidates[0]}-{number}").exists():
        number += 1
    return f"{candidates[0]}-{number}"


def free_name(path: Path) -> Path:
    """Return the first of PATH-2, PATH-3, ... that is not there."""
    return next(free for number in count(2) if not (free := path.with_name(f"{path.name}-{number}")).exists())


def refuse_file(path: Path) -> None:
    """Raise `OptionsError` where the directory of a run cannot be made: something else is in its place or above it."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if there.is_dir():
        return
    # beside a file there is room for a folder; what else is in the way says nothing of where runs are wanted
    beside = there.is_file() and there == path.absolute()
    kind = "file" if there.is_file() else "device, pipe or socket" if there.exists() else "link to nothing"
    raise OptionsError(
        code="run.not_a_directory",
        what=f"{path}: {there} is a {kind}, not a directory",
        where="--save_path",
        why="a run is a directory of files, which is made where nothing else is",
        state="nothing was started and nothing was changed",
        do=f"--save_path {shlex.quote(str(free_name(path if beside else RUNS / path.name)))}",
    )


def point_to_latest(run: Path) -> None:
    """Make runs/latest a link to a run in runs/ that has just begun; the run goes on where the link cannot be made.

    The link is relative, so that it holds where the folder is moved, and is replaced in one operation, so that of runs
    that begin together one is named and none is without a link. A run of that name is left alone.
    """
    link = run.with_name(LATEST)
    if run.parent.absolute() != RUNS.absolute() or run.name == LATEST or (link.exists() and not link.is_symlink()):
        return
    new = run.with_name(f".{LATEST}-{os.getpid()}-{run.name}")
    # a file system without links, or a folder that is not writable: a convenience is missing and nothing else
    with contextlib.suppress(OSError):
        new.symlink_to(run.name, target_is_directory=True)
        new.replace(link)
    with contextlib.suppress(OSError):
        new.unlink()


def _safe(recipe: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe).strip("-.") or "run"
