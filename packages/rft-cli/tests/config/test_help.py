"""The help of a command: every flag in its group, what it takes, and the value that it has now."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from rft.config.commands import load
from rft.config.schema import schema
from rft_cli.config.help import print_help
from rft_cli.records.discovery import find_command

Shown = Callable[..., list[str]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    def lines(command: str, *argv: str, columns: int = 90) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_help(command, argv or ("--help-all",))
        return capsys.readouterr().out.splitlines()

    return lines


def inside(lines: list[str]) -> list[str]:
    """The lines within the frames, without the frames."""
    return [line[2:-2].rstrip() for line in lines if line.startswith("│")]


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (100, 100), (180, 100)])
def test_the_page_is_as_wide_as_the_terminal_and_no_wider_than_can_be_read(
    columns: int, width: int, shown: Shown
) -> None:
    lines = shown("sft", columns=columns)
    frames = [line for line in lines if line[:1] in "╭│╰" and line]
    assert {len(line) for line in frames} == {width}
    assert max(map(len, lines)) == width


def test_every_group_is_a_frame_with_its_name_at_the_left(shown: Shown) -> None:
    lines = shown("sft")
    titles = [line[2:].split()[0] for line in lines if line.startswith("╭")]
    assert titles == [group.name for group in fields(load(find_command("sft").settings))]
    joined = " ".join(" ".join(inside(lines)).split())
    for kind in get_type_hints(load(find_command("sft").settings)).values():
        assert " ".join(str(inspect.getdoc(kind)).split()) in joined


def test_a_flag_is_followed_by_its_meaning_further_in(shown: Shown) -> None:
    body = inside(shown("sft"))
    starts = [index for index, line in enumerate(body) if line.startswith("--")]
    assert len(starts) == len(schema("sft"))
    for index in starts:
        meaning = body[index + 1]
        assert (meaning[:6], meaning[6] != " ") == (" " * 6, True)
        end = next((i for i in range(index + 1, len(body)) if not body[i].startswith(" " * 6)), len(body))
        assert "(default: " in " ".join(body[index + 1 : end]) or "(required)" in " ".join(body[index + 1 : end])
        assert "" not in body[index:end]


@pytest.mark.parametrize(
    ("flag", "takes"),
    [
        ("bf16", "--bf16, --no_bf16"),
        ("seed", "--seed INT of at least 0"),
        ("pretrain", "--pretrain STR"),
        ("adam_betas", "--adam_betas FLOAT FLOAT of at least 0 and below 1"),
        ("lr_schedule", "--lr_schedule {cosine,linear,constant,wsd}"),
        ("use_wandb", "--use_wandb [STR]"),
        ("max_len", "--max_len INT|none of at least 2"),
    ],
)
def test_a_flag_is_shown_with_what_it_takes(flag: str, takes: str, shown: Shown) -> None:
    assert takes in inside(shown("rl", columns=100))


def test_a_value_is_shown_with_the_file_that_gives_it(shown: Shown) -> None:
    Path("below").mkdir()
    Path("below/mine.yaml").write_text("log_interval: 77\n")
    joined = " ".join(" ".join(inside(shown("sft", "-h", "--config", "below/mine.yaml", "--help-all"))).split())
    assert "(default: 77) (mine.yaml:1)" in joined
    assert joined.count(" (mine.yaml:1)") == 1
    assert "(default: empty)" in joined
    assert joined.count("(required)") == 1


def test_the_short_page_has_its_settings_in_the_order_of_the_record(shown: Shown) -> None:
    body = inside(shown("rl", "--help", columns=100))
    flags = [line.split()[0][2:] for line in body if line.startswith("--")]
    essential = find_command("rl").essential.split()
    assert sorted(flags) == sorted(essential)
    algorithm = [flag for flag in flags if schema("rl")[flag].group == "algorithm"]
    assert algorithm == ["advantage_estimator", "policy_loss", "eps_clip", "loss_agg_mode", "init_kl_coef"]
    joined = " ".join(" ".join(body).split())
    assert "--seed INT Seed of every random choice: the same seed gives the same run (42)" in joined
    assert "after the warm-up (wsd: at the end alone) {cosine, linear, constant, wsd} (cosine)" in joined
    assert "--pretrain STR Model to start from: a Hugging Face directory on this machine, or ORG/NAME" in joined
    assert "gae, ppo Proximal policy optimisation with a critic" in joined


def test_a_command_without_a_choice_of_settings_shows_all(shown: Shown) -> None:
    assert shown("generate", "--help") == shown("generate", "--help-all")
