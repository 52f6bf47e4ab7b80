"""Prompt sources of a run as named on the command line, and the prompts read from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rft_core.errors import OptionsError
from rft_trainer.data.images import ImageColumn
from rft_trainer.data.prompts import PromptRow, content_hash, prompts_from_rows
from rft_trainer.data.readers.formats import read_published_file, read_rows, resolve_files
from rft_trainer.data.readers.rows import Row, SkipLog
from rft_trainer.data.row_forms import Keys, ReadRows, as_read
from rft_trainer.data.task_rows import is_task, package_words, refuse_unknown_task, task_rows


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source: its path, its name in prompt ids, and its sampling probability."""

    path: str
    """A file, a pattern, a directory, or TASK:ARGUMENT of an installed package."""
    name: str
    probability: float | None
    files: tuple[Path, ...] = ()
    """Files that it stands for, where `path` is the name of something that is kept elsewhere."""

    @property
    def place(self) -> str:
        """Path or task, for people: a task with the package that it belongs to."""
        return f"{self.path} ({package_words(self.path)})" if is_task(self.path) else self.path


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """All prompts of a run in global order (source after source), with their sources and files."""

    prompts: tuple[PromptRow, ...]
    specs: tuple[SourceSpec, ...]
    files: tuple[str, ...]
    content_hash: str
    skipped: SkipLog
    notes: tuple[str, ...] = field(default=())
    """A sentence on each source whose columns were found by their form."""
    unused: tuple[str, ...] = field(default=())
    """A sentence on each other source that has columns which nothing reads."""


_LABELLED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)")


