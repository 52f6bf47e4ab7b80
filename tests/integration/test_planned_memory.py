"""The memory of `rft-train plan` against the bytes of the tensors of a real run on a CPU, within a tenth."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from rft.config.commands import load
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft_cli.config.resolve import resolve
from rft_cli.main import main
from rft_cli.records.discovery import training_of
from rft_dist.planning.live_bytes import LiveBytes
from rft_models.tiny_models.text import build_character_model
from rft_trainer.update.optimizer_step import Updater

SQUARE = {"hidden": 64, "layers": 3, "heads": 4, "ffn": 160, "kv_heads": 2}
LARGE = {"hidden": 256, "layers": 4, "heads": 8, "ffn": 768, "kv_heads": 4}
DEEP = {"hidden": 48, "layers": 9, "heads": 4, "ffn": 128, "kv_heads": 2}
WIDE = {"hidden": 128, "layers": 2, "heads": 4, "ffn": 384, "kv_heads": 4}
MANY_WORDS = {**SQUARE, "alphabet": "0123456789" + "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))}

SHAPES: list[tuple[str, int, dict[str, Any], str]] = [
    ("sft", 96, SQUARE, "--micro_train_batch_size 4"),
    ("sft", 200, LARGE, "--micro_train_batch_size 1"),
    ("sft", 128, DEEP, "--micro_train_batch_size 2 --gradient_checkpointing true"),
    ("sft", 128, WIDE, "--micro_train_batch_size 2 --bf16 true --use_mp_opt true"),
    ("sft", 128, MANY_WORDS, "--micro_train_batch_size 4"),
    ("sft", 128, MANY_WORDS, "--micro_train_batch_size 4 --fused_linear_logprob true --chunk_size 64"),
    ("sft", 96, WIDE, "--micro_train_batch_size 2 --lora_rank 8"),
    ("dpo", 96, SQUARE, "--micro_train_batch_size 2"),
    ("dpo", 64, DEEP, "--micro_train_batch_size 1"),
    ("dpo", 160, WIDE, "--micro_train_batch_size 2 --bf16 true"),
    ("rm", 96, SQUARE, "--micro_train_batch_size 2"),
    ("rm", 128, WIDE, "--micro_train_batch_size 1 --gradient_checkpointing true"),
    ("rm", 64, DEEP, "--micro_train_batch_size 4"),
    ("sft", 96, WIDE, "--micro_train_batch_size 1 --optimizer muon"),
    ("sft", 96, WIDE, "--micro_train_batch_size 2 --amp true --amp_dtype bf16"),
]
"""Stage, tokens of a sample, widths, settings."""


def rows(command: str, length: int) -> str:
    """Eight rows of as many tokens as are allowed: one is the end token's."""
    texts = ["".join(str((3 * row + place) % 10) for place in range(length - 2)) for row in range(9)]
    if command == "sft":
        made = [{"input": "1", "output": text} for text in texts[:8]]
    else:
        made = [{"prompt": "1", "chosen": texts[row], "rejected": texts[row + 1]} for row in range(8)]
    return "\n".join(map(json.dumps, made))


def planned(command: str, words: list[str]) -> RunPlan:
    return plan_run(PlanRequest({}, traced=True), resolve(command, words), load(training_of(command).workload))


def bytes_of_the_run(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Most bytes of tensors in the second optimizer step, when moments and the copy of a checkpoint are there."""
    live, peaks = LiveBytes(full=True), list[int]()
    forward_backward, step = Updater.forward_backward, Updater.step

    def first(self: Updater, *arguments: Any, **named: Any) -> None:
        if not self.num_batches:
            gc.collect()
            live.forget_peak()
        forward_backward(self, *arguments, **named)

    def last(self: Updater) -> Any:
        outcome = step(self)
        peaks.append(live.peak)
        return outcome

    monkeypatch.setattr(Updater, "forward_backward", first)
    monkeypatch.setattr(Updater, "step", last)
    with live:
        assert main([command, *words]) == 0
    assert len(peaks) == 2
    return peaks[1]


@pytest.mark.parametrize(("command", "length", "widths", "settings"), SHAPES, ids=range(len(SHAPES)))
def test_the_plan_is_within_a_tenth_of_the_run(
    command: str, length: int, widths: dict[str, Any], settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_character_model(tmp_path / "model", **widths)
    (tmp_path / "rows.jsonl").write_text(rows(command, length))
    words = ["--pretrain", str(model), "--prompt_data", str(tmp_path / "rows.jsonl"), "--max_len", str(length)]
    words += ["--save_path", str(tmp_path / "run"), "--max_steps", "2", "--train_batch_size", "4", *settings.split()]
    plan = planned(command, words)
    assert "traced on tensors without values" in plan.notes[-1]
    # on a CPU the copy of a checkpoint is in the same memory
    foreseen = plan.training_bytes + plan.host_bytes
    assert foreseen == pytest.approx(bytes_of_the_run(command, words, monkeypatch), rel=0.1)
