"""Comparing engines: a failure is a row, a fault is found and named, and the exit code says so."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rft.config.errors import SettingsError
from rft.conformance import EngineResult, as_record, compare, draws
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_cli.config.resolve import resolve
from rft_cli.pages.conformance import facts, failure, page
from rft_core.errors import OptionsError, PreflightError, RftError, ServiceError
from rft_trainer.evaluation.logprob_mismatch import FULL, Measured, measure_gap
from rft_trainer.records.rollouts import Prompt
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy

V, NEW = 9, 16
PROMPTS = [Prompt("text:0", (1,), "b", None, "text"), Prompt("text:1", (2, 3), "cd", None, "text")]
KEYS = [[5, 6], [7, 8, 9]]
WAYS = draws(NEW, ())


class Letters:
    """Token 0 is `a`."""

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in ids)


def policy(seed: int = 5) -> BigramPolicy:
    made = BigramPolicy(V)
    with torch.no_grad():
        made.table.copy_(torch.randn(V, V, generator=torch.Generator().manual_seed(seed)))
    return made


class Sound(BigramEngine):
    """Remembers whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class OneTokenOff(Sound):
    """0.01 nats too much for token 4 of the first sample of the second prompt, in one way of drawing."""

    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **rest: Any) -> Any:
        found = super().generate(prompts, sample_keys, options, **rest)
        if options.temperature == 1.0 and options.top_p == 1.0:
            said = [value + 0.01 * (place == 4) for place, value in enumerate(found[1][0].logprobs)]
            found[1][0] = replace(found[1][0], logprobs=tuple(said))
        return found


class OwnTemperature(Sound):
    """Draws at temperature 1 whatever is asked."""

    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **rest: Any) -> Any:
        return super().generate(prompts, sample_keys, replace(options, temperature=1.0), **rest)


class Breaks(Sound):
    """Dies in its second call."""

    calls = 0
    error: Exception = ServiceError(code="engine.died", what="it is gone", where="engine", why="killed", do="start it")

    def generate(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return super().generate(*arguments, **options)


class NoTopP(Sound):
    """Refuses what it cannot do."""

    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **rest: Any) -> Any:
        if options.top_p < 1.0:
            raise OptionsError(code="engine.top_p", what="top_p = 0.9", where="generate", why="not here", do="top_p=1")
        return super().generate(prompts, sample_keys, options, **rest)


def compared(engines: dict[str, Callable[[], Any] | RftError], trained: BigramPolicy | None = None) -> Any:
    trained = trained or policy()

    def refuse(name: str) -> None:
        if isinstance(engines[name], RftError):
            raise engines[name]

    def measure(engine: Any, draw: SamplingOptions) -> Measured:
        ids = [prompt.token_ids for prompt in PROMPTS]
        return measure_gap(engine, trained, ids, KEYS, replace(draw, top_p=draw.top_p), limits=FULL)  # type: ignore[arg-type]

    return compare(list(engines), WAYS, refuse=refuse, start=lambda name: engines[name](), measure=measure)  # type: ignore[operator]


def shown(results: list[EngineResult], width: int = 200) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(page(results, facts("dir", "kind", "two prompts", FULL, "float32"), PROMPTS, Letters()))  # type: ignore[arg-type]
    return console.export_text()


def ended(results: list[EngineResult], *, asked: bool = False, fp8: bool = False, bf16: bool = False) -> Any:
    return failure(results, asked, fp8, bf16, PROMPTS, Letters())  # type: ignore[arg-type]


NOT_INSTALLED = PreflightError(
    code="engine.not_installed", what="w", where="--engine_type", why="an extra", do="uv sync --extra vllm, or x"
)


def test_engines_with_the_same_weights_are_equal_in_four_ways() -> None:
    results = compared({"native": lambda: Sound(policy()), "hf": lambda: Sound(policy())})
    assert [(d.draw.temperature, d.draw.top_p) for d in results[1].draws] == [(1, 1), (1, 0.9), (0.7, 1), (0.7, 0.9)]
    assert [result.verdict for result in results] == ["equal", "equal"]
    assert [d.same for d in results[0].draws] == [None] * 4
    assert [d.same for d in results[1].draws] == [5] * 4
    assert ended(results, asked=True) is None
    assert "verdict  equal: native, hf" in shown(results)


