"""Tables of docs/scaling.md, from the functions that `rft-train plan --cluster` prints."""

from __future__ import annotations

from functools import cache

from rft.config.commands import load
from rft.planning.cluster.hardware import FIGURES, parse_cluster
from rft.planning.cluster.strategy_costs import ClusterPlan, StrategyCost, plan_cluster
from rft.planning.known_models import known_model
from rft.planning.largest_model import config_directory
from rft_cli.config.plan_words import sort_words
from rft_cli.config.resolve import resolve
from rft_cli.records.discovery import prepared, training_of

WORDS = "qwen2.5-7b-math-8x80gb --rollout_batch_size 1024 --train_batch_size 4096 --off_policy_correction tis"
"""The run of the page, but for cluster and model."""
MODELS = ("7B", "32B", "70B")
CLUSTERS = ("8xH100", "64xH100", "512xH100")
_SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_GIB = 2**30
_SECONDS = ("rollout", "log-probs", "update", "network", "weights", "step")


@cache
def plans(model: str) -> dict[str, ClusterPlan]:
    """Return the plans of a model on all clusters of the page."""
    asked = sort_words(WORDS.split())
    training = training_of(asked.command)
    name, config = known_model(model)
    with config_directory(config) as directory:
        resolved = prepared(training, resolve(asked.command, [*asked.words, "--pretrain", str(directory)]))
        workload, clusters = load(training.workload), [parse_cluster(f"{count}xH100") for count in _SWEEP]
        return {str(cluster): plan_cluster(cluster, name, resolved, workload) for cluster in clusters}


def planned(model: str, cluster: str) -> ClusterPlan:
    """Return the plan of a model on a cluster."""
    return plans(model)[cluster]


def command() -> str:
    """Return the command whose numbers the page shows."""
    words = f"rft-train plan {WORDS} --cluster 64xH100 --model_size 32B"
    return f"```sh\n{words}\n```"


def figures() -> str:
    """Return the constants, each with its kind and source."""
    rows = [f"| {each.name} | {_number(each.value)} {each.unit} | {each.kind} | {each.source} |" for each in FIGURES]
    return "\n".join(["| constant | value | | source |", "|---|---|---|---|", *rows])


def memory() -> str:
    """Return the bytes of a rank by strategy, colocated engines, on 64 GPUs."""
    heads = ("weights", "gradients", "optimizer", "activations", "training", "loading", "engine")
    lines = [f"| | {' | '.join(heads)} | |", "|---" * (len(heads) + 2) + "|"]
    for model in MODELS:
        plan = planned(model, "64xH100")
        lines.append(f"| **{plan.model}** |" + " |" * (len(heads) + 1))
        for cost in _colocated(plan):
            cells = [f"{cost.memory[head] / _GIB:,.1f}" if cost.memory else "" for head in heads]
            lines.append(f"| {cost.name} | {' | '.join(cells)} | {'fits' if cost.fits else _short(cost)} |")
    return "\n".join(lines)


def steps() -> str:
    """Return operations, bytes and seconds of every strategy that fits, model by model and cluster by cluster."""
    lines = [
        "| GPUs | strategy | ranks | PFLOP | GB moved | exchanges, s | " + " | ".join(_SECONDS) + " | tokens/s a GPU |"
    ]
    lines.append("|---" * (7 + len(_SECONDS)) + "|")
    for model in MODELS:
        for cluster in CLUSTERS:
            plan = planned(model, cluster)
            lines.append(f"| **{plan.model}, {cluster}** |" + " |" * (6 + len(_SECONDS)))
            fitting = [cost for cost in plan.costs if cost.fits]
            lines += [_step_row(cost, plan) for cost in fitting]
            if not fitting:
                lines.append(f"| {plan.cluster.num_gpus} | none fits |" + " |" * (5 + len(_SECONDS)))
    return "\n".join(lines)


def limits() -> str:
    """Return where each strategy fits and what it takes more than the chosen one, colocated engines."""
    lines = ["| strategy | " + " | ".join(f"{model} on {cluster}" for model in MODELS for cluster in CLUSTERS) + " |"]
    lines.append("|---" * (1 + len(MODELS) * len(CLUSTERS)) + "|")
    plans = [planned(model, cluster) for model in MODELS for cluster in CLUSTERS]
    names = dict.fromkeys(_kind(cost) for plan in plans for cost in _colocated(plan))
    for name in names:
        lines.append(f"| {name} | " + " | ".join(_verdict(plan, name) for plan in plans) + " |")
    return "\n".join(lines)


def chosen() -> str:
    """Return what is chosen from 8 to 4,096 GPUs, and the share of a step in which a GPU computes."""
    lines = ["| GPUs | " + " | ".join(MODELS) + " |", "|---" * (1 + len(MODELS)) + "|"]
    for count in _SWEEP:
        cells = [_choice(planned(model, f"{count}xH100")) for model in MODELS]
        lines.append(f"| {count:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _colocated(plan: ClusterPlan) -> list[StrategyCost]:
    return [cost for cost in plan.costs if cost.placement == plan.costs[0].placement]


def _kind(cost: StrategyCost) -> str:
    return cost.name.partition(" (")[0]


def _step_row(cost: StrategyCost, plan: ClusterPlan) -> str:
    name = cost.name if cost in _colocated(plan) else f"{cost.name}, {cost.placement}"
    if cost == plan.chosen:
        name = f"**{name}**"
    cells = [f"{cost.flops / 1e15:,.0f}", f"{cost.network_bytes / 1e9:,.0f}", f"{cost.network_seconds:,.1f}"]
    cells += [f"{cost.seconds[each]:,.1f}" for each in _SECONDS]
    cells.append(f"{cost.tokens_a_second:,.0f}")
    return f"| {plan.cluster.num_gpus} | {name} | {cost.num_ranks} | {' | '.join(cells)} |"


def _verdict(plan: ClusterPlan, name: str) -> str:
    cost = next((cost for cost in _colocated(plan) if _kind(cost) == name), None)
    if cost is None:
        return ""
    if not cost.fits:
        return _short(cost)
    assert plan.chosen is not None
    if cost == plan.chosen:
        return "**chosen**"
    more = cost.seconds["step"] / plan.chosen.seconds["step"] - 1
    return f"+{more:.1%}" if more >= 0.0005 else "equal"


def _short(cost: StrategyCost) -> str:
    """Return the reason why a strategy does not fit, as a word with its GiB."""
    if not cost.memory:
        return "refused"
    if cost.memory["training"] > cost.limit_bytes:
        return f"training {cost.memory['training'] / _GIB:,.0f}"
    if cost.memory["loading"] > cost.limit_bytes:
        return f"loading {cost.memory['loading'] / _GIB:,.0f}"
    return f"engine {cost.memory['engine'] / _GIB:,.0f}"


def _choice(plan: ClusterPlan) -> str:
    cost = plan.chosen
    if cost is None:
        return "none fits"
    name = cost.name if cost in _colocated(plan) else f"{cost.name}, {cost.placement}"
    return f"{name}: {cost.seconds['step']:,.0f} s, {cost.tokens_a_second:,.0f} tokens/s a GPU"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:.3g}"


PARTS = {
    "scaling-command": command,
    "scaling-figures": figures,
    "scaling-memory": memory,
    "scaling-steps": steps,
    "scaling-limits": limits,
    "scaling-chosen": chosen,
}
