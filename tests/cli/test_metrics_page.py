"""docs/metrics.md: a run emits no metric that is not documented, and none is documented that no run emits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_trainer.metrics.phase_timer import Phase

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """The first column of every table but the last."""
    text = PAGE.read_text().partition("## Reading them")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", text, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def emitted(
    bench: Any, base_words: dict[str, list[str]], call: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> set[str]:
    """Every name in the rows of runs that use everything."""
    names: set[str] = set()
    words = [
        ("rl", f"--init_kl_coef 0.5 --use_kl_loss --entropy_coef 0.1 --teacher_pretrain {bench.model}"),
        ("sft", "--z_loss_coef 0.1"),
        ("rl", "--reward gsm8k"),
    ]
    words += [("dpo", ""), ("dpo", "--loss_type kto --enable_ema")]
    words.append(("rl", f"--filter_groups --reward {bench.reward}:few_signals"))
    words.append(("rl", "--advantage_estimator gae --kl_target 0.01 --advantage_clip 0.1 --reward_clip 0.5"))
    words.append(("rl", "--off_policy_correction tis --high_entropy_token_ratio 0.5 --off_policy_delta 0.1"))
    words.append(("rl", "--overlong_buffer --length_penalty --entropy_coef 0.1 --entropy_target 1"))
    words += [("rl", f"--advantage_estimator {name}") for name in ("cpgd", "kl_cov")]
    words.append(("rl", f"--advantage_estimator remax --max_unscored_share 1 --reward {bench.reward}:not_greedy"))
    words.append(("rl", f"--max_unscored_share 1 --reward {bench.reward}:lonely"))
    conversation = f"--environment {bench.root}/environment.py:Talker --tool_call_pattern (?P<arguments>[a-c]+)"
    words.append(("rl", f"--reward= --apply_chat_template --generate_max_len 80 {conversation}"))
    several = f"--eval_data one={bench.held_out},two={bench.root / 'other.jsonl'}"
    words.append(("sft", several))
    # at such a temperature responses are equal
    words += [("rl", "--max_staleness 1 --temperature 0.01"), ("sft", "--fp16 --enable_ema"), ("rl", "--enable_ema")]
    rows = bench.root / "heldout.jsonl"
    sets = f"--eval_data one={rows},two={bench.root / 'other.jsonl'} --pretrain_data {rows}"
    words.append(("rl", f"--eval_n 2 --eval_temperature 1 --eval_pick reward {sets}"))
    words += [("rm", "--enable_ema --tie_margin 0.5"), ("rm", "--heads_types right,better")]
    steps = bench.root / "steps.jsonl"
    labelled = [{"prompt": f"{n}+1", "completions": ["1+1", "2+2"], "labels": [1, n % 2]} for n in range(8)]
    steps.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    of_steps = f"--loss_type steps --step_separator = --prompt_data {steps} --eval_data {steps}"
    words.append(("rm", f"{of_steps} --input_key prompt --chosen_key chosen --rejected_key rejected"))
    words.append(("sft", f"--aux_loss_coef 0.1 --pretrain {bench.experts}"))
    words += [("pretrain", "--z_loss_coef 0.1"), ("rl", f"--pretrain {bench.experts}")]
    for number, (command, more) in enumerate(words):
        path = tmp_path_factory.mktemp("runs") / str(number)
        ended = call(command, *base_words[command], *more.split(), "--save_path", path)
        assert ended.code == 0, ended.err
        for file in ("metrics.jsonl", "evals.jsonl"):
            names = names.union(*(json.loads(line) for line in (path / file).read_text().splitlines()))
    return names


def general(name: str) -> str:
    """The pattern that stands for a family of names."""
    if name in ("reward/correctness", "reward/format"):
        return "reward/<part>"
    if name.startswith("reward/unscored_"):
        return "reward/unscored_<kind>"
    if name in ("rm/accuracy_right", "rm/accuracy_better"):
        return "rm/accuracy_<head>"
    for head in ("right", "better"):
        if name.startswith(f"eval/accuracy_{head}"):
            return name.replace(head, "<head>")
    if name.startswith("router/max_violation_layer_"):
        return "router/max_violation_layer_<n>"
    if name.startswith("router/entropy_layer_"):
        return "router/entropy_layer_<n>"
    if name.startswith("reward/status_"):
        return "reward/status_<status>"
    if name.startswith(("eval/one/", "eval/two/")):
        return general(f"eval/{name.split('/')[2]}").replace("eval/", "eval/SET/")
    if name.startswith(("eval/hit@", "eval/pass@", "eval/maj@", "eval/best@", "eval/picked@")):
        return f"{name.partition('@')[0]}@K"
    phase = name.removeprefix("time/share_")
    return "time/share_<phase>" if name != phase and phase in {*Phase, "other"} else name


def test_no_metric_is_undocumented(emitted: set[str]) -> None:
    assert {general(name) for name in emitted} - documented() == set()


def test_no_documented_metric_is_dead(emitted: set[str]) -> None:
    guard = "packages/rft-trainer/tests/update/test_numeric_guard.py"
    elsewhere = {
        # needs vLLM, which has an environment of its own
        "engine/probe_gap": "tests/vllm/test_real_training.py",
        # of a GPU
        "time/mfu": "packages/rft-trainer/tests/metrics/test_compute_meter.py",
        "memory/peak_device_mib": "packages/rft-trainer/tests/metrics/test_compute_meter.py",
        "memory/held_device_mib": "packages/rft-trainer/tests/metrics/test_compute_meter.py",
        "memory/room_device_mib": "packages/rft-trainer/tests/metrics/test_compute_meter.py",
        # of several ranks
        "time/slowest_rank": "packages/rft-trainer/tests/metrics/test_totals.py",
        "time/slowest_rank_ratio": "packages/rft-trainer/tests/metrics/test_totals.py",
        # of several ranks, and of more steps than these runs have
        **{
            f"memory/{kind}_{what}": "packages/rft-trainer/tests/metrics/test_memory_growth.py"
            for kind in ("growth", "slow_growth", "long_growth", "device_growth")
            for what in ("mib", "rank", "steps_left")
        },
        "memory/largest_rss_mib": "packages/rft-trainer/tests/metrics/test_memory_growth.py",
        "memory/largest_rss_rank": "packages/rft-trainer/tests/metrics/test_memory_growth.py",
        # of an evaluation within a constraint
        "eval/hit@": "tests/additions/test_constrained_task.py",
        # there once a step was not as it should be, which no run of these has
        "policy/rows_set_aside": guard,
        "policy/rows_left_out": guard,
        "policy/updates_repeated": guard,
        "policy/spikes": guard,
        "policy/largest_rows": guard,
        "policy/micro_batch_halvings": guard,
    }
    assert all(name in (PAGE.parents[1] / file).read_text() for name, file in elsewhere.items())
    assert documented() - {general(name) for name in emitted} == {general(name) for name in elsewhere}
