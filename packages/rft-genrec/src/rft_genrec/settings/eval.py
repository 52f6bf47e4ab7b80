"""Settings of `rft-train genrec eval`; no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rft.config.rules.sourced_values import SourcedValues
from rft.config.spellings import Derived
from rft.resolved import Origin
from rft_core.errors import Problem
from rft_dist.settings import LaunchSettings
from rft_genrec.settings.catalogue import CatalogueSettings
from rft_models.settings import WeightsSettings
from rft_trainer.settings.run import SeedSettings

BASELINES = ("popularity", "first_order", "transitions", "item_knn", "sasrec")
"""Names of `--baselines`."""


@dataclass(frozen=True, kw_only=True)
class RankedModelSettings(WeightsSettings):
    """The model that ranks, and where it lives."""

    pretrain: str = ""
    """Directory of a model that was trained on the IDs of the catalogue; empty = the baselines alone are scored."""


@dataclass(frozen=True, kw_only=True)
class BeamSettings:
    """The search for the items of a history."""

    num_beams: int = field(default=50, metadata={"minimum": 1})
    """Items that are ranked for each history: the width of the constrained beam search."""

    beam_mass: Literal["vocabulary", "allowed"] = "allowed"
    """Probability of a token that beams are ranked by: its share of the whole vocabulary, as MiniOneRec ranks, or of
    what may follow, which a model has learned too that was trained on whole sequences, not on the end of an ID."""

    search_batch_size: int = field(default=16, metadata={"minimum": 1})
    """Histories that are searched together; it changes no result."""


@dataclass(frozen=True, kw_only=True)
class RankedRowsSettings:
    """The samples that are ranked, and the measures."""

    split: Literal["test", "valid"] = "test"
    """Split whose next items are to be found."""

    max_eval_samples: int = field(default=0, metadata={"minimum": 0})
    """Samples that are ranked, from the first on; 0 = all."""

    ks: str = "1,3,5,10,20,50"
    """Places K of HR@K and NDCG@K, joined by commas; those above `num_beams` are left out."""

    bootstrap_draws: int = field(default=1000, metadata={"minimum": 10})
    """Resamples of the rows behind each 95 % interval."""

    @property
    def places(self) -> tuple[int, ...]:
        """The places in ascending order.

        Raises:
            ValueError: one is no whole number above 0.
        """
        numbers = sorted({int(part) for part in self.ks.split(",") if part.strip()})
        if not numbers or numbers[0] < 1:
            raise ValueError(self.ks)
        return tuple(numbers)


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """The recommenders that are no language model, scored on the same rows."""

    baselines: str = "popularity,first_order,transitions,item_knn"
    """Baselines joined by commas: popularity, first_order (the last item alone), transitions (up to three steps,
    decayed), item_knn (cosine of the people of two items), sasrec (trained on the spot, a minute); empty = none."""

    fit_on: Literal["train", "valid", "train+valid"] = "train"
    """Samples that baselines, popularity and novelty are counted on."""

    sasrec: str = ""
    """Directory of a trained SASRec: read where it exists, else written; empty = it is trained and not kept."""


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """The model together with a counter."""

    mix_with: str = ""
    """Baseline that is mixed with the model: score = log p + weight * log counter; empty = no mixture."""

    mix_weight: float | None = field(default=None, metadata={"minimum": 0.0})
    """Weight of the counter; none = chosen on the last samples of the split valid."""

    mix_samples: int = field(default=1000, metadata={"minimum": 1})
    """Samples that the weight is chosen on."""


@dataclass(frozen=True, kw_only=True)
class RankingOutputSettings(SeedSettings):
    """The place of the results, and the seed."""

    output: str = ""
    """Directory for results.json and predictions.jsonl; a start that was cut short goes on from what is there. Empty =
    only the table is printed."""


@dataclass(frozen=True, kw_only=True)
class GenrecEvalSettings:
    """Score a recommender and baselines by the next items of a split."""

    catalogue: CatalogueSettings
    model: RankedModelSettings = field(default_factory=RankedModelSettings)
    beams: BeamSettings = field(default_factory=BeamSettings)
    rows: RankedRowsSettings = field(default_factory=RankedRowsSettings)
    baselines: BaselineSettings = field(default_factory=BaselineSettings)
    mixture: MixtureSettings = field(default_factory=MixtureSettings)
    output: RankingOutputSettings = field(default_factory=RankingOutputSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)


def baseline_names(text: str) -> list[str]:
    """Return the names of a list joined by commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def eval_rules(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of `genrec eval`."""
    values = given.values
    try:
        _ = RankedRowsSettings(ks=values["ks"]).places
    except ValueError:
        yield given.make_problem("genrec.ks", ["ks"], "places are whole numbers above 0", "--ks 1,5,10")
    for name in ("baselines", "mix_with"):
        unknown = [one for one in baseline_names(values[name]) if one not in BASELINES]
        if unknown:
            why = f"{unknown[0]!r} is none of {', '.join(BASELINES)}"
            yield given.make_problem("genrec.baseline", [name], why, f"--{name} transitions")
    if len(baseline_names(values["mix_with"])) > 1:
        yield given.make_problem(
            "genrec.mix_one", ["mix_with"], "the model is mixed with one counter", "--mix_with transitions"
        )
    if not values["pretrain"] and values["mix_with"]:
        why = "a mixture is of the model and a counter, and no model is named"
        yield given.make_problem("genrec.mix_model", ["mix_with", "pretrain"], why, "--pretrain DIR")
    if not values["pretrain"] and not baseline_names(values["baselines"]):
        yield given.make_problem("genrec.nothing", ["pretrain", "baselines"], "nothing is scored", "--pretrain DIR")
    if values["mix_weight"] is not None and not values["mix_with"]:
        why = "it is the weight of the counter of a mixture"
        yield given.make_problem("genrec.mix_weight", ["mix_weight", "mix_with"], why, "--mix_with transitions")
    if values["split"] == "valid" and "valid" in values["fit_on"] and baseline_names(values["baselines"]):
        why = "the baselines would have counted the items that they are to find"
        yield given.make_problem("genrec.fit_on", ["split", "fit_on"], why, "--fit_on train")
    if values["sasrec"] and "sasrec" not in baseline_names(f"{values['baselines']},{values['mix_with']}"):
        why = "SASRec is not among the baselines"
        yield given.make_problem("genrec.sasrec", ["sasrec", "baselines"], why, "--baselines popularity,sasrec")


def ranks_of_devices(given: SourcedValues) -> Derived:
    """Return a rank for each device of CUDA_VISIBLE_DEVICES, where several are listed and no number is given."""
    devices = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if given.values["nproc"] or given.values["device"] == "cpu" or len(devices) < 2 or not given.values["pretrain"]:
        return Derived()
    return Derived({"nproc": len(devices)}, Origin("derived", text=f"CUDA_VISIBLE_DEVICES = {','.join(devices)}"))
