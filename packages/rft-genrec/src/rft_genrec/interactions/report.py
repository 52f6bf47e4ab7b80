"""Lines that say what a data set holds: sizes, lengths of histories, repeats, semantic IDs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rft_genrec.catalogue.index_files import level_use
from rft_genrec.catalogue.records import Catalogue, Sample, SemanticIds, SplitName
from rft_genrec.interactions.splits import Sequences


def catalogue_lines(catalogue: Catalogue) -> Iterator[str]:
    """Yield what is said of the items and their texts."""
    bare = sum(not item.description for item in catalogue.items)
    doubles = len(catalogue) - len({item.title for item in catalogue.items})
    yield f"{catalogue.name}: {len(catalogue):,} items, {bare:,} without a description, {doubles:,} titles shared"


def sequence_lines(sequences: Sequences) -> Iterator[str]:
    """Yield what is said of the users and their interactions."""
    lengths = [len(items) for items in sequences.items]
    if lengths:
        mean = sum(lengths) / len(lengths)
        yield (
            f"{len(lengths):,} users, {sequences.num_interactions:,} interactions, "
            f"{min(lengths)} to {max(lengths)} a user, {mean:.2f} on average"
        )


def split_lines(samples: Mapping[SplitName, Sequence[Sample]], max_history: int = 0) -> Iterator[str]:
    """Yield what is said of each split; `max_history` = 0 where no histories were cut."""
    for split, rows in samples.items():
        if not rows:
            yield f"{split}: no samples"
            continue
        lengths = [len(sample.history) for sample in rows]
        again = sum(sample.target in sample.history for sample in rows)
        last = sum(sample.target == sample.history[-1] for sample in rows if sample.history)
        longest = f", {100 * sum(n == max_history for n in lengths) / len(rows):.1f} % full" if max_history else ""
        yield (
            f"{split}: {len(rows):,} samples, histories {min(lengths)} to {max(lengths)}, "
            f"mean {sum(lengths) / len(rows):.2f}{longest}; target in the history {100 * again / len(rows):.1f} %, "
            f"target is the last item {100 * last / len(rows):.1f} %"
        )


def id_lines(ids: SemanticIds) -> Iterator[str]:
    """Yield what is said of the semantic IDs."""
    shared = [items for items in ids.items_by_id.values() if len(items) > 1]
    yield (
        f"semantic IDs: {len(ids.items_by_id):,} distinct for {len(ids):,} items, {len(ids.vocabulary):,} tokens, "
        f"{sum(map(len, shared)):,} items share one in {len(shared):,} groups "
        f"(collision rate {100 * ids.collision_rate:.2f} %)"
    )
    for use in level_use(ids):
        yield f"level {use.letter}: {use.codes} codes in use, perplexity {use.perplexity:.1f}"
