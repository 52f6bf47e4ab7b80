"""Recommendation by semantic IDs beside counters, neighbours and SASRec, on the same rows, scored by the same measures.

    RFT_DATA_DIR=... python benchmarks/genrec_quality.py [--data real|synthetic4|synthetic8] [--seeds 0 1 2] [--dev]

real: the items of Amazon Industrial 2018 in MiniOneRec's files. All methods know the item texts and the sequences that
valid.csv reveals (the published train split is not among these files), and are scored on the rows of test.csv.
synthetic4, synthetic8: people that `rft-train genrec data` makes up, with 4 and 8 personas; the oracle knows them.

Each seed trains a new decoder with `rft-train genrec sft` from the recipe, once with the IDs and once with the same IDs
dealt to the items at random. What is chosen (the weight of the mixture) is chosen on the last fifth of the known rows,
by a model and counters that have not seen them; --dev scores on these rows and never reads test.csv. The last line is
`worst_ratio=<x> against <peer> at HR@10`: the model's mean over that of the best counter; see docs/genrec/results.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "genrec_quality.json"
RECIPES = Path(__file__).resolve().parent / "recipes"
MEASURES = ("HR@1", "HR@5", "HR@10", "HR@50", "NDCG@10")
COUNTERS = ("popularity", "first_order", "transitions", "item_knn")
WITH_TEXTS = "transitions + texts"
DEV_SHARE = 0.2
TEXT_WEIGHTS = (0.0, 0.03, 0.1, 0.3, 0.5, 1.0)
"""Of the texts beside the transitions: one of these is chosen on the held-out known rows."""
BEAMS = 50
SYNTHETIC_CODES = "64,8,32"
"""Codes of the levels of the synthetic items, whose texts name 60 sub-categories and 8 brands."""


@dataclass(frozen=True)
class Case:
    """One division of the rows: what methods know, and what they are scored on."""

    folder: Path
    """A catalogue directory whose train.csv is all that is known, and whose test.csv is scored."""
    embeddings: Path


def prepare(data: str, folder: Path) -> tuple[Case, Case, Any]:
    """Write the catalogue with all known rows, and the one whose scored rows are the last of the known; the people."""
    source, people = folder / "source", None
    if data == "real":
        source = Path(os.environ.get("RFT_DATA_DIR", "")) / "amazon18-industrial"
        if not source.is_dir():
            sys.exit(f"{source} is not there: RFT_DATA_DIR names the directory that holds amazon18-industrial")
        known_files = ["valid.csv"]
    else:
        from rft_genrec.interactions.synthetic import make_population

        personas = int(data.removeprefix("synthetic"))
        if not source.is_dir():
            command("genrec", "data", "--source", "synthetic", "--personas", str(personas), "--save_path", str(source))
        known_files, people = ["train.csv", "valid.csv"], make_population(4000, personas, 42)
    csv.field_size_limit(1 << 24)
    head, known = [], []
    for name in known_files:
        head, *rows = csv_rows(source / name)
        known += rows
    scored = csv_rows(source / "test.csv")[1:]
    cut = len(known) - round(len(known) * DEV_SHARE)
    whole = catalogue(source, folder / "whole", head, known, scored)
    dev = catalogue(source, folder / "dev", head, known[:cut], known[cut:])
    embeddings = embedded(whole, 256 if data == "real" else 64)
    if data != "real":
        if not list(whole.glob("*.index.json")):
            words = ["genrec", "sid", "--catalogue", str(whole), "--embeddings", str(embeddings)]
            command(*words, "--codes", SYNTHETIC_CODES)
        for index in whole.glob("*.index.json"):
            shutil.copy(index, dev / index.name)
    return Case(whole, embeddings), Case(dev, embeddings), people


def csv_rows(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, its head first."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def catalogue(
    source: Path, target: Path, head: Sequence[str], known: Sequence[Sequence[str]], scored: Sequence[Sequence[str]]
) -> Path:
    """Write a catalogue directory with other rows."""
    target.mkdir(parents=True, exist_ok=True)
    for file in [*source.glob("*.item.json"), *source.glob("*.index.json")]:
        shutil.copyfile(file, target / file.name)
    for name, rows in (("train", known), ("test", scored)):
        with (target / f"{name}.csv").open("w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([head, *rows])
    return target


def embedded(folder: Path, dim: int) -> Path:
    """Return the vectors of the item texts, by the encoder tfidf."""
    if not list(folder.glob("*.emb-tfidf.npy")):
        command("genrec", "embed", "--catalogue", str(folder), "--encoder", "tfidf", "--svd_dim", str(dim))
    return next(path for path in sorted(folder.iterdir()) if ".emb" in path.name and path.suffix == ".npy")


def command(*words: str) -> None:
    """Run `rft-train WORDS`; its output is shown where it fails."""
    rft_train = Path(sys.executable).with_name("rft-train")
    ended = subprocess.run([str(rft_train), *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"rft-train {' '.join(words)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}")


def trained(case: Case, recipe: Path, run: Path, seed: int, index: Path | None, extra: Sequence[str]) -> Path:
    """Train with `rft-train genrec sft`, or take the model of a run that has ended; the directory of the model."""
    if not (run / "checkpoints").is_dir():
        words = ["genrec", "sft", "--config", str(recipe), "--catalogue", str(case.folder), "--seed", str(seed)]
        words += ["--sid_index_path", str(index)] if index else []
        if re.search("^tasks:.*(similar|walks)", recipe.read_text(), re.MULTILINE):
            words += ["--item_embeddings", str(case.embeddings)]
        command(*words, "--save_path", str(run), *extra)
    return sorted((run / "checkpoints").glob("step_*"))[-1] / "model"


def reinforced(case: Case, model: Path, run: Path, seed: int) -> Path:
    """Go on with `rft-train genrec rl` from a model, or take the model of a run that has ended."""
    if not (run / "checkpoints").is_dir():
        words = ["genrec", "rl", "--config", str(RECIPES / "genrec-rl.yaml"), "--catalogue", str(case.folder)]
        command(*words, "--pretrain", str(model), "--seed", str(seed), "--save_path", str(run))
    return sorted((run / "checkpoints").glob("step_*"))[-1] / "model"


def ranked(case: Case, model: Path, index: Path | None, fallback: Any) -> tuple[Any, list[Any]]:
    """Rank the scored rows of a case by a model; its IDs and the rankings."""
    import torch

    from rft_genrec.catalogue.chosen import chosen_dataset
    from rft_genrec.evaluation.model_ranker import ModelRanker
    from rft_genrec.prompts.model_record import builder_of
    from rft_genrec.settings.catalogue import CatalogueSettings
    from rft_genrec.settings.eval import BeamSettings
    from rft_models.policy.load import load_policy

    dataset, ids = chosen_dataset(
        CatalogueSettings(catalogue=str(case.folder), sid_index_path=str(index) if index else "")
    )
    policy = load_policy(model, dtype=torch.float32, device="cpu").eval()
    # behind an item of a sequence another one follows: whether the text ends there says nothing about the item
    beams = BeamSettings(num_beams=BEAMS, beam_mass="allowed", search_batch_size=32)
    ranker = ModelRanker(policy, builder_of(model, ids), fallback, beams)
    samples = dataset.of("test")
    found: dict[str, Any] = {}
    for batch in ranker.batches([one.history for one in samples], [one.sample_id for one in samples]):
        found |= {one.sample_id: one for one in batch}
    return ids, [found[one.sample_id] for one in samples]


class TextAndTransitions:
    """Not learned: transitions, and the nearest texts of the history's items, each as the counter decays them."""

    def __init__(self, transitions: Any, vectors_ND: Any, weight: float) -> None:
        import numpy as np

        from rft_genrec.training.similar_items import neighbours

        self.counter, self.weight, self.num_items = transitions, weight, transitions.num_items
        self.nearest_NK, cumulative_NK = neighbours(np.asarray(vectors_ND, dtype=np.float32))
        self.shares_NK = np.diff(cumulative_NK, axis=1, prepend=0)

    def scores(self, histories: Sequence[Sequence[int]]) -> Any:
        """Return [H, N] scores."""
        scores_HN = self.counter.scores(histories)
        for row, history in zip(scores_HN, histories, strict=True):
            weight = self.weight
            for item in reversed(history):
                row[self.nearest_NK[item]] += weight * self.shares_NK[item]
                weight *= self.counter.decay
        return scores_HN


