"""A bench for the command line: a small model, small files, and calls of `rft-train` inside this process."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_cli.diagnostics import bundle
from rft_cli.main import main
from rft_models.tiny_models.text import build_character_tokenizer, build_decoder, draw_weights
from rft_models.tokenization.byte_level import CHAT_TEMPLATE

torch.set_num_threads(1)

REWARD = '''"""Rewards that depend on nothing but the response, and on what their process may see and take."""
import os
import time


def digits(responses, labels):
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]


def few_signals(responses, labels):
    return [float(number) * (int(labels[0]) % 4 == 0) for number in range(len(responses))]


def first_is_right(responses, labels):
    return [float(number == 0) for number in range(len(responses))]


def not_greedy(responses, labels):
    return [None if len(responses) == 1 else float(len(response)) for response in responses]


def sometimes(responses, labels):
    return [float(number) if number else None for number in range(len(responses))]


def lonely(responses, labels):
    return [1.0 if number == 0 and int(labels[0]) % 4 == 0 else None for number in range(len(responses))]


def slow(responses, labels):
    time.sleep(0.3)
    return [float(number) for number in range(len(responses))]


def large(responses, labels):
    return [float(number + len(bytearray(200 << 20))) for number in range(len(responses))]


def counts_secrets(responses, labels):
    return [float(number * ("A_TOKEN" in os.environ)) for number in range(len(responses))]


def by_position(responses, labels):
    return [float(number) for number in range(len(responses))]


def wrong_signature(prompts, labels):
    return 1.0
'''


ENVIRONMENT = '''"""Environments that answer with what they heard."""
import os
import time

from rft_trainer.environments.protocol import Answer


class Talker:
    def reset(self, prompt, key):
        return []

    def step(self, turn):
        return Answer([f"calls {len(turn.calls)}"], reward=0.1 * (len(turn.text) % 5))


class Slow(Talker):
    def step(self, turn):
        time.sleep(0.1)
        return Answer(reward=float(len(turn.text)), done=True)


class Large(Talker):
    def step(self, turn):
        return Answer(reward=float(len(turn.text) + len(bytearray(200 << 20))), done=True)


class Secrets(Talker):
    def step(self, turn):
        return Answer(reward=float("A_TOKEN" in os.environ), done=True)
'''


MODEL_CODE = '''"""A patch of the small decoder."""
from rft_models.families.patches import register_patch


def widen(model):
    model.model.norm.variance_epsilon = 0.5


register_patch("qwen2", widen)
'''


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the small things are."""

    root: Path
    model: Path
    deep: Path
    experts: Path
    train: Path
    other: Path
    held_out: Path
    splits: Path
    reward: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call of `rft-train` ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def problem(self) -> dict[str, str]:
        """The problem of a call with `--json_errors`."""
        return json.loads(self.err.splitlines()[-1])["problem"]


def run_program(*argv: object) -> Outcome:
    """Run the program as a shell would, without starting a process; what it sets is put back."""
    out, err = io.StringIO(), io.StringIO()
    hook, environment = sys.excepthook, dict(os.environ)
    bundle.remember_run_directory(None)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(word) for word in argv])
    finally:
        sys.excepthook = hook
        os.environ.clear()
        os.environ.update(environment)
        bundle.remember_run_directory(None)
    return Outcome(code, out.getvalue(), err.getvalue())


def _experts(path: Path, tokenizer: Any) -> Path:
    """A mixture of experts of the same size."""
    transformers = importlib.import_module("transformers")
    config = transformers.MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = transformers.MixtralForCausalLM(config)
    draw_weights(model, seed=0, std=0.4)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _rows(count: int, start: int) -> list[dict[str, str]]:
    numbers = [*range(start, start + count - 1), 10 * start]
    return [
        {
            "input": f"{n}+{n}=",
            "label": str(2 * n),
            "question": f"twice {n}?",
            "output": str(2 * n),
            "more": f"{2 * n}!",
            "chosen": str(2 * n),
            "rejected": f"{2 * n + 1}0",
        }
        for n in numbers
    ]


