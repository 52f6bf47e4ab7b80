"""`rft-train plan --cluster`: what fits, what grows with the cluster, what is chosen, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands import plan
from rft_core.errors import OptionsError
from rft_dist.planning.memory_estimate import GIB

ROOT = Path(__file__).parents[4]
SETTINGS = "--rollout_batch_size 1024 --train_batch_size 4096 --off_policy_correction tis"
RUN = ["qwen2.5-7b-math-8x80gb", *SETTINGS.split()]
LIMIT = int(79 * GIB * 0.9)


def planned(cluster: str, model: str, *more: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The plan as an object."""
    assert plan.run([*RUN, "--cluster", cluster, "--model_size", model, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def row(told: dict[str, Any], name: str) -> dict[str, Any]:
    """The first row of a strategy: that with engines on the ranks' GPUs."""
    return next(cost for cost in told["costs"] if cost["name"].startswith(name))


def test_the_chosen_strategy_fits_and_is_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    for cluster, model in (("8xH100", "7B"), ("64xH100", "32B"), ("512xH100", "70B")):
        told = planned(cluster, model, capsys=capsys)
        chosen = told["costs"][told["chosen"]]
        assert chosen["fits"]
        assert max(chosen["memory"][name] for name in ("training", "loading", "generating")) <= LIMIT
        steps = [cost["seconds"]["step"] for cost in told["costs"] if cost["fits"]]
        assert chosen["seconds"]["step"] <= 1.01 * min(steps)


def test_replicas_of_70_billion_parameters_do_not_fit_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned("8xH100", "70B", capsys=capsys)
    replicas = row(told, "replicas")
    # bfloat16 weights, and gradients, two moments and master copies in float32
    state = 18 * told["parameters"]
    assert state < replicas["memory"]["training"] < 1.1 * state
    assert replicas["problem"].startswith("does not fit: 1,216 of 71 GiB in training, most of it optimizer")
    assert told["chosen"] is None
    assert plan.run([*RUN, "--cluster", "8xH100", "--model_size", "70B"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "chosen       none fits"


def test_more_gpus_need_no_more_memory_and_no_more_time(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [planned(f"{count}xH100", "7B", capsys=capsys) for count in (8, 64, 512)]
    for name in ("FSDP2", "ZeRO 2", "ZeRO 3"):
        rows = [row(told, name) for told in plans]
        training = [each["memory"]["training"] for each in rows]
        assert training == sorted(training, reverse=True)
        assert [each["flops"] * each["num_ranks"] for each in rows] == pytest.approx([rows[0]["flops"] * 8] * 3)
        steps = [each["seconds"]["step"] for each in rows]
        assert steps == sorted(steps, reverse=True)
    # what is left is that an engine reads all weights for fewer samples
    rates = [row(told, "FSDP2")["tokens_a_second"] for told in plans]
    assert rates == sorted(rates, reverse=True)


def test_a_step_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned("8xH100", "7B", "--model_tflops", "400", capsys=capsys)
    matrices, samples, tokens = 28 * (2 * 3584 * 4096 + 3 * 3584 * 18944) + 152064 * 3584, 8192, 4096
    forward = 2 * matrices * tokens + 2 * 28 * 3584 * tokens**2
    fsdp = row(told, "FSDP2")
    assert fsdp["flops"] == pytest.approx(5 * samples * forward / 8)
    assert fsdp["seconds"]["log-probs"] == pytest.approx(samples * forward / 8 / 400e12)
    # 1,024 samples a rank in micro-batches of four: a gather for the log-probs, two gathers and a sum for the update,
    # in all of P elements of 2 + 2 x 2 + 4 bytes; and one gather for the engine
    moved = 7 / 8 * told["parameters"] * (256 * (2 + 4 + 4) + 2)
    assert fsdp["network_bytes"] == pytest.approx(moved)
    parts = fsdp["seconds"]
    assert parts["step"] == pytest.approx(sum(value for name, value in parts.items() if name != "step"))


def test_engines_on_gpus_of_their_own_draw_while_the_policy_trains(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned("512xH100", "70B", capsys=capsys)
    chosen = told["costs"][told["chosen"]]
    parts = chosen["seconds"]
    training = parts["log-probs"] + parts["update"] + parts["network"]
    assert parts["step"] == pytest.approx(max(parts["rollout"], training) + parts["weights"])
    assert chosen["num_ranks"] == 128
    for flag in ("--fsdp", "--nproc 2", "--engine_tp_size 2", "--max_staleness 1"):
        assert flag in chosen["flags"]


def test_heads_that_do_not_divide_leave_a_tensor_group_out(capsys: pytest.CaptureFixture[str]) -> None:
    names = {cost["name"] for cost in planned("8xH100", "7B", capsys=capsys)["costs"]}
    assert "tensor parallel (8)" not in names


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("rl --model_size 32B", "plan.no_cluster"),
        ("rl --cluster 64xH100 --gpu_memory 80", "plan.two_machines"),
        ("rl --cluster 64xH100 --by_formula", "plan.two_machines"),
        ("rl --cluster 64xH100 --model_size 32B --pretrain x", "plan.two_models"),
        ("rl --cluster 64xH100 --model_size 33B", "plan.model_size"),
        ("rl --cluster 64xB7 --model_size 32B", "plan.cluster"),
        ("sft --cluster 64xH100 --model_size 32B", "plan.cluster_setting"),
        ("rl --cluster 64xH100 --model_size 32B --adam_offload", "plan.cluster_setting"),
        ("rl --cluster 64xH100 --model_size 32B --sp_size 2", "plan.cluster_setting"),
        ("rl --cluster 64xH100 --model_size 32B --engine_type native", "plan.cluster_setting"),
    ],
)
def test_what_a_cluster_cannot_be_planned_for_is_refused(words: str, code: str) -> None:
    with pytest.raises(OptionsError) as caught:
        plan.run(words.split())
    assert caught.value.problem.code == code


def test_the_page_has_the_numbers_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert f"rft-train plan {' '.join(RUN)} --cluster 64xH100 --model_size 32B" in page
    for cluster, model in (("8xH100", "7B"), ("64xH100", "32B")):
        told = planned(cluster, model, capsys=capsys)
        chosen = told["costs"][told["chosen"]]
        cells = [f"{chosen['seconds'][name]:,.1f}" for name in ("rollout", "log-probs", "update")]
        assert f"| **{chosen['name']}" in page
        assert f"| {' | '.join(cells)} |" in page
