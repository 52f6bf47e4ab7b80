"""Evaluation of a recommender and of baselines on the next items of a split."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rft.identity.model_files import directory_content
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine
from rft_core.durable_files import replace_record, replace_text
from rft_core.errors import DataError
from rft_dist.collectives import Collectives
from rft_genrec.baselines.counters import Popularity
from rft_genrec.baselines.named import fitted
from rft_genrec.baselines.recommender import ItemScorer
from rft_genrec.catalogue.chosen import chosen_dataset
from rft_genrec.catalogue.records import Dataset, Sample, SemanticIds, user_sequences
from rft_genrec.evaluation.measures import Measured, MethodScores, Truth, measure, scored
from rft_genrec.evaluation.mixture import MixtureVerdict, chosen_weight, mixed, verdict
from rft_genrec.evaluation.model_ranker import ModelRanker, model_directory
from rft_genrec.evaluation.parts import Parts, append, merged
from rft_genrec.evaluation.rankings import Ranking, rankings_of
from rft_genrec.prompts.model_record import builder_of
from rft_genrec.settings.eval import GenrecEvalSettings, baseline_names
from rft_models.policy.load import load_policy

MODEL = "model"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RankingEvaluation:
    """Measures of all methods on the same rows, the same on every rank."""

    samples: Sequence[Sample]
    methods: Mapping[str, MethodScores]
    """By name; `model` is the language model, `model + NAME` the mixture."""
    rankings: Mapping[str, Sequence[Ranking]]
    fit_on: str
    verdict: MixtureVerdict | None
    seconds: Mapping[str, float]
    """Of each method's ranking, fitting included."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Split, seed, model, digests: what results.json begins with."""

    def as_record(self) -> dict[str, Any]:
        """Return results.json."""
        record: dict[str, Any] = dict(self.facts) | {
            "fit_on": self.fit_on,
            "n": len(self.samples),
            "seconds": dict(self.seconds),
            "methods": {name: one.as_record() for name, one in self.methods.items()},
        }
        if self.verdict is not None:
            gains = {
                part: {name: asdict(one) for name, one in found.items()} for part, found in self.verdict.over.items()
            }
            record["mixture"] = {"weight": self.verdict.weight, "counts": self.verdict.counts, "gain_over": gains}
        return record


def evaluate(settings: GenrecEvalSettings, machine: Machine) -> RankingEvaluation:
    """Rank every sample by the model and by each baseline, and measure; each rank searches for its share.

    Where the settings name an output, the first rank writes it, and a later start goes on from what was ranked.

    Raises:
        DataError: a catalogue or a model that cannot be used, no samples, rankings of another evaluation.
        OptionsError: no such model.
    """
    dataset, ids = _dataset(settings)
    samples = _samples(dataset, settings)
    sequences = fitted_sequences(dataset, settings.baselines.fit_on)
    num_items, seed = len(dataset.catalogue), settings.output.seed
    counts = Counter(item for sequence in sequences for item in sequence)
    rankings: dict[str, Sequence[Ranking]] = {}
    seconds: dict[str, float] = {}
    facts = _facts(settings, dataset, ids, samples)
    ranker, began = None, time.perf_counter()
    if settings.model.pretrain:
        assert ids is not None, "a model needs IDs, which `_dataset` has required"
        ranker = open_ranker(settings, ids, Popularity(sequences, num_items), machine.device)
        parts = _parts(settings, facts)
        rankings[MODEL] = _of_model(ranker, samples, machine.collectives, parts)
        seconds[MODEL] = time.perf_counter() - began
    counters = _counters(settings, sequences, num_items, machine)
    extra = 0 if ids is None else min(settings.beams.num_beams, num_items - len(ids.items_by_id))
    for name, (counter, spent) in counters.items():
        began = time.perf_counter()
        # some more items, since several may share an ID
        ranked = counter.rank([sample.history for sample in samples], settings.beams.num_beams + extra)
        rankings[name] = rankings_of(ranked, [sample.sample_id for sample in samples])
        seconds[name] = spent + time.perf_counter() - began
    weight, mix = None, settings.mixture.mix_with
    if mix:
        assert ranker is not None, "the rules refuse a mixture without a model"
        weight = _weight(settings, ranker, dataset, machine, mix)
        rankings[f"{MODEL} + {mix}"] = mixed(rankings[MODEL], samples, counters[mix][0], weight)
    truth = Truth(samples, ids, counts, num_items)
    ks = [k for k in settings.rows.places if k <= settings.beams.num_beams]
    measured = {name: measure(found, truth, ks) for name, found in rankings.items()}
    draws = settings.rows.bootstrap_draws
    found = RankingEvaluation(
        samples,
        scored(measured, seed=seed, num_draws=draws),
        rankings,
        settings.baselines.fit_on,
        _verdict(measured, mix, weight, seed, draws) if weight is not None else None,
        seconds,
        facts,
    )
    if settings.output.output and machine.is_first:
        write(found, Path(settings.output.output).expanduser())
    return found


