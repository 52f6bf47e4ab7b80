"""Findings on drivers and GPUs, of planted machines."""

from dataclasses import replace

import pytest

from rft.installation.devices import Card, Holder, Memory, TorchBuild, gpus, memory, runs_on

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "compute_120")
CU126 = (
    "uv pip install torch --index-url https://download.pytorch.org/whl/cu126 (built for a CUDA that the driver has), "
    "or a driver of "
)


def build(*, num_devices: int = 0, cuda: str | None = "13.0") -> TorchBuild:
    return TorchBuild("2.13.0", cuda, ARCHITECTURES if num_devices else (), num_devices)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ARCHITECTURES, True),
        ((8, 6), ARCHITECTURES, True),  # code for 8.0 runs on 8.6
        ((7, 0), ARCHITECTURES, False),  # older than every build
        ((6, 1), ("compute_50",), True),  # compiled by the driver
        ((9, 0), ("sm_80",), False),  # another major version
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100a",), False),  # bound to one capability
        ((10, 3), ("sm_100f",), True),  # good for its family
        ((12, 0), ARCHITECTURES, True),
        ((9, 0), (), False),
    ],
)
def test_a_card_runs_where_the_build_has_code_for_it(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(capability, architectures) is runs


def test_a_card_without_kernels_is_a_problem() -> None:
    cards = [Card("NVIDIA H100", (9, 0), True), Card("Tesla V100", (7, 0), False), Card("T4", (7, 5), False)]
    findings = gpus(build(num_devices=3), cards, "580.1", None)
    assert [f.verdict for f in findings] == ["ok", "ok", "ok", "problem", "note"]
    assert "no kernel image" in findings[3].why
    assert findings[3].do == "a torch that is built for sm_70"


@pytest.mark.parametrize(
    ("driver", "hidden", "cuda", "verdict", "do"),
    [
        (None, None, "13.0", "ok", ""),
        ("550.1", "", "13.0", "note", "unset CUDA_VISIBLE_DEVICES"),
        ("550.1", None, None, "problem", "uv sync --reinstall-package torch"),
        ("580.1", None, "13.0", "problem", "nvidia-smi -L (it lists the GPUs that are handed to this one)"),
        ("580.1", None, "14.0", "problem", "nvidia-smi -L (it lists the GPUs that are handed to this one)"),
        ("unknown", None, "13.0", "problem", "nvidia-smi -L (it lists the GPUs that are handed to this one)"),
        ("550.1", None, "13.0", "problem", CU126 + "580 or newer"),
        ("525.1", "0", "13.0", "problem", CU126 + "580 or newer"),
        ("470.1", None, "12.6", "problem", "a driver of 525 or newer"),
        ("390.1", None, "13.0", "problem", "a driver of 580 or newer"),
    ],
)
def test_gpus_that_torch_does_not_see_are_explained(
    driver: str | None, hidden: str | None, cuda: str | None, verdict: str, do: str
) -> None:
    finding = gpus(build(cuda=cuda), [], driver, hidden)[1]
    assert (finding.verdict, finding.do) == (verdict, do)


@pytest.mark.parametrize(
    ("driver_cuda", "cuda", "why"),
    [
        ("13.3", "14.0", "it supports CUDA 13.3, and torch 2.13.0 is built for CUDA 14.0, which needs a driver that"),
        ("12.4", "13.0", "it supports CUDA 12.4, and torch 2.13.0 is built for CUDA 13.0, which needs driver 580"),
        ("13.0", "13.4", "another container"),  # any minor version of a major one
        ("14.1", "13.0", "another container"),
        ("14.1", "15.2", "it supports CUDA 14.1, and torch 2.13.0 is built for CUDA 15.2"),
    ],
)
def test_what_the_driver_says_it_supports_decides_beyond_the_table(driver_cuda: str, cuda: str, why: str) -> None:
    finding = gpus(replace(build(cuda=cuda), driver_cuda=driver_cuda), [], "999.1", None)[1]
    assert finding.verdict == "problem"
    assert why in finding.why


@pytest.mark.parametrize(
    ("loaded", "verdict"),
    [((9, 10, 2), "ok"), ((9, 12, 0), "ok"), ((9, 8, 0), "problem"), ((8, 9, 7), "problem"), ((10, 0, 0), "problem")],
)
def test_another_cudnn_than_that_of_the_build_is_a_problem(loaded: tuple[int, ...], verdict: str) -> None:
    found = replace(build(num_devices=1), cudnn_built=(9, 10, 2), cudnn_loaded=loaded)
    finding = gpus(found, [Card("NVIDIA H100", (9, 0), True)], "580.1", None)[2]
    assert (finding.subject, finding.verdict) == ("cuDNN", verdict)
    assert finding.value == ".".join(map(str, loaded))
    assert ("built for cuDNN 9.10.2" in finding.why) == (verdict == "problem")


def test_who_holds_a_gpu_is_named() -> None:
    free, held, hidden = memory(
        [
            Memory(0, 81920, 81000),
            Memory(1, 81920, 20480, (Holder(77, "python", 51200),)),
            Memory(2, 81920, 20480),
        ]
    )
    assert (free.verdict, held.verdict, hidden.verdict) == ("ok", "note", "note")
    assert "pid 77 (python) 50.0 GiB and 10.0 GiB by processes that cannot be seen from here" in held.why
    assert "kill 77" in held.do
    assert hidden.why == "held by 60.0 GiB by processes that cannot be seen from here"
    assert hidden.do == ""
