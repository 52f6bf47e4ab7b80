"""What looks like a secret, or is one of this process, stands in no text that is shown."""

from __future__ import annotations

import pytest

from rft_core.errors import DataError
from rft_core.secrets import HIDDEN, hide_values, is_secret_variable, scrub_text, without_secrets

SECRET = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY",
    "MY_SECRET",
    "DB_PASSWORD",
    "TOKEN",
    "KEY",
)
PLAIN = ("PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PWD", "OMP_NUM_THREADS", "MONKEY", "SECRETARY", "HF_HOME")


@pytest.mark.parametrize("name", SECRET + PLAIN)
def test_a_variable_is_secret_by_the_words_of_its_name(name: str) -> None:
    assert is_secret_variable(name) is (name in SECRET)


def test_user_code_is_left_what_is_no_secret_and_what_is_allowed() -> None:
    given = dict.fromkeys(SECRET + PLAIN, "x")
    assert set(without_secrets(given)) == set(PLAIN)
    assert set(without_secrets(given, ("AWS_*", "KEY"))) == {*PLAIN, "AWS_REGION", "AWS_SECRET_ACCESS_KEY", "KEY"}


def test_the_values_of_secret_variables_are_hidden_wherever_they_stand() -> None:
    environment = {"HF_TOKEN": "short1", "MY_SECRET": "short1-and-long", "PATH": "/usr/bin", "A_TOKEN": "abc"}
    assert hide_values("x short1-and-long /usr/bin abc short1", environment) == f"x {HIDDEN} /usr/bin abc {HIDDEN}"
    harmless = {"SORT_KEY": "response", "AWS_REGION": "us-east-1", "TOKEN_FILE": "/run/token"}
    assert hide_values("the response of us-east-1 /run/token", harmless) == "the response of us-east-1 /run/token"
    keys = {"AWS_ACCESS_KEY_ID": "AKX123456", "A_KEY": "abc-123"}
    assert hide_values("AKX123456 abc-123", keys) == f"{HIDDEN} {HIDDEN}"


@pytest.mark.parametrize(
    "text",
    [
        "{'OTHER_TOKEN': 'VALUE', 'PATH': '/usr/bin'}",
        'OPENAI_API_KEY="VALUE"',
        "export DB_PASSWORD=VALUE",
        '{"api_key": "VALUE"}',
        "password=VALUE",
        "http://host/score?a=1&token=VALUE&b=2",
        "http://host/score?api_key=VALUE",
        "http://VALUE@host/x",
        "http://me:VALUE@host/x",
        "Authorization: Bearer VALUE",
    ],
)
def test_what_a_name_or_a_place_marks_as_secret_is_hidden(text: str) -> None:
    value = "x7-Qw9-p2Lm"
    shown = scrub_text(text.replace("VALUE", value))
    assert value not in shown
    assert HIDDEN in shown
    assert scrub_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "num_tokens=3812 max_new_tokens: 256, eos_token='</s>', pad_token: <pad>",
        "--reward_weights correctness=0.9,format=0.1",
        "http://localhost:8000/score?model=a",
        "KeyError: 'HF_TOKEN'",
        "images_key = image",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert scrub_text(text) == text


def test_an_error_quotes_no_secret_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "x7-Qw9-p2Lm")
    error = DataError(code="a.b", what="it said x7-Qw9-p2Lm", where="x7-Qw9-p2Lm", why="", state="", do="x7-Qw9-p2Lm")
    assert "x7-Qw9-p2Lm" not in f"{error}{error.as_json()}"
