"""The work of `rft-train genrec data`: read, filter, number, split, check, report, write."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path

from rft.resolved import Resolved
from rft_genrec.catalogue.file_errors import refused_file
from rft_genrec.catalogue.minionerec_files import read_dataset
from rft_genrec.catalogue.records import Catalogue, Dataset
from rft_genrec.interactions.amazon import AmazonSource
from rft_genrec.interactions.filtering import filtered
from rft_genrec.interactions.headroom import headroom
from rft_genrec.interactions.interaction_table import Source, gathered, texts_of
from rft_genrec.interactions.leakage import check_leakage
from rft_genrec.interactions.movielens import MovieLensSource
from rft_genrec.interactions.report import catalogue_lines, id_lines, sequence_lines, split_lines
from rft_genrec.interactions.schemas import RowPolicy
from rft_genrec.interactions.splits import (
    Shares,
    SplitSamples,
    UserSequences,
    numbered,
    split_by_time,
    split_last_out,
)
from rft_genrec.interactions.synthetic import make_population
from rft_genrec.interactions.tables import TableSource
from rft_genrec.interactions.writing import Prepared, write_prepared
from rft_genrec.settings.data import GenrecDataSettings, SplitSettings

TRUTH = "truth.json"
Steps = Generator[str, None, Prepared]
"""Lines of the report as they come, and at the end what is to be written."""


def prepare(resolved: Resolved[GenrecDataSettings]) -> Iterator[str]:
    """Make the catalogue and the samples that the settings describe, and yield the lines of the report.

    Raises:
        DataError: an input is absent or holds something else, no interaction is left, or the output is not empty.
    """
    settings = resolved.settings
    target = Path(settings.output.save_path) if settings.output.save_path else None
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "is not empty" if target.is_dir() else "is a file"
        raise refused_file(target, what, "a catalogue is written into a new directory", "--save_path OTHER_DIRECTORY")
    if settings.sources.source == "synthetic":
        prepared = yield from _synthetic(settings)
    elif settings.sources.source == "minionerec":
        prepared = yield from _read_again(settings)
    else:
        prepared = yield from _from_source(settings)
    if target is None:
        yield "nothing was written: --save_path DIRECTORY writes the catalogue"
        return
    write_prepared(target, prepared)
    yield f"written: {target}"
    if prepared.dataset.ids is None:
        yield f"next: rft-train genrec embed --catalogue {target}"


def _synthetic(settings: GenrecDataSettings) -> Steps:
    """Make people and items up; the filters have nothing to leave out."""
    made = settings.synthetic
    population = make_population(made.users, made.personas, made.seed)
    catalogue = population.world.catalogue(settings.sources.dataset_name or "synthetic")
    samples = _split(population.sequences, settings.splits)
    yield from catalogue_lines(catalogue)
    yield from _sample_report(population.sequences, samples, settings.splits.max_history)
    for result in headroom(population, samples["train"], samples["test"]):
        yield f"{result.name}: HR@10 {result.hit_rate:.3f}, NDCG@10 {result.ndcg:.3f} on {result.num_samples:,} samples"
    truth = {"personas": made.personas, "seed": made.seed, **population.truth()}
    return Prepared(Dataset(catalogue, None, samples), population.sequences, {TRUTH: json.dumps(truth)})


def _read_again(settings: GenrecDataSettings) -> Steps:
    """Read a directory in MiniOneRec's formats, which checks it."""
    dataset = read_dataset(settings.sources.input, settings.sources.dataset_name)
    yield from catalogue_lines(dataset.catalogue)
    if dataset.ids is not None:
        yield from id_lines(dataset.ids)
    yield from split_lines(dataset.samples)
    yield from check_leakage(dataset.samples).lines()
    return Prepared(dataset, None, {})


def _from_source(settings: GenrecDataSettings) -> Steps:
    policy = RowPolicy(skips=settings.sources.bad_rows == "skip")
    source = _source(settings, policy)
    table = gathered(source.interactions())
    titles = {name: item.title for name, item in source.items()} if settings.filters.title_filter else None
    yield "read: {:,} users, {:,} items, {:,} interactions".format(*table.counts)
    table = yield from filtered(table, titles, settings.filters)
    if not len(table):
        why = "the filters leave none: the window, the titles, or too few interactions of users and items"
        raise refused_file(Path(settings.sources.input), "no interaction is left", why, "--user_k 1 --item_k 1")
    sequences = numbered(table)
    numbers = {name: number for number, name in enumerate(sequences.item_names)}
    texts = texts_of(source, numbers)
    absent = next((name for name, item in zip(numbers, texts, strict=True) if item is None), None)
    if absent is not None:
        why = "every item has a title, which a model reads"
        raise refused_file(_items_path(settings), f"item {absent} is not in it", why, "--title_filter")
    catalogue = Catalogue(settings.sources.dataset_name or source.name, tuple(item for item in texts if item))
    if policy.skips:
        first = f"; the first: {policy.first.problem.where}: {policy.first.problem.what}" if policy.first else ""
        yield f"rows left out: {policy.refused:,} of {policy.checked:,} that were read{first}"
    samples = _split(sequences, settings.splits)
    yield from catalogue_lines(catalogue)
    yield from _sample_report(sequences, samples, settings.splits.max_history)
    prepared = Prepared(Dataset(catalogue, None, samples), sequences, {})
    if settings.output.write_reviews and settings.sources.source == "amazon":
        prepared.reviews.update(_amazon(settings, policy).review_texts(_users(sequences), numbers))
    return prepared


def _users(sequences: UserSequences) -> dict[str, int]:
    return {name: number for number, name in enumerate(sequences.user_names)}


def _sample_report(sequences: UserSequences, samples: SplitSamples, max_history: int) -> Iterator[str]:
    yield from sequence_lines(sequences)
    yield from split_lines(samples, max_history)
    yield from check_leakage(samples).lines()


def _split(sequences: UserSequences, wanted: SplitSettings) -> SplitSamples:
    if wanted.split == "leave_last_out":
        return split_last_out(sequences, wanted.max_history)
    return split_by_time(sequences, wanted.max_history, Shares(wanted.valid_share, wanted.test_share))


def _source(settings: GenrecDataSettings, policy: RowPolicy) -> Source:
    given = settings.sources
    if given.source == "amazon":
        return _amazon(settings, policy)
    if given.source == "movielens":
        return MovieLensSource(Path(given.input), policy)
    items = Path(given.items_file) if given.items_file else None
    return TableSource(Path(given.input), items, settings.columns, policy)


def _amazon(settings: GenrecDataSettings, policy: RowPolicy) -> AmazonSource:
    return AmazonSource(Path(settings.sources.input), Path(settings.sources.items_file), policy)


def _items_path(settings: GenrecDataSettings) -> Path:
    return Path(settings.sources.items_file or settings.sources.input)