def test_other_tokens_than_the_native_engine_are_counted() -> None:
    other = policy(6)
    results = compared({"native": lambda: Sound(policy()), "hf": lambda: Sound(other)})
    one, another = (results[k].draws[0].measured.samples for k in (0, 1))
    assert results[1].draws[0].same == sum(a == b for a, b in zip(one, another, strict=True)) < 5


def test_a_shift_at_one_token_is_apart_and_that_token_is_named() -> None:
    results = compared({"native": lambda: Sound(policy()), "vllm": lambda: OneTokenOff(policy())})
    assert [d.measured.verdict for d in results[1].draws] == ["apart", "equal", "equal", "equal"]
    error = ended(results)
    token = results[1].draws[0].measured.samples[2][4]
    assert error.exit_code == 8
    assert error.problem.code == "conformance.apart"
    assert "vllm apart" in error.problem.what
    assert "up to 0.01 nats" in error.problem.what
    assert "1 of 80 tokens" in error.problem.what
    assert f"text:1, sample 0, token 4 {chr(97 + token)!r} (id {token})" in error.problem.where
    assert "temperature 1, top-p 1" in error.problem.where
    worst = results[1].draws[0].measured.worst
    assert worst.engine - worst.trainer == pytest.approx(0.01, abs=1e-5)
    assert f"{worst.engine:.6f} in the engine, {worst.trainer:.6f} in the trainer" in error.problem.where
    assert "the others agree" in error.problem.why
    assert error.problem.do.startswith("--engine_type native")
    text = shown(results)
    assert "verdict  apart: vllm; native equal" in text
    assert f"text:1, sample 0, token 4 {chr(97 + token)!r}" in text


def test_stale_weights_are_apart_at_most_tokens() -> None:
    results = compared({"vllm": lambda: Sound(policy())}, trained=policy(6))
    assert {d.measured.verdict for d in results[0].draws} == {"apart"}
    error = ended(results)
    assert error.exit_code == 8
    assert "other weights" in error.problem.why


def test_a_wrong_temperature_is_told_from_other_faults() -> None:
    results = compared({"vllm": lambda: OwnTemperature(policy())})
    assert [d.measured.verdict for d in results[0].draws] == ["equal", "equal", "apart", "apart"]
    error = ended(results)
    assert error.exit_code == 8
    assert "only at temperature 0.7" in error.problem.why
    assert "temperature 0.7" in error.problem.where


def test_remedies_follow_the_settings() -> None:
    results = compared({"vllm": lambda: Sound(policy(6))})
    assert "--engine_fp8" in ended(results, fp8=True).problem.do
    assert "--bf16" in ended(results, bf16=True).problem.do
    assert "--off_policy_correction tis" in ended(compared({"native": lambda: Sound(policy(6))})).problem.do


@pytest.mark.parametrize("error", [Breaks.error, RuntimeError("out of memory\nat x"), KeyError("rope")])
def test_a_failing_engine_is_a_row_and_ends_no_other(error: Exception) -> None:
    broken, sound = Breaks(policy()), Sound(policy())
    broken.error = error
    results = compared({"native": lambda: broken, "hf": lambda: sound})
    assert [(r.state, len(r.draws)) for r in results] == [("failed", 1), ("measured", 4)]
    assert (broken.closed, sound.closed) == (1, 1)
    ending = ended(results)
    assert ending.exit_code == 8
    text = shown(results)
    assert "verdict  failed: native; hf equal" in text
    said = "it is gone" if isinstance(error, ServiceError) else str(error).splitlines()[0]
    assert said in text
    assert said in ending.problem.what


def test_an_engine_that_does_not_start_is_a_row() -> None:
    def start() -> Any:
        raise OptionsError(code="engine.max_len", what="max_len = 9", where="engine", why="too long", do="8")

    results = compared({"native": start, "hf": lambda: Sound(policy())})
    assert [result.state for result in results] == ["failed", "measured"]
    assert ended(results).problem.code == "engine.max_len"


