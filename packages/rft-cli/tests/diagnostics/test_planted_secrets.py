"""Secrets of 50 kinds are planted where a run meets them: none is in what is handed on of it."""

from __future__ import annotations

import base64
import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rft.doctor.examination import report as doctor_report
from rft.doctor.findings import MachineFact, Section
from rft.report.page import report as page_of_run
from rft_cli.diagnostics import bundle
from rft_core.errors import Problem

_RANDOM = random.Random(5)


def drawn(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    # a digit, so that no word of a text is one
    return "".join(_RANDOM.choice(alphabet) for _ in range(length - 2)) + "7q"


def upper(length: int) -> str:
    return drawn(length, string.ascii_uppercase + string.digits).upper()


VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN",
    "GH_PAT",
    "AZURE_CLIENT_SECRET",
    "DB_PASSWORD",
    "REDIS_AUTH",
    "SMTP_PASSWD",
    "RFT_REWARD_TOKEN",
    "RFT_JUDGE_KEY",
    "MY_CREDENTIALS",
    "SLURM_JWT",
    "NCCL_SECRET",
    "TORCH_HUB_KEY",
    "MASTER_PASSPHRASE",
    "PG_PASS",
    "SESSION_COOKIE",
)
TEXTS: dict[str, tuple[str, Callable[[], str]]] = {
    "a token of Hugging Face": ("using SECRET", lambda: f"hf_{drawn(34)}"),
    "a key of OpenAI": ("using SECRET", lambda: f"sk-{drawn(40)}"),
    "a token of GitHub": ("using SECRET", lambda: f"ghp_{drawn(36)}"),
    "a fine-grained token of GitHub": ("using SECRET", lambda: f"github_pat_{drawn(60)}"),
    "a token of GitLab": ("using SECRET", lambda: f"glpat-{drawn(20)}"),
    "a token of Slack": ("using SECRET", lambda: f"xoxb-{drawn(30)}"),
    "a key of Google": ("using SECRET", lambda: f"AIza{drawn(35)}"),
    "an identity of AWS": ("using SECRET", lambda: f"AKIA{upper(16)}"),
    "a token of npm": ("using SECRET", lambda: f"npm_{drawn(36)}"),
    "a token of PyPI": ("using SECRET", lambda: f"pypi-{drawn(60)}"),
    "a key of NVIDIA": ("using SECRET", lambda: f"nvapi-{drawn(40)}"),
    "a key of Weights & Biases": (
        "using SECRET",
        lambda: "".join(_RANDOM.choice("0123456789abcdef") for _ in range(40)),
    ),
    "a JSON web token": ("using SECRET", lambda: f"eyJ{drawn(20)}.eyJ{drawn(30)}.{drawn(43)}"),
    "a private key": (
        "-----BEGIN RSA PRIVATE KEY-----\nSECRET\n-----END RSA PRIVATE KEY-----",
        lambda: drawn(64),
    ),
    "a password in an address": ("http://me:SECRET@host:8000/score", lambda: drawn(12)),
    "a password with an at sign": ("http://me:a@SECRET@host/score", lambda: drawn(12)),
    "a token as the user of an address": ("https://SECRET@host/x", lambda: drawn(20)),
    "a password without a user": ("redis://:SECRET@cache:6379/0", lambda: drawn(12)),
    "a key in a query": ("http://host/score?api_key=SECRET", lambda: drawn(16)),
    "a token in a query": ("http://host/score?a=1&access_token=SECRET&b=2", lambda: drawn(16)),
    "a signature in a query": ("https://host/x?X-Amz-Signature=SECRET", lambda: drawn(24)),
    "a bearer": ("Authorization: Bearer SECRET", lambda: drawn(20)),
    "a user and a password as a header": (
        "Authorization: Basic SECRET",
        lambda: base64.b64encode(f"me:{drawn(11)}".encode()).decode(),
    ),
    "a key as a header": ("X-Api-Key: SECRET", lambda: drawn(16)),
    "a cookie": ("Cookie: session=SECRET", lambda: drawn(16)),
    "a field of a file": ('{"client_secret": "SECRET"}', lambda: drawn(16)),
    "a token as a field": ("auth_token: SECRET", lambda: drawn(16)),
    "a variable that is set": ("export OTHER_PASSWORD=SECRET", lambda: drawn(16)),
}


@dataclass(frozen=True)
class Planted:
    secrets: dict[str, str]
    run: Path
    problem: Problem
    error: Exception
    command: list[str]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """A run with every secret in its settings, its logs, its rows, its command and its error."""
    secrets = {name: drawn(18) for name in VARIABLES}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    # one that is named as none, whose value says what it is
    monkeypatch.setenv("RFT_PLACE", "http://me:pw77qq77qq@host/x")
    lines = [f"{name} is {value}" for name, value in secrets.items()]
    for name, (text, make) in TEXTS.items():
        secrets[name] = make()
        lines.append(text.replace("SECRET", secrets[name]))
    text = "\n".join(lines)
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    settings = [f"{name}: {json.dumps(line)}" for name, line in zip(_setting_names(), lines, strict=False)]
    (run / "config.yaml").write_text("\n".join([f"remote_rm_url: {json.dumps(text)}", *settings]) + "\n")
    (run / "command.txt").write_text(" ".join(f"--a {json.dumps(line)}" for line in lines) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, "note": line}) + "\n" for line in lines))
    for log in ("rank_0.log", "rank_1.log", "output_rank_1.log"):
        # the last lines are kept, and a text of more lines with them
        (run / "logs" / log).write_text(text)
    monkeypatch.setattr(bundle, "NUM_LINES", 1000)
    bundle.remember_run_directory(run)
    problem = Problem(code="a.b", what=text, where=text, why=text, do=text)
    return Planted(secrets, run, problem, ValueError(text), ["rl", "--judge_api_key", "letmein77", *lines])


def _setting_names() -> list[str]:
    return [f"setting_{number}" for number in range(100)]


def test_there_are_fifty_kinds() -> None:
    assert len(VARIABLES) + len(TEXTS) == 50


def found_in(text: str, secrets: dict[str, str]) -> list[str]:
    return [name for name, secret in secrets.items() if secret in text or json.dumps(secret)[1:-1] in text]


def test_no_secret_is_in_a_bundle(planted: Planted) -> None:
    path = bundle.write(planted.error, planted.command, planted.problem)
    assert path is not None
    text = path.read_text()
    assert found_in(text, planted.secrets | {"a flag": "letmein77", "a place": "pw77qq77qq"}) == []
    record = json.loads(text)
    assert record["problem"]["code"] == "a.b"
    assert set(record["logs"]) == {"rank_0.log", "rank_1.log", "output_rank_1.log"}
    assert "test_no_secret_is_in_a_bundle" in "\n".join(line for stack in record["stacks"].values() for line in stack)


def test_no_secret_is_in_a_report_on_a_run(planted: Planted) -> None:
    page = page_of_run(planted.run)
    assert found_in(page, planted.secrets) == []
    assert "hidden: looks like a secret" in page


def test_no_secret_is_in_a_report_on_a_machine(planted: Planted) -> None:
    facts = tuple(MachineFact(name, f"{name}: {text}") for name, text in planted.secrets.items() if name in VARIABLES)
    facts += (MachineFact("text", planted.problem.what, "note", planted.problem.what, planted.problem.what),)
    text = doctor_report([Section("ranks", facts)])
    assert found_in(text, planted.secrets) == []