def parse_sources(
    prompt_data: str, prompt_data_probs: str | None = None, *, labelled: bool = False
) -> tuple[SourceSpec, ...]:
    """Parse the sources `a.jsonl,b.jsonl` with probabilities `0.7,0.3`; with `labelled` also `NAME=a.jsonl`.

    Other names are file stems, made longer by their directories where two would be equal. A single
    source has no probability; the value "1.0" for it is accepted.
    """
    from rft_trainer.data.mixture import check_probabilities  # brings torch, which a page of help must not

    paths = [part.strip() for part in prompt_data.split(",") if part.strip()]
    if not paths:
        raise _bad_list("prompt_data", prompt_data, "name at least one file", "--prompt_data train.jsonl")
    probabilities: tuple[float | None, ...] = (None,) * len(paths)
    if prompt_data_probs is not None and prompt_data_probs.strip():
        numbers = check_probabilities(_numbers(prompt_data_probs), len(paths))
        probabilities = numbers if len(paths) > 1 else (None,)
    labels = [_label_of(path) if labelled else "" for path in paths]
    paths = [path.partition("=")[2] if label else path for path, label in zip(paths, labels, strict=True)]
    names = [label or name for label, name in zip(labels, _names(paths), strict=True)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        # names are given to held-out sets alone
        raise _bad_list(
            "eval_data",
            twice,
            "each of several sets has a name of its own",
            f"--eval_data with another name for {twice}=",
        )
    return tuple(SourceSpec(*spec) for spec in zip(paths, names, probabilities, strict=True))


def load_prompts(
    specs: Sequence[SourceSpec],
    *,
    split: str | None = None,
    input_key: str,
    label_key: str | None = None,
    output_key: str | None = None,
    skips: SkipLog | None = None,
    images: ImageColumn | None = None,
    whole_rows: bool = False,
    conversations: bool = False,
    weight_key: str | None = None,
) -> LoadedPrompts:
    """Read every source; errors as `read_rows` and `prompts_from_rows` raise them.

    With `conversations` chats stay whole where their rows have no column of responses.
    """
    skips = skips if skips is not None else SkipLog()
    prompts: list[PromptRow] = []
    files: list[str] = []
    notes: list[str] = []
    unused: list[str] = []
    for spec in specs:
        files.extend(map(str, spec.files) if spec.files else files_of(spec.path, split=split))
        rows = rows_of_source(spec, split=split, skips=skips)
        keys = Keys(input_key, label_key, output_key)
        read = as_read(rows, keys, skips, conversations=conversations, images=images.key if images else "")
        notes += [f"{spec.name}: {read.note}"] if read.note else []
        note = "" if read.note or whole_rows else unused_columns(read, images, weight_key)
        unused += [f"{spec.name}: {note}"] if note else []
        prompts.extend(
            prompts_from_rows(
                read.rows,
                source=spec.name,
                input_key=read.keys.input,
                label_key=read.keys.label,
                output_key=read.keys.output,
                skips=skips,
                images=images,
                whole_rows=whole_rows,
                conversations=read.conversations,
                weight_key=weight_key,
            )
        )
    return LoadedPrompts(
        tuple(prompts), tuple(specs), tuple(files), content_hash(prompts), skips, tuple(notes), tuple(unused)
    )


def unused_columns(read: ReadRows, images: ImageColumn | None = None, weight_key: str | None = None) -> str:
    """Return a sentence on the columns of a source that nothing reads; empty where there are none."""
    names = [read.keys.input, read.keys.label, read.keys.output, images.key if images is not None else None, weight_key]
    # a key may reach into a column, as `reward_model.ground_truth` does
    used = {part for name in names if name for part in (name, name.partition(".")[0])}
    unused = [column for column in (read.rows[0].fields if read.rows else ()) if column not in used]
    return f"not used: {', '.join(unused)}" if unused else ""


def rows_of_source(spec: SourceSpec, *, split: str | None = None, skips: SkipLog | None = None) -> list[Row]:
    """Read the rows of a source: of the files that it stands for, or as `rows_of` does."""
    if not spec.files:
        return rows_of(spec.path, split=split, skips=skips)
    return [row for file in spec.files for row in read_published_file(file, skips)]


def rows_of(path: str, *, split: str | None = None, skips: SkipLog | None = None) -> list[Row]:
    """Read the rows of a file, a pattern or a directory as `read_rows` does, or those of an installed task.

    A split chooses among those of a directory; a task has none, and its argument says which rows are meant.
    """
    refuse_unknown_task(path)
    return task_rows(path) if is_task(path) else read_rows(path, split=split, skips=skips)


def files_of(path: str, *, split: str | None = None) -> list[str]:
    """Return the files that a source is read from; of a task the words that name it."""
    refuse_unknown_task(path)
    return [path] if is_task(path) else [str(file) for file in resolve_files(path, split=split)]


def source_sizes(prompts: Sequence[PromptRow], specs: Sequence[SourceSpec]) -> tuple[int, ...]:
    """Count the prompts of each source, in the order of `specs`, for `Mixture`."""
    counts = dict.fromkeys((spec.name for spec in specs), 0)
    for prompt in prompts:
        counts[prompt.source] += 1
    return tuple(counts.values())


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise _bad_list(
            "prompt_data_probs", text, "numbers with commas between", "--prompt_data_probs 0.5,0.5"
        ) from None


def _names(paths: Sequence[str]) -> list[str]:
    depth = 1
    parts = [(path.rstrip(":"),) if is_task(path) else _without_suffix(Path(path)).parts for path in paths]
    while True:
        # longer by one folder at a time, until all are different
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
        if depth > max(map(len, parts)):
            return [str(Path(path)) if len(set(paths)) == len(paths) else _twice(paths) for path in paths]
        depth += 1


def _without_suffix(path: Path) -> Path:
    """The path as a name; of the working directory its own, which "." is not."""
    return path.with_suffix("") if path.name else path.absolute()


def _twice(paths: Sequence[str]) -> str:
    double = next(path for path in paths if paths.count(path) > 1)
    raise _bad_list(
        "prompt_data", double, "each source is named once", f"--prompt_data {','.join(dict.fromkeys(paths))}"
    )


def _label_of(path: str) -> str:
    """Return the name before the sign of `NAME=PATH`; empty where there is none, or the whole is a path."""
    found = _LABELLED.fullmatch(path)
    return found[1] if found and not Path(path).exists() else ""


def _bad_list(name: str, value: str, why: str, do: str) -> OptionsError:
    return OptionsError(code=f"data.{name}", what=f"{name} = {value!r}", where=f"--{name}", why=why, do=do)
