"""Settings of `rft-train genrec run`: the stages, their options, and where everything goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rft.config.rules.sourced_values import SourcedValues
from rft_core.errors import Problem

STAGES = ("data", "embed", "sid", "sft", "rl", "eval")
"""Stages in their order."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The stages, and the catalogue that they begin with."""

    stages: str = "data,embed,sid,sft,eval"
    """Stages that are run, joined by commas: data, embed, sid, sft, rl, eval."""

    catalogue: str = ""
    """Directory of a catalogue that is there already, which is copied in place of the stage data; empty = the stage
    data makes one."""

    save_path: str
    """Directory of the catalogue, the runs and the results of all stages; given again, stages whose options and inputs
    are unchanged are passed over, and an interrupted one is continued."""


@dataclass(frozen=True, kw_only=True)
class StageOptionSettings:
    """The options of each stage, as its own command takes them; paths that the stages share are filled in."""

    data_options: str = ""
    """Options of `rft-train genrec data`, such as "--source amazon --input reviews.json"."""

    embed_options: str = ""
    """Options of `rft-train genrec embed`."""

    sid_options: str = ""
    """Options of `rft-train genrec sid`."""

    sft_options: str = ""
    """Options of `rft-train genrec sft`."""

    rl_options: str = ""
    """Options of `rft-train genrec rl`."""

    eval_options: str = ""
    """Options of `rft-train genrec eval`."""


@dataclass(frozen=True, kw_only=True)
class GenrecRunSettings:
    """Run the stages from interactions to figures, each of them only where its options or inputs have changed."""

    pipeline: PipelineSettings
    options: StageOptionSettings = field(default_factory=StageOptionSettings)


def chosen_stages(stages: str) -> list[str]:
    """Return the stages that a value of `--stages` names, in the order in which they run."""
    named = {name.strip() for name in stages.split(",")}
    return [name for name in STAGES if name in named]


def run_rules(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of `genrec run`."""
    values = given.values
    named = [name.strip() for name in values["stages"].split(",")]
    if set(named) - set(STAGES) or len(set(named)) < len(named):
        why = f"stages are different ones of {', '.join(STAGES)}"
        yield given.make_problem("genrec.stages", ["stages"], why, f"--stages {','.join(STAGES)}")
        return
    if values["catalogue"] and "data" in named:
        why = "the catalogue is made by the stage data, or it is there already"
        do = f"--stages {','.join(name for name in named if name != 'data')}"
        yield given.make_problem("genrec.two_catalogues", ["catalogue", "stages"], why, do)
    if not values["catalogue"] and "data" not in named:
        why = "no stage makes the catalogue, and none is named"
        yield given.make_problem("genrec.no_catalogue", ["catalogue", "stages"], why, "--catalogue DIR")
    if ("rl" in named or "eval" in named) and "sft" not in named:
        why = "reinforcement learning and evaluation need the model of the stage sft"
        yield given.make_problem("genrec.no_model", ["stages"], why, f"--stages {','.join([*named, 'sft'])}")
    for name in STAGES:
        if values[f"{name}_options"] and name not in named:
            why = f"the stage {name} is not run"
            yield given.make_problem("genrec.idle_options", [f"{name}_options", "stages"], why, f"--stages with {name}")
