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
TEXT_WEIGHT = 0.5
"""Of the texts beside the transitions; chosen on held-out rows of valid.csv, where 0.3 to 1 differ little."""
BEAMS = 50


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
            command("genrec", "sid", "--catalogue", str(whole), "--embeddings", str(embeddings), "--codes", "32")
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
        words += ["--item_embeddings", str(case.embeddings)] if "similar" in recipe.read_text() else []
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
        default=["counters", "text", "sasrec", "shuffled", "model", "mixture", "rl"],
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
        rows = compare(chosen, folder / chosen.data)
    report(rows, chosen)
    return 0


@dataclass
class Comparison:
    """All methods on the rows of one case."""

    chosen: argparse.Namespace
    case: Case
    name: str
    folder: Path
    recipe: Path
    rows: dict[str, list[dict[str, float]]]
    """Measures of each method: of every seed, or once where there is no seed."""

    def __post_init__(self) -> None:
        from rft_genrec.baselines.named import fitted

        self.scorer = Scorer(self.case)
        self.counters = {one: fitted(one, self.scorer.sequences, self.scorer.num_items, seed=0) for one in COUNTERS}

    def add(self, method: str, found: dict[str, float]) -> None:
        """Keep and show the measures of a method."""
        self.rows.setdefault(method, []).append(found)
        print(f"{time.strftime('%H:%M:%S')} {method}: {line_of(found)}", flush=True)

    def without_training(self, people: Any) -> None:
        """Score what counts, and what reads texts."""
        if "counters" in self.chosen.methods:
            for one, counter in self.counters.items():
                self.add(one, self.scorer.of_scorer(counter))
            if people is not None:
                self.add("oracle", self.scorer.of_scorer(Oracle(people, self.scorer.samples)))
        if "text" in self.chosen.methods:
            import numpy as np

            both = TextAndTransitions(self.counters["transitions"], np.load(self.case.embeddings), TEXT_WEIGHT)
            self.add(WITH_TEXTS, self.scorer.of_scorer(both))

    def of_seed(self, seed: int, weight: float | None) -> None:
        """Train and score the methods that have a seed."""
        from rft_genrec.baselines.named import fitted
        from rft_genrec.evaluation.mixture import mixed

        popularity, methods = self.counters["popularity"], self.chosen.methods
        if "model" in methods:
            run = self.folder / f"{self.name}_{self.recipe.stem}_{seed}"
            model = trained(self.case, self.recipe, run, seed, None, self.chosen.extra)
            ids, found = ranked(self.case, model, None, popularity)
            self.add("model", self.scorer.of(found, ids))
            if weight is not None:
                both = mixed(found, self.scorer.samples, self.counters["transitions"], weight)
                self.add("model + transitions", self.scorer.of(both))
            if "rl" in methods:
                after = reinforced(self.case, model, run.with_name(f"{run.name}_rl"), seed)
                self.add("model after RL", self.scorer.of(ranked(self.case, after, None, popularity)[1], ids))
        if "shuffled" in methods:
            index, dealt = self._dealt(seed)
            model = trained(
                self.case, self.recipe, self.folder / f"{self.name}_shuffled_{seed}", seed, index, self.chosen.extra
            )
            self.add("shuffled IDs", self.scorer.of(ranked(self.case, model, index, popularity)[1], dealt))
        if "sasrec" in methods:
            sasrec = fitted("sasrec", self.scorer.sequences, self.scorer.num_items, seed=seed)
            self.add("SASRec", self.scorer.of_scorer(sasrec))

    def _dealt(self, seed: int) -> tuple[Path, Any]:
        from rft_genrec.baselines.random_ids import dealt_at_random

        ids = self.scorer.dataset.ids
        assert ids is not None, "`prepare` has given the catalogue its IDs"
        index, dealt = self.folder / f"shuffled_{seed}.index.json", dealt_at_random(ids, seed)
        index.write_text(json.dumps({str(n): list(one) for n, one in enumerate(dealt.tokens_by_item)}))
        return index, dealt


def compare(chosen: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Score every method; its measures of each seed, once where there is no seed."""
    whole, dev, people = prepare(chosen.data, folder)
    case, name = (dev, "dev") if chosen.dev else (whole, "whole")
    recipe = chosen.recipe or RECIPES / f"genrec-{'real' if chosen.data == 'real' else 'synthetic'}.yaml"
    comparison = Comparison(chosen, case, name, folder, recipe, {})
    comparison.without_training(people)
    weight = None
    if "mixture" in chosen.methods:
        weight = mixture_weight(chosen, dev, folder, recipe)
        print(f"weight of the counter, chosen on the held-out known rows: {weight}", flush=True)
    for seed in chosen.seeds:
        comparison.of_seed(seed, weight)
    return comparison.rows


def mixture_weight(chosen: argparse.Namespace, dev: Case, folder: Path, recipe: Path) -> float:
    """Return the weight with the best NDCG@10 on the held-out known rows, by a model of the first seed."""
    from rft_genrec.baselines.named import fitted
    from rft_genrec.evaluation.mixture import chosen_weight

    seed, scorer = chosen.seeds[0], Scorer(dev)
    model = trained(dev, recipe, folder / f"dev_{recipe.stem}_{seed}", seed, None, chosen.extra)
    popularity = fitted("popularity", scorer.sequences, scorer.num_items, seed=0)
    counter = fitted("transitions", scorer.sequences, scorer.num_items, seed=0)
    return chosen_weight(ranked(dev, model, None, popularity)[1], scorer.samples, counter)


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
