"""The summary of a profile as a record and as a page."""

from __future__ import annotations

from dataclasses import replace

from rft_trainer.sinks.profile.host_reads import ON_GPU, ReadPlace
from rft_trainer.sinks.profile.steps import ProfiledSteps
from rft_trainer.sinks.profile.summary import Profiled, page_of, record_of
from rft_trainer.sinks.profile.trace import DeviceUse, TracedOperation, TraceSums

ROWS = [
    {"step": 3, "time/step": 1.0, "time/data": 0.5, "time/train": 0.5, "time/other": 0.0},
    {"step": 4, "time/step": 3.0, "time/data": 1.5, "time/train": 1.3, "time/other": 0.2},
]
GPU = Profiled(
    run="fox",
    command="sft",
    device="cuda:0 (a card)",
    world_size=8,
    steps=ProfiledSteps(3, 4),
    rows=ROWS,
    rows_before=[{"step": 2, "time/step": 1.5}],
    sums=TraceSums(
        [TracedOperation("gemm<a|b>", "train", 6, 0.0, 1.0), TracedOperation("aten::mm", "train", 4, 0.2, 0.0)],
        {"data": 1.8},
        DeviceUse(1.2, 10, 0.4),
    ),
    reads=[ReadPlace("a.py:3 (f)", "x.item()", 6), ReadPlace("b.py:1 (g)", "if a | b:", 2)],
    how_read=ON_GPU,
    trace="rank_0.trace.json.gz",
)


def test_a_record_has_the_means_of_a_step() -> None:
    record = record_of(GPU)
    assert (record["seconds_a_step"], record["seconds_a_step_before"], record["num_steps"]) == (2.0, 1.5, 2)
    assert record["phases"][0] == {"name": "data", "seconds": 1.0, "share": 0.5, "outside_of_torch": 0.9}
    assert [row["name"] for row in record["phases"]] == ["data", "train", "other"]
    assert record["operations"][0]["calls"] == 3
    assert record["operations"][1] == {
        "name": "aten::mm",
        "phase": "train",
        "calls": 2.0,
        "host_seconds": 0.1,
        "device_seconds": 0.0,
    }
    assert record["gpu"] == {"busy_share": 0.3, "kernels": 5.0, "host_waits_seconds": 0.2}
    assert record["host_reads"]["a_step"] == 4.0
    assert record["host_reads"]["places"][0] == {"place": "a.py:3 (f)", "code": "x.item()", "count": 3.0}
    assert record["bound"]["code"] == "data_bound"


def test_a_page_names_what_bounds_the_speed_and_the_one_change() -> None:
    page = page_of(record_of(GPU))
    assert page.startswith("# Profile of steps 3 to 4 of fox\n")
    assert "A step took 2.0000 s while it was recorded, and 1.5000 s before." in page
    assert "**What bounds the speed**: the steps waited for their rows in 50% of their time." in page
    assert "**What to change**: --num_workers 2" in page
    assert "| data | 1.0000 | 50.0% | 0.9000 |" in page
    assert "| `gemm<a\\|b>` | train | 3.0 | 0.0000 | 0.5000 |" in page
    assert "The GPU computed in 30.0% of the time (5 kernels and copies a step)" in page
    assert f"4.0 a step: {ON_GPU}." in page
    assert "| 1.0 | b.py:1 (g) | `if a \\| b:` |" in page
    assert "rank 0 of 8" in page


def test_a_page_of_a_cpu_has_no_column_of_a_gpu() -> None:
    sums = TraceSums(GPU.sums.operations, {}, None)
    page = page_of(
        record_of(replace(GPU, sums=sums, reads=[], how_read="", why_unread="why", rows_before=[], trace=""))
    )
    assert "GPU" not in page
    assert "They were not counted: why." in page
    assert "recorded.\n" in page
    assert "perfetto" not in page
