"""Do conversations learn? The two quickstarts with an environment on several seeds, evaluated in three ways.

    python benchmarks/dialogues.py                                    both, seeds 0, 1 and 2
    python benchmarks/dialogues.py --task guess-number --seeds 0      some of it; results are kept and merged

Each run is the command `rft-train quickstart --task TASK --seed SEED`. Its warm start and its last weights are
evaluated on the held-out prompts greedily, at temperature 1 (`--draws` keyed conversations a prompt), and greedily
with answers that say nothing (the environment TASK-noise): who succeeds there did not listen. The row of a run also
holds its seconds and the mean success of its first and last ten steps. Writes benchmarks/results/dialogues.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
RESULTS = Path(__file__).parent / "results" / "dialogues.json"
TASKS = ("calculator", "guess-number")
WINDOW = 10


def main() -> None:
    """Run what is missing, then print the table of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, action="append", help="one of them; both unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=8, help="conversations a prompt at temperature 1")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/dialogues"), help="where the runs go; theirs are reused"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    for task in given.task or TASKS:
        for seed in given.seeds:
            rows[f"{task} {seed}"] = measured(given.runs / f"{task}-{seed}", task, seed, given.draws)
            given.output.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(table(rows))


def measured(path: Path, task: str, seed: int, draws: int) -> dict[str, Any]:
    """One run, trained if it is not there, and its evaluations."""
    from rft.run_lifecycle import final_model
    from rft_cli.commands.quickstart import command

    row: dict[str, Any] = {"task": task, "seed": seed}
    if not (path / "summary.json").exists():
        started = time.monotonic()
        command.run(["--task", task, "--seed", str(seed), "--save_path", str(path)])
        (path / "seconds.json").write_text(json.dumps(time.monotonic() - started))
    row["seconds"] = json.loads((path / "seconds.json").read_text())
    rewards = [json.loads(line)["reward/mean"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    row["steps"], row["trained"] = len(rewards), [fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])]
    for name, model in (("before", final_model(path / command.WARM_START)), ("after", final_model(path))):
        row[name] = {
            "greedy": evaluation(path, model, task, []),
            "sampled": pooled(
                [evaluation(path, model, task, ["--temperature", "1", "--seed", str(n)]) for n in range(draws)]
            ),
            "noise": evaluation(path, model, task, ["--environment", f"{task}-noise"]),
        }
    return row


def evaluation(path: Path, model: Path, task: str, more: Sequence[str]) -> dict[str, Any]:
    """One conversation for each held-out prompt."""
    from rft.process.machine import open_machine
    from rft_cli.commands import eval as eval_command
    from rft_cli.commands.quickstart.tasks import TASKS as CHOICES
    from rft_cli.config.resolve import resolve

    words = ["--pretrain", str(model), "--eval_data", str(path / "data" / "heldout.jsonl")]
    resolved = resolve("eval", [*words, *CHOICES[task].eval_words, *more])
    with open_machine(resolved.settings.model.device) as machine:
        result, _, _ = eval_command.evaluate(resolved, machine)
    return {name.removeprefix("eval/"): value for name, value in result.as_record().items()}


def pooled(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Evaluations of the same prompts under different keys as one; shares of calls are means over them."""
    names = [name for name in results[0] if all(name in one for one in results)]
    sums = ("n", "unscored", "truncated")
    return {name: (sum if name in sums else fmean)(one[name] for one in results) for name in names}


def table(rows: dict[str, Any]) -> str:
    """Success and calls before and after, a line a run."""
    lines = [
        "| task, seed | greedy | sampled | noise | turns with a call | calls read | n | seconds |",
        "|" + "---|" * 8,
    ]
    for row in rows.values():
        cells = [f"{row['task']}, {row['seed']}"]
        cells += [change(row, kind, "accuracy") for kind in ("greedy", "sampled", "noise")]
        cells += [change(row, "sampled", "call_share"), change(row, "sampled", "well_formed_share")]
        cells += [str(row["after"]["greedy"]["n"]), f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def change(row: dict[str, Any], kind: str, name: str) -> str:
    """`before -> after` in per cent."""
    ends = [row[end][kind].get(name) for end in ("before", "after")]
    return " -> ".join("-" if end is None else f"{end:.1%}" for end in ends)


if __name__ == "__main__":
    main()
