"""`rft-train conformance`: one comparison, its page, its record, and the error of an engine that is apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_cli.commands import conformance
from rft_core.errors import PreflightError

APART = PreflightError(code="conformance.apart", what="", where="", why="")


class Comparison:
    """Doubles of the comparison and of its page; keeps what each is given."""

    def __init__(self, num_prompts: int) -> None:
        self.prompts = SimpleNamespace(prompts=[f"p{number}" for number in range(num_prompts)], source="text")
        self.results, self.limits, self.dtype, self.tokenizer = ["result"], "limits", "float32", "tokenizer"
        self.policy, self.model_type = SimpleNamespace(num_parameters=1234), "llama"
        self.machine = SimpleNamespace(describe=lambda: "one CPU")
        self.error: PreflightError | None = None
        self.calls: dict[str, tuple[Any, ...]] = {}

    @contextmanager
    def open_machine(self, device: str) -> Iterator[Any]:
        self.calls["machine"] = (device,)
        yield self.machine

    def compare(self, settings: Any, machine: Any, tell: Any) -> Any:
        tell("comparing")
        self.calls["compare"] = (settings.model.pretrain, machine)
        return self

    def record(self, settings: Any, machine: Any, compared: Any, prompts: str) -> Any:
        self.calls["record"] = (settings.model.pretrain, machine, compared)
        return {"prompts": prompts}

    def facts(self, *given: Any) -> str:
        self.calls["facts"] = given
        return "head"

    def page(self, *given: Any) -> str:
        self.calls["page"] = given
        return "x" * 150

    def failure(self, *given: Any) -> PreflightError | None:
        self.calls["failure"] = given
        return self.error


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    double = Comparison(1)
    monkeypatch.setattr(conformance, "open_machine", double.open_machine)
    monkeypatch.setattr(conformance, "compare_engines", double.compare)
    monkeypatch.setattr(conformance, "full_record", double.record)
    for name in ("facts", "page", "failure"):
        monkeypatch.setattr(conformance, name, getattr(double, name))
    return double


WORDS = ["--pretrain", "m", "--device", "cpu", "--seed", "7", "--generate_max_len", "9", "--n_samples_per_prompt", "3"]


def test_engines_are_compared_and_the_page_is_shown(compared: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.run(WORDS) == 0
    assert capsys.readouterr().out == "x" * 150 + "\n", "a line of a pipe is not broken"
    prompts = "text: 1 prompt, 3 samples each of at most 9 tokens, seed 7"
    kind = "llama, 1,234 parameters, float32; one CPU"
    assert compared.calls == {
        "machine": ("cpu",),
        "compare": ("m", compared.machine),
        "facts": ("m", kind, prompts, "limits", "float32"),
        "page": (["result"], "head", ["p0"], "tokenizer"),
        "failure": (["result"], False, False, False, ["p0"], "tokenizer"),
    }


def test_the_record_is_written_where_it_is_asked_for(compared: Comparison) -> None:
    compared.prompts.prompts.append("p1")
    assert conformance.run([*WORDS, "--output", "record.json"]) == 0
    assert compared.calls["record"] == ("m", compared.machine, compared)
    told = "text: 2 prompts, 3 samples each of at most 9 tokens, seed 7"
    assert json.loads(Path("record.json").read_text()) == {"prompts": told}


def test_a_figure_that_is_no_number_is_not_written(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "full_record", lambda *_: {"gap": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        conformance.run([*WORDS, "--output", "record.json"])
    assert not Path("record.json").exists()


def test_an_engine_that_is_apart_ends_it_after_the_page(
    compared: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    compared.error = APART
    with pytest.raises(PreflightError) as caught:
        conformance.run([*WORDS, "--engines", "native,vllm", "--engine_fp8", "--bf16"])
    assert caught.value is APART
    assert "xxx" in capsys.readouterr().out
    assert compared.calls["failure"] == (["result"], True, True, True, ["p0"], "tokenizer")
