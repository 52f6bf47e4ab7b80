"""The store of a supervised run's training rows: when it is used, what its name follows from, and what it holds."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rft.build.prompt_data import all_left_out, trained_turns
from rft.hub.download import ASIDE
from rft.hub.sources import located_sources
from rft.settings import SftSettings
from rft.tokenizing.demonstrations import Demonstrations, StoredText, tokenizer_digest
from rft_core.errors import OptionsError
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.readers.formats import resolve_files
from rft_trainer.data.sources import SourceSpec
from rft_trainer.data.store.build import BuildShards, build_store, in_this_process
from rft_trainer.data.store.samples import StoredSamples
from rft_trainer.data.store.shard_plan import SUFFIXES
from rft_trainer.data.store.shards import VERSION
from rft_trainer.data.store.worker_pool import FEWEST_SHARDS, BuildWorkers, available_cores, in_workers
from rft_trainer.data.task_rows import is_task
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.stop_signals import stop_requested

_LOG = logging.getLogger(__name__)
_AUTO_BYTES = 256 * 1024**2
"""From here on Python objects of the rows would take gigabytes: some ten times their files."""

MOST_IN_MEMORY = 1 << 20
"""Rows whose order is that of a run without a store; above them it is computed place by place, and is another one."""


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
    text = _text(settings, specs, max_len)
    directory = root / _name(text, files, tokenizer)
    _LOG.info("training rows are tokenised into %s", directory, extra=ASIDE)
    shards = build_store(
        directory, files, _builder(directory, files, text, tokenizer, settings.data.data_store_workers)
    )
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


def _text(settings: SftSettings, specs: Sequence[SourceSpec], max_len: int) -> StoredText:
    data, turns = settings.data, trained_turns(settings.data)
    return StoredText(
        sources=[spec.name for spec in specs],
        input_key=data.input_key,
        output_key=data.output_key,
        weight_key=data.weight_key,
        input_template=data.input_template,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
        roles=list(turns.roles),
        last_only=turns.last_only,
        max_len=max_len,
    )


def _builder(
    directory: Path, files: Sequence[Sequence[Path]], text: StoredText, tokenizer: HfTokenizer, num_workers: int
) -> BuildShards:
    """Return what builds the shards: this process, or workers that load the tokenizer from its directory."""
    here = in_this_process(directory, files, Demonstrations(text, tokenizer), stopped=stop_requested)
    # one that was made in memory is nowhere for another process to load it from
    if not Path(tokenizer.where).is_dir():
        return here
    workers = BuildWorkers(
        [sys.executable, "-P", "-m", "rft.tokenizing.worker_main"],
        {"tokenizer": tokenizer.where, "digest": tokenizer_digest(tokenizer), "text": asdict(text)},
        num_workers or available_cores(),
        2 if num_workers else FEWEST_SHARDS,
    )
    return in_workers(directory, files, workers, here, stopped=stop_requested)


def _name(text: StoredText, files: Sequence[Sequence[Path]], tokenizer: HfTokenizer) -> str:
    """Return the name of a store: of the files by place, size and time, and of all that the tokens follow from."""
    stats = [[(str(file.resolve()), file.stat()) for file in one] for one in files]
    record: dict[str, Any] = {
        "version": VERSION,
        "files": [[(path, stat.st_size, stat.st_mtime_ns) for path, stat in one] for one in stats],
        "text": asdict(text),
        "tokenizer": tokenizer_digest(tokenizer),
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]
