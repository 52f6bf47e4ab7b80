"""The reference is asked once: its log-probs are kept with the hash of what they are of, and checked when read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.scoring.reference_logprobs import LogprobTable, ReferenceLogprobs, samples_key
from rft_trainer.testing.bigram import OneRank

SAMPLES = [TrainingSample("a", (1, 2, 3), 1, 1.0), TrainingSample("b", (4, 5), 1, 1.0)]


class Counted:
    """A scorer that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        self.calls += 1
        return [tuple(-0.1 * t for t in sample.token_ids[sample.prompt_length :]) for sample in samples]


def reference(file: Path, score: Counted, model: str = "m") -> ReferenceLogprobs:
    return ReferenceLogprobs(file, score, OneRank(), {"weights": model})


def test_rows_come_back_as_they_were_computed(tmp_path: Path) -> None:
    score = Counted()
    first = reference(tmp_path / "r" / "x.safetensors", score)(SAMPLES)
    again = reference(tmp_path / "r" / "x.safetensors", score)(SAMPLES)
    assert score.calls == 1
    assert torch.equal(first.values_N, again.values_N)
    assert again.row(0) == pytest.approx((-0.2, -0.3))
    assert again.row(1) == pytest.approx((-0.5,))


@pytest.mark.parametrize("change", ["rows", "model"])
def test_a_file_of_something_else_is_not_used(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    score, file = Counted(), tmp_path / "x.safetensors"
    reference(file, score)(SAMPLES)
    samples = [SAMPLES[0], replace(SAMPLES[1], token_ids=(4, 6))] if change == "rows" else SAMPLES
    with caplog.at_level(logging.WARNING):
        found = reference(file, score, "other" if change == "model" else "m")(samples)
    assert score.calls == 2
    assert found.row(1) == pytest.approx((-0.6,) if change == "rows" else (-0.5,))
    assert "other rows or of another model" in caplog.text


@pytest.mark.parametrize("fault", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_computed_again(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    score, file = Counted(), tmp_path / "x.safetensors"
    reference(file, score)(SAMPLES)
    raw = bytearray(file.read_bytes())
    raw[-5 if fault == "flipped" else -1] ^= 1
    file.write_bytes(b"" if fault == "empty" else raw[:-3] if fault == "cut" else raw)
    # which of the two tensors stands last is the format's affair: both are guarded
    with caplog.at_level(logging.WARNING):
        found = reference(file, score)(SAMPLES)
    assert found.row(0) == pytest.approx((-0.2, -0.3))


def test_every_rank_gets_what_the_first_read(tmp_path: Path) -> None:
    class Second:
        """The second of two ranks, whose disk does not have the file."""

        rank, world_size = 1, 2

        def __init__(self, first: bytes) -> None:
            self.first = first

        def gather_bytes(self, data: bytes) -> list[bytes]:
            return [self.first, data]

    score = Counted()
    values = torch.tensor([-0.2, -0.3, -0.5])
    found = ReferenceLogprobs(tmp_path / "none", score, Second(values.numpy().tobytes()), {})(SAMPLES)  # type: ignore[arg-type]
    assert score.calls == 0
    assert torch.equal(found.values_N, values)
    ReferenceLogprobs(tmp_path / "none", score, Second(b""), {})(SAMPLES)  # type: ignore[arg-type]
    assert score.calls == 1
    assert not (tmp_path / "none").exists()


def test_the_key_follows_tokens_prompts_and_model() -> None:
    keys = {
        samples_key(SAMPLES, {"a": "1"}),
        samples_key(SAMPLES, {"a": "2"}),
        samples_key(SAMPLES[::-1], {"a": "1"}),
        samples_key([replace(SAMPLES[0], prompt_length=2), SAMPLES[1]], {"a": "1"}),
    }
    assert len(keys) == 4


def test_a_table_has_rows_of_any_length() -> None:
    table = LogprobTable.of(torch.arange(4.0), [1, 0, 3])
    assert [table.row(i) for i in range(3)] == [(0.0,), (), (1.0, 2.0, 3.0)]