class Scorer:
    """Measures rankings of the rows of one case."""

    def __init__(self, case: Case) -> None:
        from rft_genrec.catalogue.minionerec_files import read_dataset
        from rft_genrec.catalogue.records import user_sequences

        self.dataset = read_dataset(case.folder)
        self.samples = self.dataset.of("test")
        self.sequences = list(user_sequences(self.dataset.of("train")).values())
        self.num_items = len(self.dataset.catalogue)
        self.counts = Counter(item for sequence in self.sequences for item in sequence)

    def of(self, rankings: Sequence[Any], ids: Any = None) -> dict[str, float]:
        """Return the measures, by item."""
        from rft_genrec.evaluation.measures import Truth, measure

        truth = Truth(self.samples, ids, self.counts, self.num_items)
        found = measure(rankings, truth, (1, 5, 10, 50))
        return {name: statistics.fmean(found.columns[name]) for name in MEASURES} | {
            "coverage@10": found.lists["coverage@10"]
        }

    def of_scorer(self, scorer: Any) -> dict[str, float]:
        """Return the measures of what gives every item a score."""
        from rft_genrec.baselines.recommender import best
        from rft_genrec.evaluation.rankings import rankings_of

        found: list[Any] = []
        for start in range(0, len(self.samples), 256):
            found += best(scorer.scores([one.history for one in self.samples[start : start + 256]]), BEAMS)
        return self.of(rankings_of(found, [one.sample_id for one in self.samples]))


