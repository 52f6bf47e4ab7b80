"""One number derives what is not given, says so, and a stored configuration repeats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config.errors import SettingsError
from rft.resolved import Resolved
from rft_cli.config.resolve import resolve

DERIVED = ("hidden_size", "num_layers", "num_heads", "learning_rate", "train_batch_size", "train_tokens", "max_epochs")


def given(*words: str) -> Resolved[Any]:
    return resolve("pretrain", ["--prompt_data", "x.txt", *words])


def of(resolved: Resolved[Any]) -> dict[str, Any]:
    return {name: resolved.values[name] for name in DERIVED}


def test_without_it_every_setting_has_its_own_default() -> None:
    assert all(origin.kind != "derived" for origin in given().origins.values())


def test_twelve_blocks_are_the_model_that_the_rates_are_known_of() -> None:
    # 12 x (4 x 768^2 + 3 x 768 x 2048) of matrices and 768 x 4096 of the output, 20 tokens each
    tokens = 20 * (12 * (4 * 768**2 + 3 * 768 * 2048) + 768 * 4096)
    found = given("--depth", "12")
    assert of(found) == {
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "learning_rate": 6e-4,
        "train_batch_size": 2**19 // 512,
        "train_tokens": tokens,
        "max_epochs": 4,
    }
    assert {str(found.origins[name]) for name in DERIVED} == {"from --depth 12"}
    assert found.notes == ()


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 6, 20])
def test_width_and_horizon_grow_with_the_number(depth: int) -> None:
    small, large = (of(given("--depth", str(number))) for number in (depth, depth + 1))
    assert small["hidden_size"] == 64 * depth
    assert small["hidden_size"] % (2 * small["num_heads"]) == 0
    assert small["train_tokens"] < large["train_tokens"]
    assert small["train_batch_size"] <= large["train_batch_size"]


@pytest.mark.parametrize(
    ("words", "kept", "gone"),
    [
        ("--hidden_size 96", {"hidden_size": 96, "num_heads": 1}, ()),
        ("--num_heads 2", {"num_heads": 2, "hidden_size": 256}, ()),
        ("--learning_rate 1e-2", {"learning_rate": 1e-2}, ()),
        ("--train_batch_size 8", {"train_batch_size": 8}, ()),
        ("--train_batch_tokens 4096", {"train_batch_tokens": 4096}, ("train_batch_size",)),
        ("--max_steps 7", {"max_steps": 7}, ("train_tokens", "max_epochs")),
        ("--max_epochs 2", {"max_epochs": 2}, ("train_tokens",)),
    ],
)
def test_what_is_given_stays_and_the_rest_follows_from_it(
    words: str, kept: dict[str, Any], gone: tuple[str, ...]
) -> None:
    found = given("--depth", "4", *words.split())
    assert {name: found.values[name] for name in kept} == kept
    assert all(found.origins[name].kind == "default" for name in gone)
    assert found.values["num_layers"] == 4


def test_a_smaller_batch_has_a_lower_rate() -> None:
    rates = [given("--depth", "4", "--train_batch_size", str(size)).values["learning_rate"] for size in (4, 16, 64)]
    assert rates == sorted(rates)
    assert rates[2] == pytest.approx(4 * rates[0], rel=0.05)


def test_a_value_that_stands_against_it_is_said() -> None:
    assert given("--depth", "4", "--hidden_size", "96").notes == (
        "--depth 4 leaves what is given: hidden_size = 96 (command line)",
    )


def test_a_mixture_counts_the_experts_of_a_token() -> None:
    dense, mixture = (given("--depth", "4", *words).values["train_tokens"] for words in ((), ("--use_moe",)))
    assert dense < mixture < 1.1 * dense


def test_the_stored_configuration_gives_the_same_again(tmp_path: Path) -> None:
    first = given("--depth", "3")
    (file := tmp_path / "config.yaml").write_text(first.config_yaml)
    again = resolve("pretrain", ["--config", str(file)])
    assert again.values == first.values
    assert again.notes == ()


def test_a_model_that_exists_has_its_own_shape() -> None:
    with pytest.raises(SettingsError) as caught:
        given("--depth", "4", "--pretrain", "model")
    assert caught.value.problem.code == "pretrain.has_model"
    assert "depth" in caught.value.problem.do


def test_sizes_that_do_not_fit_are_refused_under_their_names() -> None:
    with pytest.raises(SettingsError) as caught:
        given("--depth", "4", "--num_heads", "3")
    assert caught.value.problem.code == "decoder.heads"
