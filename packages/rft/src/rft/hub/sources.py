"""Sources of rows that are data sets of the Hub, with the files that they stand for."""

from __future__ import annotations

from dataclasses import replace

from rft.hub.hub_names import dataset_name
from rft_trainer.data.sources import SourceSpec, parse_sources


def located_sources(
    text: str, probabilities: str | None = None, *, split: str, flag: str, labelled: bool = False
) -> tuple[SourceSpec, ...]:
    """Parse the sources of a setting, and find the files of those that are data sets of the Hub.

    With `labelled` each may have a name of its own before it: NAME=SOURCE.

    Prompts of such a source are numbered under its name without the revision, so that a commit that changes nothing in
    it changes no id.

    Raises:
        OptionsError, DataError, ServiceError: as `parse_sources` and `rft.hub.dataset_files` raise them.
    """
    labels = {part.partition("=")[0].strip() for part in text.split(",") if labelled and "=" in part}
    specs = [
        _located(spec, split, flag, keeps_name=spec.name in labels)
        for spec in parse_sources(text, probabilities, labelled=labelled)
    ]
    names = [spec.name for spec in specs]
    twice = [spec for spec in specs if names.count(spec.name) > 1]
    return tuple(replace(spec, name=spec.path) if spec in twice and spec.files else spec for spec in specs)


def _located(spec: SourceSpec, split: str, flag: str, *, keeps_name: bool) -> SourceSpec:
    name = dataset_name(spec.path)
    if name is None:
        return spec
    # here, so that data on this machine need none of it
    from rft.hub.dataset_files import dataset_files
    from rft.hub.download import commit_of

    files = dataset_files(name.at(commit_of(name, flag)), split, flag)
    return replace(spec, name=spec.name if keeps_name else name.without_revision, files=tuple(files))