class Oracle:
    """Knows persona and brand of every person."""

    def __init__(self, people: Any, samples: Sequence[Any]) -> None:
        self.people, self.samples, self.next = people, samples, 0

    def scores(self, histories: Sequence[Sequence[int]]) -> Any:
        """Return [H, N] true chances; asked for the samples in their order, once."""
        import numpy as np

        rows = []
        for _ in histories:
            one = self.samples[self.next]
            self.next += 1
            user = int(one.user[1:])
            persona, brand = int(self.people.personas_U[user]), int(self.people.brands_U[user])
            rows.append(self.people.world.probabilities(one.history, persona, brand))
        return np.stack(rows)


def main(argv: list[str]) -> int:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["real", "synthetic4", "synthetic8"], default="real")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dev", action="store_true", help="score the held-out known rows instead of the test rows")
    parser.add_argument("--recipe", type=Path, help="of genrec sft; by default that of the data")
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=["sasrec", "shuffled", "model", "mixture", "rl"],
    )
    parser.add_argument("--folder", type=Path, help="of runs, which a later start goes on from; by default a new one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("extra", nargs="*", help="options of genrec sft, behind --")
    chosen = parser.parse_args(argv)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        os.environ["RFT_CACHE"] = str(folder / "cache")
        rows = compare(chosen, folder / chosen.data).rows
    report(rows, chosen)
    return 0


@dataclass(frozen=True)
class Chosen:
    """What is chosen on the held-out known rows, by a model and counters that have not seen them."""

    text_weight: float
    """Of the texts beside the transitions."""
    mixture_weights: dict[str, float]
    """Of each counter beside the model."""


@dataclass
class Comparison:
    """All methods on the rows of one case."""

    arguments: argparse.Namespace
    case: Case
    folder: Path
    """Of the runs of this case."""
    recipe: Path

    def __post_init__(self) -> None:
        from rft_genrec.baselines.named import fitted

        self.rows: dict[str, list[dict[str, float]]] = {}
        self.scorer = Scorer(self.case)
        self.counters = {one: fitted(one, self.scorer.sequences, self.scorer.num_items, seed=0) for one in COUNTERS}

    def with_texts(self, weight: float) -> TextAndTransitions:
        """Return the transitions beside the nearest texts."""
        import numpy as np

        return TextAndTransitions(self.counters["transitions"], np.load(self.case.embeddings), weight)

    def add(self, method: str, found: dict[str, float]) -> None:
        """Keep and show the measures of a method."""
        self.rows.setdefault(method, []).append(found)
        print(f"{time.strftime('%H:%M:%S')} {method}: {line_of(found)}", flush=True)

    def choose(self) -> Chosen:
        """Choose weights by NDCG@10 on the rows of this case, which are held out of the known ones."""
        from rft_genrec.evaluation.counter_mixture import chosen_weight

        scored = {one: self.scorer.of_scorer(self.with_texts(one))["NDCG@10"] for one in TEXT_WEIGHTS}
        text_weight = max(TEXT_WEIGHTS, key=lambda one: (scored[one], -one))
        weights: dict[str, float] = {}
        if "mixture" in self.arguments.methods:
            rankings = self.model(self.arguments.seeds[0])[2]
            for name, counter in self.mixed_with(text_weight).items():
                weights[name] = chosen_weight(rankings, self.scorer.samples, counter)
        return Chosen(text_weight, weights)

    def mixed_with(self, text_weight: float) -> dict[str, Any]:
        """Return the counters that the model is mixed with."""
        return {"transitions": self.counters["transitions"], WITH_TEXTS: self.with_texts(text_weight)}

    def model(self, seed: int) -> tuple[Path, Any, list[Any]]:
        """Train the model of a seed, or take it; its directory, its IDs and its rankings."""
        run = self.folder / f"{self.recipe.stem}_{seed}"
        directory = trained(self.case, self.recipe, run, seed, None, self.arguments.extra)
        return directory, *ranked(self.case, directory, None, self.counters["popularity"])

    def without_training(self, chosen: Chosen, people: Any) -> None:
        """Score what counts, and what reads texts."""
        for one, counter in self.counters.items():
            self.add(one, self.scorer.of_scorer(counter))
        if people is not None:
            self.add("oracle", self.scorer.of_scorer(Oracle(people, self.scorer.samples)))
        self.add(WITH_TEXTS, self.scorer.of_scorer(self.with_texts(chosen.text_weight)))

    def of_seed(self, seed: int, chosen: Chosen) -> None:
        """Train and score the methods that have a seed."""
        from rft_genrec.baselines.named import fitted
        from rft_genrec.evaluation.counter_mixture import mixed

        popularity, methods = self.counters["popularity"], self.arguments.methods
        if "model" in methods:
            model, ids, found = self.model(seed)
            self.add("model", self.scorer.of(found, ids))
            for name, weight in chosen.mixture_weights.items():
                both = mixed(found, self.scorer.samples, self.mixed_with(chosen.text_weight)[name], weight)
                self.add(f"model + {name}", self.scorer.of(both))
            if "rl" in methods:
                after = reinforced(self.case, model, self.folder / f"{self.recipe.stem}_{seed}_rl", seed)
                self.add("model after RL", self.scorer.of(ranked(self.case, after, None, popularity)[1], ids))
        if "shuffled" in methods:
            index, dealt = self._dealt(seed)
            run = self.folder / f"{self.recipe.stem}_{seed}_shuffled"
            model = trained(self.case, self.recipe, run, seed, index, self.arguments.extra)
            self.add("shuffled IDs", self.scorer.of(ranked(self.case, model, index, popularity)[1], dealt))
        if "sasrec" in methods:
            sasrec = fitted("sasrec", self.scorer.sequences, self.scorer.num_items, seed=seed)
            self.add("SASRec", self.scorer.of_scorer(sasrec))

    def _dealt(self, seed: int) -> tuple[Path, Any]:
        from rft_genrec.baselines.random_ids import dealt_at_random

        ids = self.scorer.dataset.ids
        assert ids is not None, "`prepare` has given the catalogue its IDs"
        index, dealt = self.folder / f"shuffled_{seed}.index.json", dealt_at_random(ids, seed)
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text(json.dumps({str(n): list(one) for n, one in enumerate(dealt.tokens_by_item)}))
        return index, dealt


def compare(arguments: argparse.Namespace, folder: Path) -> Comparison:
    """Score every method on the test rows, or on the held-out known ones."""
    whole, dev, people = prepare(arguments.data, folder)
    recipe = arguments.recipe or RECIPES / f"genrec-{'real' if arguments.data == 'real' else 'synthetic'}.yaml"
    on_dev = Comparison(arguments, dev, folder / "runs_dev", recipe)
    chosen = on_dev.choose()
    print(f"chosen on {len(on_dev.scorer.samples)} held-out known rows: {chosen}", flush=True)
    comparison = on_dev if arguments.dev else Comparison(arguments, whole, folder / "runs", recipe)
    comparison.without_training(chosen, people)
    for seed in arguments.seeds:
        comparison.of_seed(seed, chosen)
    return comparison


def line_of(found: dict[str, float]) -> str:
    """Return measures as text."""
    return "  ".join(f"{name} {value:.4f}" for name, value in found.items())


def report(rows: dict[str, list[dict[str, float]]], chosen: argparse.Namespace) -> None:
    """Print the table with mean and spread, and write it."""
    summary: dict[str, dict[str, Any]] = {}
    for method, found in rows.items():
        summary[method] = {
            name: {
                "mean": statistics.fmean(one[name] for one in found),
                "spread": statistics.stdev(one[name] for one in found) if len(found) > 1 else 0.0,
                "seeds": [one[name] for one in found],
            }
            for name in found[0]
        }
    names = list(next(iter(summary.values())))
    print(f"\n{'method':22s}" + "".join(f"{name:>17s}" for name in names))
    for method, found in summary.items():
        cells = "".join(f"{found[n]['mean']:10.4f} +-{found[n]['spread']:.4f}" for n in names)
        print(f"{method:22s}{cells}")
    part = f"{chosen.data}{'-dev' if chosen.dev else ''}"
    known = json.loads(chosen.output.read_text()) if chosen.output.is_file() else {}
    known[part] = {"seeds": chosen.seeds, "methods": known.get(part, {}).get("methods", {}) | summary}
    chosen.output.write_text(json.dumps(known, indent=1) + "\n")
    counters = {name: summary[name]["HR@10"]["mean"] for name in COUNTERS if name in summary}
    model = summary.get("model")
    if counters and model:
        peer = max(counters, key=lambda name: counters[name])
        print(f"worst_ratio={model['HR@10']['mean'] / counters[peer]:.3f} against {peer} at {part} HR@10")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