def open_ranker(settings: GenrecEvalSettings, ids: SemanticIds, popularity: ItemScorer, device: str) -> ModelRanker:
    """Load the model of the settings, with the prompts that it was trained on.

    Raises:
        DataError: the model was not trained on these IDs.
    """
    directory = model_directory(settings.model.pretrain)
    builder = builder_of(directory, ids)
    policy = load_policy(directory, dtype=weights_dtype(settings.model.bf16), device=device).eval()
    return ModelRanker(policy, builder, popularity, settings.beams, device)


def fitted_sequences(dataset: Dataset, fit_on: str, last: int = 0) -> list[Sequence[int]]:
    """Return what the samples of some splits reveal of each person; `last` samples of the last split are left out.

    Raises:
        DataError: a split has no samples.
    """
    samples: list[Sample] = []
    for split in fit_on.split("+"):
        own = dataset.of("train" if split == "train" else "valid")
        if not own:
            raise DataError(
                code="genrec.no_samples",
                what=f"the catalogue {dataset.catalogue.name} has no samples of the split {split}",
                where="--fit_on",
                why="popularity and baselines are counted on them",
                do="--fit_on valid" if split == "train" else "--fit_on train",
            )
        samples += own
    return list(user_sequences(samples[: len(samples) - last]).values())


def write(found: RankingEvaluation, output: Path) -> None:
    """Write predictions.jsonl (of the mixture where there is one, else of the first method) and results.json."""
    output.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, sample in enumerate(found.samples):
        record: dict[str, Any] = {
            "sample_id": sample.sample_id,
            "user": sample.user,
            "history": list(sample.history),
            "target": sample.target,
        }
        for name, rankings in found.rankings.items():
            one = rankings[number].as_record()
            record[name] = {"places": one["places"], "scores": one["scores"]}
        lines.append(json.dumps(record) + "\n")
    replace_text(output / "predictions.jsonl", "".join(lines))
    replace_record(output / "results.json", found.as_record())
    Parts(output / "parts", {}).remove()


def _dataset(settings: GenrecEvalSettings) -> tuple[Dataset, SemanticIds | None]:
    """Read the catalogue; without a model it may have no IDs."""
    if settings.model.pretrain:
        return chosen_dataset(settings.catalogue)
    from rft_genrec.catalogue.minionerec_files import read_dataset

    found = read_dataset(settings.catalogue.catalogue)
    if settings.catalogue.sid_index_path or settings.catalogue.item_meta_path or found.ids is not None:
        return chosen_dataset(settings.catalogue)
    return found, None


def _samples(dataset: Dataset, settings: GenrecEvalSettings) -> Sequence[Sample]:
    samples = dataset.of(settings.rows.split)
    if not samples:
        raise DataError(
            code="genrec.no_samples",
            what=f"the catalogue {dataset.catalogue.name} has no samples of the split {settings.rows.split}",
            where="--split",
            why="a recommender is scored on the next items of samples",
            do=f"{settings.rows.split}.csv in the catalogue, as `rft-train genrec data` writes it",
        )
    return samples[: settings.rows.max_eval_samples or None]


def _facts(
    settings: GenrecEvalSettings, dataset: Dataset, ids: SemanticIds | None, samples: Sequence[Sample]
) -> dict[str, Any]:
    text = json.dumps([[sample.sample_id, sample.history, sample.target] for sample in samples])
    return {
        "format": _FORMAT,
        "catalogue": dataset.catalogue.name,
        "split": settings.rows.split,
        "samples": hashlib.sha256(text.encode()).hexdigest(),
        "ids": ids.digest if ids is not None else "",
        "model": directory_content(str(model_directory(settings.model.pretrain))).digest
        if settings.model.pretrain
        else "",
        "num_beams": settings.beams.num_beams,
        "beam_mass": settings.beams.beam_mass,
        "bf16": settings.model.bf16,
        "seed": settings.output.seed,
    }