def test_apart_is_told_before_failed() -> None:
    results = compared({"native": lambda: Breaks(policy()), "hf": lambda: Sound(policy(6))})
    assert ended(results).problem.code == "conformance.apart"
    assert "verdict  apart: hf; native failed" in shown(results)


def test_what_is_not_installed_is_a_row_with_its_command_and_an_error_where_it_was_asked_for() -> None:
    results = compared({"native": lambda: Sound(policy()), "vllm": NOT_INSTALLED})
    text = shown(results)
    assert "not installed; uv sync --extra vllm" in text
    assert "verdict  equal: native; vllm not installed" in text
    assert ended(results) is None
    error = ended(results, asked=True)
    assert (error.exit_code, error.problem.where) == (3, "--engines vllm")


def test_a_refused_way_of_drawing_is_a_row_with_the_reason() -> None:
    results = compared({"sglang": lambda: NoTopP(policy())})
    assert [d.measured is None for d in results[0].draws] == [False, True, False, True]
    assert results[0].verdict == "equal"
    assert ended(results, asked=True) is None
    assert "temperature 0.7, top-p 0.9: top_p = 0.9; not here" in shown(results)
    assert shown(results).count("refused") == 2


def test_nothing_measured_is_no_success() -> None:
    results = compared({"vllm": NOT_INSTALLED})
    assert "verdict  not installed: vllm" in shown(results)
    assert ended(results, asked=True).exit_code == 3


def test_the_record_is_json_whatever_the_numbers_are() -> None:
    class NotANumber(Sound):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            found = super().generate(*arguments, **options)
            found[0][0] = replace(found[0][0], logprobs=(math.nan,) * NEW)
            return found

    results = compared({"native": lambda: NotANumber(policy()), "hf": lambda: Breaks(policy()), "vllm": NOT_INSTALLED})
    native, hf, vllm = json.loads(json.dumps(as_record(results), allow_nan=False))
    assert (native["state"], native["verdict"], native["draws"][0]["gap"]["mean"]) == ("measured", "apart", None)
    assert native["draws"][3]["tokens_beyond"] == NEW
    assert (hf["state"], len(hf["draws"]), hf["problem"]["code"]) == ("failed", 1, "engine.died")
    assert (vllm["state"], vllm["problem"]["code"], vllm["draws"]) == ("absent", "engine.not_installed", [])


def test_the_page_fits_a_terminal() -> None:
    results = compared({"native": lambda: Sound(policy()), "vllm": lambda: OneTokenOff(policy())})
    lines = shown(results, width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if line.startswith("native ") and "equal" in line]


def test_model_and_json_are_other_names_here_and_nowhere_else() -> None:
    settings = resolve("conformance", ["--model", "dir", "--json", "f"]).settings
    assert (settings.model.pretrain, settings.output.output) == ("dir", "f")
    Path("c.yaml").write_text("model: dir\n")
    assert resolve("conformance", ["--config", "c.yaml"]).settings.model.pretrain == "dir"
    with pytest.raises(SettingsError) as caught:
        resolve("rl", ["--pretrain", "m", "--model", "dir"])
    assert caught.value.problem.code == "option.refused"


@pytest.mark.parametrize(("words", "names"), [("", None), ("vllm,native", ("native", "vllm")), (" hf , hf", ("hf",))])
def test_engines_come_in_one_order(words: str, names: tuple[str, ...] | None) -> None:
    found = resolve("conformance", ["--model", "m", f"--engines={words}"]).settings.engine.names
    assert found[:3] == ("native", "hf", "vllm") if names is None else found == names


@pytest.mark.parametrize(
    ("words", "code", "do"),
    [
        ("--engines nativ", "conformance.unknown_engine", "--engines native"),
        ("--engines auto", "conformance.unknown_engine", "--engines native"),
        ("--engines hf --engine_fp8", "conformance.no_effect", "--engines hf,vllm"),
        ("--engines native --engine_mem_util 0.5", "conformance.no_effect", "--engines native,vllm"),
        ("--engines native,hf --engine_tp_size 2", "conformance.no_effect", "--engines native,hf,vllm"),
    ],
)
def test_settings_that_cannot_act_are_refused(words: str, code: str, do: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("conformance", ["--model", "m", *words.split()])
    assert (caught.value.problem.code, caught.value.problem.do) == (code, do)
