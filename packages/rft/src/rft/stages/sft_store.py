"""The store of a supervised run's training rows: when it is used, what its name follows from, and what it holds."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.build.prompt_data import all_left_out, demonstration, renderer_for, trained_turns
from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.settings import SftSettings
from rft_core.errors import OptionsError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import prompts_from_rows
from rft_trainer.data.readers.formats import resolve_files
from rft_trainer.data.readers.rows import Row
from rft_trainer.data.row_forms import Keys, as_read
from rft_trainer.data.sources import SourceSpec
from rft_trainer.data.store.build import SUFFIXES, Tokenized, build_store
from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.data.store.shards import VERSION
from rft_trainer.data.task_rows import is_task
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import stop_requested

_LOG = logging.getLogger(__name__)
_AUTO_BYTES = 256 * 1024**2
"""From here on Python objects of the rows would take gigabytes: some ten times their files."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The training rows of a run in a store."""

    directory: Path
    specs: tuple[SourceSpec, ...]
    samples: StoredSamples
    sizes: tuple[int, ...]
    """Samples of each source."""
    num_rows: int
    num_loss_tokens: int
    longest: int
    too_long: tuple[tuple[str, int], ...]
    weightless: int
    data_hash: str

    @property
    def probabilities(self) -> list[float] | None:
        """Shares of the sources, where they are given."""
        known = [spec.probability for spec in self.specs if spec.probability is not None]
        return known if len(known) == len(self.specs) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the rows for a person who trains on them."""
        return (f"{self.weightless:,} rows have weight 0 and are left out",) if self.weightless else ()

    def sizes_without(self, samples: Sequence[TrainingSample]) -> tuple[int, ...]:
        """Return the sizes of the sources without these samples."""
        gone = Counter(sample.sample_id.rpartition(":")[0] for sample in samples)
        return tuple(size - gone[spec.name] for size, spec in zip(self.sizes, self.specs, strict=True))

    def lines(self) -> list[str]:
        """Return the lines of the plan."""
        lines = [
            f"source {spec.name}: {size:,} samples from {spec.place}"
            for spec, size in zip(self.specs, self.sizes, strict=True)
        ]
        lines.append(f"{len(self.samples):,} of {self.num_rows:,} rows fit (longest sample {self.longest} tokens)")
        return [*lines, f"tokens are mapped from the data store {self.directory}"]


def wants_store(settings: SftSettings, tokenizer: HfTokenizer) -> bool:
    """Return whether the training rows go into a store.

    Raises:
        OptionsError: a store is asked for, and these rows cannot be in one.
    """
    data = settings.data
    if data.data_store == "off" or not data.prompt_data:
        return False
    reason = _reason_against(settings, tokenizer)
    if data.data_store == "on":
        if reason:
            raise OptionsError(
                code="data.no_store",
                what=f"data_store is on, but {reason}",
                where="--data_store",
                why="a store holds the tokens of .jsonl and .parquet rows of text",
                do="--data_store off",
            )
        return True
    return not reason and sum(file.stat().st_size for files in _files(settings) for file in files) > _AUTO_BYTES


def _reason_against(settings: SftSettings, tokenizer: HfTokenizer) -> str:
    if settings.images.images_key:
        return "the rows have images"
    if settings.data.max_samples:
        return f"max_samples = {settings.data.max_samples} chooses among the rows"
    if getattr(tokenizer.hf_tokenizer, "backend_tokenizer", None) is None:
        return "the tokenizer has no tokenizer.json, from which the name of a store follows"
    specs = located_sources(settings.data.prompt_data, None, split=settings.data.prompt_split, flag="--prompt_data")
    task = next((spec.path for spec in specs if is_task(spec.path)), "")
    if task:
        return f"{task} is a task"
    others = [file for files in _files(settings) for file in files if file.suffix.lower() not in SUFFIXES]
    return f"{others[0]} is another file" if others else ""


def _specs(settings: SftSettings) -> tuple[SourceSpec, ...]:
    data = settings.data
    probabilities = data.prompt_data_probs or None
    return located_sources(data.prompt_data, probabilities, split=data.prompt_split, flag="--prompt_data")


def _files(settings: SftSettings) -> list[list[Path]]:
    split = settings.data.prompt_split or None
    return [list(spec.files) or resolve_files(spec.path, split=split) for spec in _specs(settings)]


def open_store(settings: SftSettings, tokenizer: HfTokenizer, max_len: int) -> StoredRows:
    """Build what is missing of the store of these rows, and open it.

    Raises:
        DataError: a row cannot be used, or none fits.
    """
    specs, files = _specs(settings), _files(settings)
    root = Path(settings.data.data_store_path or "~/.cache/rft/data").expanduser()
    directory = root / _name(settings, specs, files, tokenizer, max_len)
    _LOG.info("training rows are tokenised into %s", directory, extra=ASIDE)
    tokenize = _Tokenizer(settings, specs, tokenizer, max_len)
    shards = build_store(directory, files, tokenize, stopped=stop_requested)
    samples = StoredSamples(directory, shards, [spec.name for spec in specs])
    too_long = tuple(row for facts in shards for row in facts.too_long)
    if not len(samples):
        raise all_left_out(too_long, sum(facts.weightless for facts in shards), max_len)
    return StoredRows(
        directory,
        specs,
        samples,
        samples.sizes(len(specs)),
        num_rows=sum(facts.num_rows for facts in shards),
        num_loss_tokens=sum(facts.num_loss_tokens for facts in shards),
        longest=max(facts.longest for facts in shards),
        too_long=too_long,
        weightless=sum(facts.weightless for facts in shards),
        data_hash=hashlib.sha256("".join(facts.sha256 for facts in shards).encode()).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """Makes samples of rows, as a run without a store does."""

    settings: SftSettings
    specs: Sequence[SourceSpec]
    tokenizer: HfTokenizer
    max_len: int

    def __call__(self, source: int, rows: Sequence[Row], first: int) -> Tokenized:
        data = self.settings.data
        read = as_read(rows, Keys(data.input_key, None, data.output_key), conversations=True)
        if read.note and not first:
            _LOG.info("%s: %s", self.specs[source].name, read.note, extra=ASIDE)
        prompts = prompts_from_rows(
            read.rows,
            source=self.specs[source].name,
            input_key=read.keys.input,
            output_key=read.keys.output,
            conversations=read.conversations,
            weight_key=data.weight_key or None,
            first=first,
        )
        renderer = renderer_for(data, self.tokenizer, trained_turns(data))
        samples: list[tuple[int, TrainingSample]] = []
        too_long: list[tuple[str, int]] = []
        for prompt in prompts:
            sample = demonstration(renderer.render(prompt), self.tokenizer)
            if sample.num_tokens > self.max_len:
                too_long.append((sample.sample_id, sample.num_tokens))
            elif sample.weight > 0:
                samples.append((prompt.index, sample))
        return Tokenized(samples, too_long, len(prompts) - len(samples) - len(too_long))


def _name(
    settings: SftSettings,
    specs: Sequence[SourceSpec],
    files: Sequence[Sequence[Path]],
    tokenizer: HfTokenizer,
    max_len: int,
) -> str:
    """Return the name of a store: of the files by place, size and time, and of all that the tokens follow from."""
    data, hf = settings.data, tokenizer.hf_tokenizer
    stats = [[(str(file.resolve()), file.stat()) for file in one] for one in files]
    record: dict[str, Any] = {
        "version": VERSION,
        "files": [[(path, stat.st_size, stat.st_mtime_ns) for path, stat in one] for one in stats],
        "sources": [spec.name for spec in specs],
        "columns": [data.input_key, data.output_key, data.weight_key],
        "text": [data.input_template, data.system_prompt, data.apply_chat_template],
        "turns": [data.train_on_turns, data.roles_to_train],
        "max_len": max_len,
        "tokenizer": [hf.backend_tokenizer.to_str(), hf.chat_template, list(tokenizer.eos_ids)],
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]