def _parts(settings: GenrecEvalSettings, facts: Mapping[str, Any]) -> Parts | None:
    if not settings.output.output:
        return None
    # rankings of a history that has no prompt follow from popularity
    manifest = {name: value for name, value in facts.items() if name != "seed"} | {"fit_on": settings.baselines.fit_on}
    return Parts(Path(settings.output.output).expanduser() / "parts", manifest)


def _of_model(
    ranker: ModelRanker, samples: Sequence[Sample], collectives: Collectives, parts: Parts | None
) -> list[Ranking]:
    """Return the rankings of all samples: those of an earlier start, and each rank's share of the others."""
    rank, expected = collectives.rank, [sample.sample_id for sample in samples]
    known = parts.take() if parts is not None and rank == 0 else []
    text = collectives.broadcast_bytes(json.dumps([one.sample_id for one in known]).encode())
    done = set(json.loads(text))
    left = [sample for sample in samples if sample.sample_id not in done]
    own = left[rank :: collectives.world_size]
    file = parts.begin(rank, collectives.world_size) if parts is not None else None
    found = list(known)
    for rankings in ranker.batches([sample.history for sample in own], [sample.sample_id for sample in own]):
        append(file, rankings)
        found += rankings
    return merged(collectives, found, expected)


def _counters(
    settings: GenrecEvalSettings, sequences: Sequence[Sequence[int]], num_items: int, machine: Machine
) -> dict[str, tuple[ItemScorer, float]]:
    """Return the baselines by name with the seconds that fitting took; the mixture's counter is one of them."""
    names = baseline_names(f"{settings.baselines.baselines},{settings.mixture.mix_with}")
    found: dict[str, tuple[ItemScorer, float]] = {}
    for name in names:
        began = time.perf_counter()
        # one rank alone writes the files of a model that is trained here
        sasrec = settings.baselines.sasrec if machine.is_first else ""
        made = fitted(name, sequences, num_items, seed=settings.output.seed, sasrec=sasrec)
        found[name] = made, time.perf_counter() - began
    return found


def _weight(settings: GenrecEvalSettings, ranker: ModelRanker, dataset: Dataset, machine: Machine, name: str) -> float:
    """Return the given weight, or the best on the last samples of the split valid, which its counter has not seen."""
    given = settings.mixture.mix_weight
    if given is not None:
        return given
    valid = dataset.of("valid")
    if not valid or settings.rows.split == "valid":
        raise DataError(
            code="genrec.no_held_out",
            what=f"split = {settings.rows.split}, and the catalogue has {len(valid)} samples of the split valid",
            where="--mix_weight",
            why="the weight is chosen on samples of valid, which are not those that are scored",
            do="--mix_weight 0.5",
        )
    held = valid[-min(settings.mixture.mix_samples, max(1, len(valid) // 2)) :]
    sees_valid = "valid" in settings.baselines.fit_on
    before = fitted_sequences(dataset, settings.baselines.fit_on, len(held) if sees_valid else 0)
    counter = fitted(name, before, len(dataset.catalogue), seed=settings.output.seed)
    return chosen_weight(_of_model(ranker, held, machine.collectives, None), held, counter)


def _verdict(measured: Mapping[str, Measured], mix: str, weight: float, seed: int, draws: int) -> MixtureVerdict:
    parts = {name: measured[name] for name in (MODEL, mix)}
    return verdict(measured[f"{MODEL} + {mix}"], parts, weight, seed=seed, num_draws=draws)


def lines(resolved: Any) -> Iterator[str]:
    """Evaluate what settings ask, and yield the lines that are shown; ranks behind the first show none."""
    from rft.process.machine import open_machine
    from rft_genrec.evaluation.page import page

    settings: GenrecEvalSettings = resolved.settings
    with open_machine(settings.model.device) as machine:
        found = evaluate(settings, machine)
        if machine.is_first:
            yield from page(found, settings)
