"""What a start says of driver, kernels and versions, on planted machines."""

import pytest

from rft.installation.devices import Card, TorchBuild
from rft.installation.facts import MachineFact
from rft.installation.start import check_installation, why_no_gpu
from rft_core.errors import PreflightError

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "compute_120")


def torch_with(*cards: Card, cuda: str | None = "13.0") -> TorchBuild:
    return TorchBuild("2.13.0", cuda, ARCHITECTURES if cards else (), len(cards))


def found(*cards: Card, cuda: str | None = "13.0"):
    def find(only: int | None = None) -> tuple[TorchBuild, tuple[Card, ...]]:
        return torch_with(*cards, cuda=cuda), cards if only is None else (cards[only],)

    return find


def no_facts() -> list[MachineFact]:
    return []


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        *(((7, 5), True), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)),
        *(((7, 0), False), ((10, 0), False)),
    ],
)
def test_a_gpu_without_kernels_is_refused_before_a_model_is_loaded(capability: tuple[int, int], runs: bool) -> None:
    cards = (Card("NVIDIA A100", (8, 0), True), Card("this one", capability, True))
    if runs:
        check_installation("auto", "cuda:1", find=found(*cards), versions=no_facts)
        return
    with pytest.raises(PreflightError) as caught:
        check_installation("auto", "cuda:1", find=found(*cards), versions=no_facts)
    problem = caught.value.problem
    assert problem.code == "device.no_kernels"
    assert "this one has capability" in problem.what
    assert f"sm_{capability[0]}{capability[1]}" in problem.do


@pytest.mark.parametrize(
    ("driver", "cuda", "said"),
    [
        ("535.129.03", "13.0", "supports CUDA 12.2, and torch 2.13.0 is built for CUDA 13.0, which needs driver 580"),
        ("470.82", "12.6", "it supports CUDA 11.4, and torch 2.13.0 is built for CUDA 12.6, which needs driver 525"),
        ("580.65.06", None, "torch 2.13.0 is built for CPUs"),
        ("580.65.06", "13.0", "another container"),
        (None, "13.0", ""),
        (None, None, ""),
    ],
)
def test_a_gpu_that_is_left_unused_is_said_with_the_reason(
    driver: str | None, cuda: str | None, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for wanted, first in (("auto", True), ("auto", False), ("cpu", True)):
        check_installation(
            wanted, "cpu", is_first=first, find=found(cuda=cuda), driver=lambda: driver, versions=no_facts
        )
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text


def test_hidden_gpus_are_left_alone_by_intent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_installation("auto", "cpu", find=found(), driver=lambda: "580.1", versions=no_facts)
    assert caplog.messages == []
    why = why_no_gpu(found(), lambda: "580.1")
    assert why is not None
    assert "CUDA_VISIBLE_DEVICES" in why.why


def test_versions_that_do_not_go_together_or_were_not_tested_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = [
        MachineFact("torch", "2.9.0", "problem", "rft-core needs >=2.11", 'uv pip install "torch>=2.11"'),
        MachineFact("pyarrow", "25.0", "note", "the tests ran with 26.0.1"),
        MachineFact("pydantic", "2.14.3"),
    ]
    for first in (True, False):
        check_installation("cpu", "cpu", is_first=first, driver=lambda: None, versions=lambda: facts)
    assert caplog.messages == [
        'torch is 2.9.0, and rft-core needs >=2.11. Do: uv pip install "torch>=2.11"',
        "pyarrow is 25.0, and the tests ran with 26.0.1",
    ]
