"""Does every algorithm learn? Each one from the same warm start, on arithmetic, for the same steps, on three seeds.

    python benchmarks/learning_matrix.py                      all of it, then the page and the plot in docs/
    python benchmarks/learning_matrix.py --only grpo,gae      some of it; results are kept and merged

Task: "7+15=" -> "0224", the sum in three digits and then the sum of its digits modulo 10 (5 sampled
tokens with the end), for 400 problems. A small decoder learns them by supervised training on answers of
which half have a wrong check digit, so that it is right about half of the time and cannot know when; that
model is the start of every run of its seed. Every run is the command `rft-train rl` with the published
setting of its algorithm, beside: 48 steps of 32 prompts x 8 samples in two optimizer steps each, constant
learning rate 1e-4 (critic 3e-3), no other change.

Before is the mean reward of the first six steps, after that of the last six; each step's mean over its
32 prompts is one measurement, and the standard error is that of the difference of the two means.
Learned means: on every seed after less before is above three standard errors. The control has its
rewards shuffled within each group and must not gain more than three; it may lose, for noise destroys.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import get_args

from rft_trainer.settings.algorithm import KlEstimator, OffPolicyCorrection, PolicyLoss

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning_matrix.json"
PAGE, PLOT = ROOT / "docs" / "learning-matrix.md", ROOT / "docs" / "learning-matrix.svg"
REWARD = Path(__file__).with_name("learning_reward.py")
SEEDS = (0, 1, 2)
NUM_STEPS, CURVE_POINTS, WINDOW = 48, 12, 6
NUM_OPERANDS, COPIES = 20, 6
SURROGATES = tuple(get_args(PolicyLoss))
CORRECTIONS = tuple(name for name in get_args(OffPolicyCorrection) if name != "off")
OTHERS = {
    "clip-higher": "--eps_clip 0.2 --eps_clip_high 0.28",
    "high-entropy tokens (0.5)": "--high_entropy_token_ratio 0.5",
    "off-policy sequence mask": "--off_policy_delta 0.1",
    "FIRE": "--use_fire --first_token_temperature 2",
    "dynamic sampling": "--dynamic_sampling",
    "k1 in the reward": "--kl_estimator k1 --init_kl_coef 0.01 --no-use_kl_loss",
    **{
        f"{name} in the loss": f"--kl_estimator {name} --init_kl_coef 0.01 --use_kl_loss"
        for name in get_args(KlEstimator)
        if name != "k1"  # its gradient in the loss is that of no divergence
    },
    "veto of a token": "--off_policy_correction tis --off_policy_veto 0.0001",
    "entropy bonus": "--entropy_coef 0.001",
    "seq-mean-token-sum-norm": "--loss_agg_mode seq-mean-token-sum-norm",
    "advantage normalisation": "--advantages_norm",
    "running scale": "--reward_running_norm",
}
CONTROL = "shuffled rewards (control)"
EXPLAINED = {
    "pass_at_k": "learns on every seed until about 0.73 are right and stops: it asks for one right answer in k = 4, "
    "which is then there 99.5 times of 100 (1 - 0.27^4), and a group with more than four right has no signal left",
    "best_of_group": "only the best response of a group is learned, and only where it is the only one: with rewards "
    "of 0 and 1 and half of the answers right, hardly any group of eight has exactly one",
}
"""Why a row that does not pass on every seed is not wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the matrix."""

    name: str
    kind: str
    words: str


def cases() -> list[Case]:
    """Every estimator whole, every surrogate on group_norm, and what else changes the objective."""
    from rft_algos.algorithms.published import PUBLISHED

    base = "--init_kl_coef 0"
    rows = [Case(record.name, "algorithm", f"--advantage_estimator {record.name}") for record in PUBLISHED]
    rows += [
        Case(
            f"group_norm + {name}",
            "surrogate",
            f"{base} --policy_loss {name} --loss_agg_mode seq-mean-token-mean",
        )
        for name in SURROGATES
    ]
    for name in CORRECTIONS:
        rows.append(Case(f"group_norm + {name}", "correction", f"{base} --off_policy_correction {name}"))
    rows += [
        Case(f"group_norm + {name}", "other", words if "--init_kl_coef" in words else f"{base} {words}")
        for name, words in OTHERS.items()
    ]
    return [*rows, Case(CONTROL, "control", f"{base} --shuffle_rewards")]


def call(words: list[str]) -> None:
    """Run the program in this process; what it prints is shown only where it fails."""
    from rft_cli.main import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(words)
    if code:
        sys.exit(f"rft-train {' '.join(words)}\nended with {code}:\n{printed.getvalue()[-3000:]}")


def answer(first: int, second: int, off: int = 0) -> str:
    """Sum in three digits, then the sum of its digits modulo 10, or another digit where `off` is not 0."""
    text = f"{first + second:03d}"
    return text + str((sum(map(int, text)) + off) % 10)


def warm_start(work: Path, seed: int) -> Path:
    """The model that every run of this seed starts from; made once."""
    from rft_core.keyed_random import derive_key, uniforms
    from rft_models.tiny_models.text import build_character_model

    home = work / f"seed_{seed}"
    done = home / "warm" / "summary.json"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        pairs = [(a, b) for a in range(NUM_OPERANDS) for b in range(NUM_OPERANDS)]
        wrong = uniforms([derive_key(seed, "wrong", copy) for copy in range(COPIES)], len(pairs)) < 0.5
        taught = [
            {"input": f"{a}+{b}=", "output": answer(a, b, off=int(wrong[copy, index]))}
            for copy in range(COPIES)
            for index, (a, b) in enumerate(pairs)
        ]
        asked = [{"input": f"{a}+{b}=", "label": answer(a, b)} for a, b in pairs]
        for name, rows in (("taught", taught), ("asked", asked)):
            (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        build_character_model(home / "untrained", alphabet="0123456789+=", seed=seed)
        call(
            f"sft --pretrain {home}/untrained --prompt_data {home}/taught.jsonl --train_batch_size 128 "
            "--micro_train_batch_size 128 --max_steps 1200 --max_epochs 60 --held_out_rows 400 --target_loss 0.17 "
            "--learning_rate 1e-3 --lr_schedule constant --lr_warmup_ratio 0 --adam_betas 0.9 0.98 --eval_steps 10 "
            f"--save_interval 0 --max_ckpt_num 1 --seed {seed} --save_path {home}/warm".split()
        )
    return next(iter(sorted((home / "warm" / "checkpoints").glob("step_*")))) / "model"


def run(case: Case, seed: int, work: Path) -> dict[str, object]:
    """One run and what it learned."""
    model, home = warm_start(work, seed), work / f"seed_{seed}"
    path = home / "run"
    shutil.rmtree(path, ignore_errors=True)
    function = {"gdpo": "parts", "process_grpo": "steps"}.get(case.name, "right")
    begin = time.monotonic()
    call(
        f"rl --pretrain {model} --prompt_data {home}/asked.jsonl --reward {REWARD}:{function} "
        "--num_episodes 9 --rollout_batch_size 32 --n_samples_per_prompt 8 "
        "--train_batch_size 128 --micro_train_batch_size 256 --micro_rollout_batch_size 256 --generate_max_len 6 "
        "--prompt_max_len 16 --actor_learning_rate 1e-4 --critic_learning_rate 3e-3 --lr_schedule constant "
        f"--lr_warmup_ratio 0 --adam_betas 0.9 0.98 --max_steps {NUM_STEPS} --eval_steps 0 --save_interval 0 "
        "--save_minutes 0 --max_ckpt_num 1 --no-save_trajectories "
        f"--seed {seed} --save_path {path} {case.words}".split()
    )
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    width = NUM_STEPS // CURVE_POINTS
    rewards = [row["reward/mean"] for row in rows]
    before, after = rewards[:WINDOW], rewards[-WINDOW:]
    shutil.rmtree(path)
    return {
        "before": fmean(before),
        "after": fmean(after),
        "standard_error": math.sqrt((variance(before) + variance(after)) / WINDOW),
        "curve": [round(fmean(rewards[i : i + width]), 4) for i in range(0, len(rewards), width)],
        "seconds": round(time.monotonic() - begin, 1),
    }


def errors_above(run: dict[str, float]) -> float:
    """The change in standard errors."""
    return (run["after"] - run["before"]) / max(run["standard_error"], 1e-9)


def learned(runs: list[dict[str, float]]) -> bool:
    """Above three standard errors on every seed."""
    return all(run["after"] - run["before"] > 3 * run["standard_error"] for run in runs)


def verdict(name: str, runs: list[dict[str, float]]) -> str:
    """A word for the table."""
    if name == CONTROL:
        no_gain = all(run["after"] - run["before"] <= 3 * run["standard_error"] for run in runs)
        return "no gain" if no_gain else "GAINED"
    return "learned" if learned(runs) else "explained" if name in EXPLAINED else "not on every seed"


def page(results: dict[str, dict[str, object]]) -> Iterator[str]:
    """The table as Markdown."""
    text = (__doc__ or "").strip()
    yield "# Learning matrix\n\nWritten by `python benchmarks/learning_matrix.py`; figures are as measured.\n\n"
    yield text.partition("Task:")[1] + text.partition("Task:")[2] + "\n\n![curves](learning-matrix.svg)\n"
    yield "\nNot above three standard errors on every seed, and why:\n\n"
    yield "".join(f"- `{name}` {why}.\n" for name, why in EXPLAINED.items())
    for kind in ("algorithm", "surrogate", "correction", "other", "control"):
        chosen = {name: row for name, row in results.items() if row["kind"] == kind}
        yield f"\n## {kind.capitalize()}\n\n"
        yield "| run | flags | before | after | change / standard error | |\n|---|---|---|---|---|---|\n"
        for name, row in chosen.items():
            runs = [row["seeds"][str(seed)] for seed in SEEDS]  # type: ignore[index]
            before = " ".join(f"{run['before']:.3f}" for run in runs)
            after = " ".join(f"{run['after']:.3f}" for run in runs)
            ratio = " ".join(f"{errors_above(run):+.1f}" for run in runs)
            yield f"| {name} | `{row['words']}` | {before} | {after} | {ratio} | {verdict(name, runs)} |\n"


def plot(results: dict[str, dict[str, object]]) -> None:
    """Mean reward of the rollouts over the steps, one panel a row, a line a seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rft"
    from matplotlib import pyplot

    names = list(results)
    columns = 6
    height = -(-len(names) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(14, 1.7 * height), sharex=True, sharey=True)
    steps = [NUM_STEPS / CURVE_POINTS * (i + 0.5) for i in range(CURVE_POINTS)]
    for axis, name in zip(axes.flat, names, strict=False):
        for seed in SEEDS:
            axis.plot(steps, results[name]["seeds"][str(seed)]["curve"], linewidth=1)  # type: ignore[index]
        axis.set_title(name.replace("group_norm + ", "+ "), fontsize=7)
        axis.tick_params(labelsize=6)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("mean reward of the rollouts", fontsize=8)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> int:
    """Run, merge, write."""
    parser = argparse.ArgumentParser(description="Every algorithm from one warm start, on three seeds.")
    parser.add_argument("--only", default="", help="names, joined by commas")
    parser.add_argument("--work", default="runs/learning-matrix", help="where warm starts are kept")
    parser.add_argument("--again", action="store_true", help="run also what the results hold already")
    arguments = parser.parse_args()
    work = Path(arguments.work).resolve()
    wanted = {name for name in arguments.only.split(",") if name}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = cases()
    for case in rows:
        if wanted and case.name not in wanted:
            continue
        known = results.get(case.name, {})
        if known.get("words") != case.words or arguments.again:
            known = {"kind": case.kind, "words": case.words, "seeds": {}}
        for seed in SEEDS:
            if str(seed) not in known["seeds"]:
                known["seeds"][str(seed)] = run(case, seed, work)
        results[case.name] = known
        runs = [known["seeds"][str(seed)] for seed in SEEDS]
        shown = "  ".join(f"{r['before']:.3f}->{r['after']:.3f} ({r['seconds']:.0f} s)" for r in runs)
        print(f"{case.name:<36} {verdict(case.name, runs):<18} {shown}", flush=True)
        ordered = {row.name: results[row.name] for row in rows if row.name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    complete = {row.name: results[row.name] for row in rows if row.name in results}
    if len(complete) == len(rows):
        PAGE.write_text("".join(page(complete)))
        plot(complete)
    verdicts = {name: verdict(name, list(row["seeds"].values())) for name, row in complete.items()}
    poor = [name for name, word in verdicts.items() if word not in ("learned", "no gain", "explained")]
    print(f"{len(complete)} of {len(rows)} rows; not learned: {', '.join(poor) or 'none'}")
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
