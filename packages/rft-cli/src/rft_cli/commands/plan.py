"""`rft-train plan`: the ranks, batches and memory of a run on machines that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft.config.command_record import TrainingRecord
from rft.config.commands import load
from rft.planning.cluster.hardware import Cluster
from rft.planning.cluster.strategy_costs import plan_cluster
from rft.planning.known_models import FAMILIES, known_model
from rft.planning.largest_model import config_directory, fits_of_family
from rft.planning.run_plan import plan_run
from rft.resolved import Resolved
from rft_cli.config.plan_words import Asked, sort_words
from rft_cli.config.resolve import resolve
from rft_cli.pages.plan import as_object, cluster_lines, cluster_object, fit_lines, lines
from rft_cli.records.discovery import default_command, prepared, training_of
from rft_core.terminal_text import visible

USAGE = """usage: rft-train plan [COMMAND | RECIPE] [--world_size N] [--nodes N] [--gpus_per_node N] [OPTIONS]

Say what every rank of the command would do and hold, without a GPU, a process group or the weights: the grid of
ranks, each rank's share of a batch, and its memory: weights, gradients and optimizer by formula, activations and
logits from a step that is traced on tensors without values. COMMAND is one that trains, {default} without a word;
OPTIONS are its own. RECIPE stands for its command and --config, and says its machines itself. Numbers that contradict
one another are refused as at the real start. With images_key the headers of some images are read, for what they come to
in tokens.

  --world_size N      ranks in all
  --nodes N           machines
  --gpus_per_node N   GPUs of each machine, a rank each
  --gpu_memory N      GiB of each GPU: say what of it is left
  --sharding KIND     replicated (as trained now), or by division: zero1, zero2, zero3, fsdp
  --by_formula        bound activations and logits by formula: at once, without torch
  --largest FAMILY    {families}: the models of a family with the settings of the command, the smallest
                      first, up to the first that does not fit --gpu_memory; by formula, and without --pretrain
  --model_tflops N    10^12 operations a second of a device in training, as a run measured them
                      (time/model_tflops): say the samples a minute of a command that only trains
  --cluster NxGPU     64xH100, 8xH200: what a step of rl costs by strategy, in memory, operations, bytes over the
                      network and seconds, which do not fit, and the fastest that does; predicted, by formula
  --model_size SIZE   with --cluster: a published model in place of --pretrain, 32B or qwen3-32B
  --json              one JSON object"""


def run(argv: list[str]) -> int:
    """Print the plan; a run that could not start is refused with the error of the start."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE.format(default=default_command(), families=", ".join(FAMILIES)))
        return 0
    asked = sort_words(argv)
    training = training_of(asked.command)
    if asked.family:
        print(_family(asked, training))
        return 0
    if asked.cluster is not None:
        print(_cluster(asked, asked.cluster, training))
        return 0
    plan = plan_run(asked.request, prepared(training, resolve(asked.command, asked.words)), load(training.workload))
    print(json.dumps(as_object(plan)) if asked.as_json else visible("\n".join(lines(plan))))
    return 0


def _family(asked: Asked, training: TrainingRecord) -> str:
    """Return the page of the models of a family."""

    def resolved(model: Path) -> Resolved[Any]:
        return prepared(training, resolve(asked.command, [*asked.words, "--pretrain", str(model)]))

    fits = list(fits_of_family(asked.family, asked.request, resolved, load(training.workload)))
    if asked.as_json:
        return json.dumps({"family": asked.family, "models": [asdict(fit) for fit in fits]})
    return visible("\n".join(fit_lines(asked.family, asked.request, fits)))


def _cluster(asked: Asked, cluster: Cluster, training: TrainingRecord) -> str:
    """Return the page of the strategies on a cluster."""

    def planned(words: list[str], model: str) -> str:
        resolved = prepared(training, resolve(asked.command, [*asked.words, *words]))
        name = model or str(resolved.values["pretrain"])
        plan = plan_cluster(cluster, name, resolved, load(training.workload), asked.request.model_tflops)
        return json.dumps(cluster_object(plan)) if asked.as_json else visible("\n".join(cluster_lines(plan)))

    if not asked.model_size:
        return planned([], "")
    model, config = known_model(asked.model_size)
    with config_directory(config) as directory:
        return planned(["--pretrain", str(directory)], model)