def _pairs(count: int, start: int) -> list[dict[str, Any]]:
    """The rows as pairs, with margins, weights and labels, of which none is a tie."""
    rows: list[dict[str, Any]] = []
    for n, row in enumerate(_rows(count, start)):
        responses = {"chosen": row["output"], "rejected": row["more"]}
        labels = {"margin": n % 3, "weight": 1 + n % 3, "right": "AB"[n % 2], "better": "A"}
        rows.append({**row, **responses, **labels})
    return rows


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def bench(memory_root: Path) -> Bench:
    """A decoder of 16 dimensions over characters, with a chat template, and rows of sums."""
    root = memory_root / "bench"
    root.mkdir()
    tokenizer = build_character_tokenizer(string.ascii_lowercase + string.digits + "+=?!: \n")
    tokenizer.chat_template = CHAT_TEMPLATE
    sizes: dict[str, int] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 16, "max_positions": 128}
    model = build_decoder(root / "model", tokenizer, **sizes, seed=0, init_std=0.4)
    splits = root / "splits"
    _write(splits / "train.jsonl", _rows(6, 10))
    _write(splits / "test.jsonl", _rows(6, 30))
    _write(root / "pairs.jsonl", _pairs(8, 10))
    _write(root / "heldpairs.jsonl", _pairs(4, 70))
    (root / "words.txt").write_text("the words of a text are the words of the text\n" * 9)
    (root / "texts.txt").write_text("".join(f"{row['input']}{row['output']} " for row in _rows(12, 20)))
    for name, count in (("texts", 12), ("heldtexts", 4)):
        _write(root / f"{name}.jsonl", [{"text": f"{row['input']}{row['output']} " * 3} for row in _rows(count, 20)])
    asked, answered = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    tests = [{"call": "f", "args": [1], "expected": 2}]
    _write(root / "coded.jsonl", [{**row, "label": tests} for row in _rows(6, 10)])
    _write(root / "talk.jsonl", [{"messages": [asked, answered, asked, answered]}] * 6)
    _write(root / "weighed.jsonl", [{**row, "weight": n} for n, row in enumerate(_rows(6, 10))])
    (root / "reward.py").write_text(REWARD)
    (root / "code.py").write_text(MODEL_CODE)
    (root / "environment.py").write_text(ENVIRONMENT)
    return Bench(
        root,
        model,
        build_decoder(root / "deep", tokenizer, **{**sizes, "layers": 2}, seed=0, init_std=0.4),
        _experts(root / "experts", tokenizer),
        _write(root / "train.jsonl", _rows(6, 10)),
        _write(root / "other.jsonl", _rows(6, 40)),
        _write(root / "heldout.jsonl", _rows(4, 70)),
        splits,
        root / "reward.py",
    )


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's terminal or of another test shows in a page."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("A_TOKEN", "of the caller")
    for name in ("RFT_ERRORS", "RFT_FAULT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rft_train(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`rft-train ARGV...` in an empty directory; gives exit code, standard output and standard error."""
    monkeypatch.chdir(runs)
    return run_program


@pytest.fixture(scope="session")
def call() -> Callable[..., Outcome]:
    """`rft-train ARGV...` wherever the caller is."""
    return run_program


@pytest.fixture(scope="session")
def base_words(bench: Bench) -> dict[str, list[str]]:
    """A run of three steps for each training command, and a comparison of one engine, in a fraction of a second."""
    shared = ["--pretrain", bench.model, "--prompt_data", bench.train, "--eval_data", bench.held_out, "--device", "cpu"]
    shared += ["--max_steps", "3", "--lr_schedule", "constant", "--lr_warmup_ratio", "0"]
    rl = ["--reward", f"{bench.reward}:digits", "--rollout_batch_size", "2", "--n_samples_per_prompt", "4"]
    rl += [
        "--train_batch_size",
        "8",
        "--generate_max_len",
        "12",
        "--prompt_max_len",
        "40",
        "--actor_learning_rate",
        "1e-2",
    ]
    sft = ["--train_batch_size", "4", "--learning_rate", "1e-2"]
    rm = ["--prompt_data", bench.root / "pairs.jsonl", "--eval_data", bench.root / "heldpairs.jsonl"]
    rm += ["--train_batch_size", "4", "--learning_rate", "1e-2", "--max_epochs", "3"]
    texts = ["--prompt_data", bench.root / "texts.jsonl", "--eval_data", bench.root / "heldtexts.jsonl"]
    texts += ["--data_store_path", bench.root / "tokens", "--max_len", "16", "--train_batch_size", "3"]
    compared = ["--pretrain", bench.model, "--prompt_data", bench.train, "--device", "cpu", "--engines", "native"]
    compared += ["--generate_max_len", "8", "--n_samples_per_prompt", "2"]
    words = {
        "rl": [*shared, *rl],
        "sft": [*shared, *sft],
        "dpo": [*shared, *sft, "--max_epochs", "3"],
        "pretrain": [*shared, *texts, "--learning_rate", "1e-2"],
        "rm": [*shared, *rm],
        "conformance": compared,
    }
    return {command: list(map(str, given)) for command, given in words.items()}
