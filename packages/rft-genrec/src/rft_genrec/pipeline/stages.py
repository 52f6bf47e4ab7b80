"""The stages: their command lines, the files that each reads, and those that it writes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rft_core.checkpoint_places import step_directories
from rft_core.errors import OptionsError
from rft_genrec.settings.run import GenrecRunSettings, chosen_stages

COPY = "copy"
"""Stage that stands in for `data` where there is a catalogue already."""
_CATALOGUE = "catalogue"
_ITEMS = f"{_CATALOGUE}/*.item.json"
_VECTORS = f"{_CATALOGUE}/*.emb*"
_INDEX = f"{_CATALOGUE}/*.index.json"
_TRAINING = (
    f"{_CATALOGUE}/train.csv",
    f"{_CATALOGUE}/valid.csv",
    f"{_CATALOGUE}/train/*.csv",
    f"{_CATALOGUE}/valid/*.csv",
)
_TEST = (f"{_CATALOGUE}/test.csv", f"{_CATALOGUE}/test/*.csv", f"{_CATALOGUE}/info.txt")
_MODEL = "checkpoints/step_*[0-9]/model"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: how it is run, and the files that it reads and writes, as patterns below the directory of the run."""

    name: str
    words: tuple[str, ...]
    """Command line without the word rft-train; {run} is the directory, {model:NAME} the model of an earlier
    stage, {vectors} the file of the items' vectors."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: Literal["files", "directory", "results", "run"]
    """What it makes: single files, a directory that must be new, one of results, from which the same command
    goes on, or the directory of a run, which can be continued."""
    target: str
    """The file or directory that it makes, below that of the run."""
    outside: tuple[Path, ...] = ()
    """Files elsewhere that its options name."""


def stages_of(settings: GenrecRunSettings) -> list[Stage]:
    """Return the stages that settings choose.

    Raises:
        OptionsError: the options of a stage cannot be divided into words.
    """
    chosen = chosen_stages(settings.pipeline.stages)
    found = [_stage(name, settings, with_rl="rl" in chosen) for name in chosen]
    # the stage sid writes the IDs into the samples and the list of items too, which are then no longer those of data
    samples = () if "sid" in chosen else (*_TRAINING, *_TEST)
    found = [replace(stage, writes=(_ITEMS, *samples)) if stage.name == "data" else stage for stage in found]
    if not settings.pipeline.catalogue:
        return found
    source = Path(settings.pipeline.catalogue).expanduser().resolve()
    # without what a later stage writes in its place
    writes = [_ITEMS, *samples]
    writes += [pattern for name, pattern in (("embed", _VECTORS), ("sid", _INDEX)) if name not in chosen]
    copied = Stage(COPY, (COPY, str(source)), (), tuple(writes), "directory", _CATALOGUE, (source,))
    return [copied, *found]


def copy_catalogue(source: Path, target: Path) -> None:
    """Copy a catalogue, whole or not at all."""
    staging = target.with_name(f".{target.name}-copied")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    staging.rename(target)


def final_model(run: Path) -> Path:
    """Return the model of the newest checkpoint of a run; where it has none yet, the pattern of its name."""
    models = [model for saved in step_directories(run / "checkpoints") if (model := saved / "model").is_dir()]
    return models[-1] if models else run / "checkpoints" / "step_*" / "model"


def _stage(name: str, settings: GenrecRunSettings, *, with_rl: bool) -> Stage:
    options = _words(name, getattr(settings.options, f"{name}_options"))
    there = ("--catalogue", f"{{run}}/{_CATALOGUE}")
    model = "rl" if with_rl and name == "eval" else "sft"
    learned = (_ITEMS, _INDEX, *_TRAINING)
    head = ("genrec", name)
    outside = tuple(_paths(options))
    if name == "data":
        words = (*head, "--save_path", f"{{run}}/{_CATALOGUE}", *options)
        return Stage(name, words, (), (_ITEMS, *_TRAINING, *_TEST), "directory", _CATALOGUE, outside)
    if name == "embed":
        return Stage(name, (*head, *there, *options), (_ITEMS,), (_VECTORS,), "files", _CATALOGUE, outside)
    if name == "sid":
        vectors = ("--embeddings", "{vectors}")
        return Stage(
            name, (*head, *there, *vectors, *options), (_ITEMS, _VECTORS), (_INDEX,), "files", _CATALOGUE, outside
        )
    if name == "eval":
        words = (*head, *there, "--pretrain", f"{{model:{model}}}", "--output", "{run}/eval", *options)
        reads = (*learned, *_TEST, f"{model}/{_MODEL}/*")
        return Stage(name, words, reads, ("eval/results.json", "eval/predictions.jsonl"), "results", "eval", outside)
    before = ("--pretrain", "{model:sft}") if name == "rl" else ()
    reads = (*learned, f"sft/{_MODEL}/*") if name == "rl" else learned
    words = (*head, *there, *before, "--save_path", f"{{run}}/{name}", *options)
    return Stage(name, words, reads, (f"{name}/summary.json", f"{name}/{_MODEL}/*"), "run", name, outside)


def filled(stage: Stage, run: Path) -> list[str]:
    """Return the words of a stage with the directory of the run and the models of earlier stages."""
    words: list[str] = []
    for word in stage.words:
        for name in ("sft", "rl"):
            place = f"{{model:{name}}}"
            word = word.replace(place, str(final_model(run / name))) if place in word else word
        if "{vectors}" in word:
            found = sorted(run.glob(f"{_CATALOGUE}/*.emb*.npy"))
            word = str(found[0] if found else run / _CATALOGUE / "NAME.emb-ENCODER.npy")
        words.append(word.replace("{run}", str(run)))
    return words


def _paths(options: Sequence[str]) -> Iterator[Path]:
    """Yield the files and directories that options name."""
    for option in options:
        value = option.partition("=")[2] if option.startswith("--") else option
        path = Path(value).expanduser()
        if value and path.exists():
            yield path.resolve()


def _words(name: str, options: str) -> list[str]:
    try:
        return shlex.split(options)
    except ValueError as error:
        raise OptionsError(
            code="genrec.quotes",
            what=f"the options of the stage {name}, {options!r}, cannot be divided into words: {error}",
            where=f"--{name}_options",
            why="words are divided as a shell does it",
            do="close the quotation mark",
        ) from error
