"""Names inside a checkpoints folder, and which of its entries are checkpoints.

    checkpoints/
      step_000100/                                   a published checkpoint
        manifest.json  model/...  state/<component>.safetensors  state/<component>.json
        state/<component>/rank_00000-of-00004.safetensors    of a component that several ranks gave
      step_000100.pin                                an empty file: retention never removes step 100
      .staging-step_000100-<pid>-<tag>               being written by process <pid>
      dead_step_000050-<pid>-<tag>                   on its way out
      dead_replaced_step_000100-<pid>-<tag>          displaced by a newer save of the same step
      quarantine_step_000080                         did not verify; never removed
      other_places.txt                               further folders with checkpoints of this run, one path a line

`<tag>` is a hash of the run's identifier, so that what a killed process left behind is known for
whose it is before it holds a manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rft_core.checkpoint_places import other_places

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
MODEL = "model"
STATE = "state"

_STEP = re.compile(r"step_(\d{6,15})")
_REPLACED = re.compile(r"dead_replaced_step_(\d{6,15})-(\d{1,9})-([0-9a-f]{8})")
_LEFTOVER = re.compile(r"(?:\.staging-|dead_|dead_replaced_)step_(\d{6,15})-(\d{1,9})-([0-9a-f]{8})")
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that a process of some run made for its own passing use."""

    path: Path
    step: int
    pid: int
    tag: str

    @property
    def is_replaced(self) -> bool:
        """A complete checkpoint that a newer save of its step was about to displace."""
        return self.path.name.startswith("dead_replaced_")


def run_tag(run_id: str) -> str:
    """Eight hexadecimal digits that stand for the run in names."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:8]


def step_name(step: int) -> str:
    """Return the directory name of a step: "step_000100" for 100."""
    return f"step_{step:06d}"


def parse_step(name: str) -> int | None:
    """100 for "step_000100", None for any other form."""
    match = _STEP.fullmatch(name)
    # one name a step: step_0000100 is no second form of step_000100
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def staging_name(step: int, run_id: str) -> str:
    """Directory in which this process writes `step`."""
    return f".staging-{step_name(step)}-{os.getpid()}-{run_tag(run_id)}"


def dead_name(step: int, run_id: str) -> str:
    """Directory from which this process unlinks a pruned checkpoint."""
    return f"dead_{step_name(step)}-{os.getpid()}-{run_tag(run_id)}"


def replaced_name(step: int, run_id: str) -> str:
    """Return the directory name of the earlier checkpoint of `step`, kept until the new one has verified."""
    return f"dead_replaced_{step_name(step)}-{os.getpid()}-{run_tag(run_id)}"


def quarantine_path(path: Path, step: int) -> Path:
    """A free name beside `path` for a checkpoint that did not verify."""
    first = path.with_name(f"quarantine_{step_name(step)}")
    candidate, number = first, 2
    # what is in quarantine is evidence: a second damaged checkpoint of the step gets a name of its own
    while os.path.lexists(candidate):
        candidate = first.with_name(f"{first.name}.{number}")
        number += 1
    return candidate


def pin_path(directory: Path, step: int) -> Path:
    """The file whose presence keeps `step` from retention."""
    return directory / f"{step_name(step)}.pin"


def is_component_name(name: str) -> bool:
    """Return whether `name` can name a component: letters, digits, underscore, dot, dash; no path."""
    return _COMPONENT.fullmatch(name) is not None


def component_of(file: str) -> str:
    """ "optimizer" for state/optimizer.safetensors and state/optimizer/rank_00000-of-00002.safetensors."""
    name, _, below = file.removeprefix(f"{STATE}/").partition("/")
    return name if below else name.rsplit(".", 1)[0]


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every entry with the name of a checkpoint, by name; contents are not looked at.

    Those of further folders that `directory` names come first. A displaced directory counts as well: where the
    process was killed before the newer save of its step had verified, it is the last good state.
    """
    claimed = [(step_of(path), path) for place in places(directory) for path in _directories(place)]
    return [(step, path) for step, path in claimed if step is not None]


def places(directory: Path) -> list[Path]:
    """Return the further folders with checkpoints of the run, and `directory` itself as the last."""
    return [*other_places(directory), directory]


def published(directory: Path) -> dict[int, Path]:
    """Step -> directory; the displaced one only for a step of which no other is there."""
    # in the order of names displaced ones come first, so that a published one of the same step takes their place
    return dict(candidates(directory))


def step_of(path: Path) -> int | None:
    """The step that a directory's name claims, for a published or a displaced checkpoint."""
    replaced = _REPLACED.fullmatch(path.name)
    return int(replaced[1]) if replaced else parse_step(path.name)


def leftovers(directory: Path) -> list[Leftover]:
    """Staging, pruned and displaced directories, of any run."""
    folders: list[Leftover] = []
    for path in _directories(directory):
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            folders.append(Leftover(path, int(match[1]), int(match[2]), match[3]))
    return folders


def _directories(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
