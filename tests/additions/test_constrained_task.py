"""A task's constraint in every command: samples and beams, probabilities in the loss, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from additions.installation import install
from support.trainer_task import TrainerTask

from rft_cli.diagnostics import bundle
from rft_cli.main import main
from rft_trainer.runs.reader import read_run, rows

SOURCE = Path(__file__).with_name("sum_task.py")
EVEN = {str(number) for number in range(0, 20, 2)}

Say = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package as it is after an installation."""
    with pytest.MonkeyPatch.context() as patch:
        folder, entries = tmp_path_factory.mktemp("site"), "[rft.tasks]\nsums = sum_task:SUMS\n"
        install(patch, folder, SOURCE, package="sum-task", entry_points=entries)
        yield
    sys.modules.pop("sum_task", None)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """What `rft-train WORDS...` prints, and whether it ends well."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main([str(word) for word in words]) == code, out.getvalue()
        bundle.remember_run_directory(None)
        return out.getvalue()

    return run


def training(task: TrainerTask, run: Path, **more: object) -> list[object]:
    chosen = task.settings | {"prompt_data": "sums:6", "eval_data": "sums:6-9", "reward": "sums", "max_steps": 2}
    chosen |= {"constraint": "sums:20", "rollout_log_interval": 1, "save_path": run, **more}
    return [
        "rl",
        *(word for name, value in chosen.items() if value is not None for word in (f"--{name}", value) if word != ""),
    ]


def asked(command: str, task: TrainerTask, output: Path, *more: object) -> list[object]:
    data = "eval_data" if command == "eval" else "prompt_data"
    words: list[object] = [command, "--pretrain", task.settings["pretrain"], f"--{data}", "sums:3"]
    words += ["--reward", "sums"] if command == "eval" else []
    return [*words, "--constraint", "sums:20", "--output", output, "--generate_max_len", 4, *more]


def responses_by_prompt(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows(path):
        found.setdefault(row["prompt"], []).append(row["response"])
    return found


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_beams_are_distinct_sequences_as_many_as_there_are(
    command: str, say: Say, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    for width, wanted in ((1, 1), (4, 4), (50, 10)):
        output = tmp_path / f"{width}.jsonl"
        said = say(*asked(command, trainer_task, output, "--num_beams", width))
        found = responses_by_prompt(output)
        assert [len(beams) for beams in found.values()] == [wanted] * 3
        assert all(set(beams) <= EVEN and len(set(beams)) == len(beams) for beams in found.values())
    if command == "eval":
        [last] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert last["eval/hit@10"] == 1.0  # all ten sequences are among them
        assert not any(name.startswith("eval/pass@") for name in last)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_engines_draw_the_same_sequences(engine: str, say: Say, trainer_task: TrainerTask, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    more = ["--n_samples_per_prompt", 8, "--temperature", 1, "--engine_type", engine]
    say(*asked("generate", trainer_task, output, *more))
    found = responses_by_prompt(output)
    assert {response for group in found.values() for response in group} <= EVEN
    assert len({response for group in found.values() for response in group}) > 3


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--num_beams", 4, "--engine_type", "hf"], "has no beam search within a constraint"),
        (["--num_beams", 4, "--top_p", 0.5], "beams are searched for and not drawn"),
        (["--num_beams", 4, "--n_samples_per_prompt", 2], "the responses to a prompt are its beams"),
        (["--num_beams", 4, "--constraint="], "a beam search ranks the sequences of a constraint"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(
    more: list[object], why: str, say: Say, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    assert why in say(*asked("generate", trainer_task, tmp_path / "out.jsonl", *more), code=2)


@pytest.mark.parametrize(("beams", "there"), [(4, 4), (12, 10)])
def test_held_out_prompts_are_searched_for_their_best_sequences(
    beams: int, there: int, say: Say, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    say(*training(trainer_task, tmp_path / "run", eval_beams=beams, eval_k="1,2,4"))
    first, *_ = rows(tmp_path / "run" / "evals.jsonl")
    assert first["eval/samples"] == there
    # the first beam is the answer
    assert first["eval/accuracy"] == first["eval/hit@1"] <= first["eval/hit@2"] <= first["eval/hit@4"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"eval_beams": 4, "engine_type": "hf"}, "has no beam search within a constraint"),
        ({"eval_beams": 4, "eval_n": 2, "eval_temperature": 1}, "the responses to a held-out prompt are its beams"),
        ({"eval_beams": 4, "constraint": None}, "a beam search ranks the sequences of a constraint"),
        ({"group_source": "beams", "engine_replicas": 2}, "replicas share samples"),
        ({"group_source": "beams", "n_samples_per_prompt": 11}, "groups of 11 beams, sums:20 has 10 sequences"),
        ({"group_source": "beams", "use_fire": ""}, "beams are searched for and not drawn"),
        ({"top_k": 3}, "drawn among fewer tokens than the loss takes probabilities of"),
    ],
)
def test_what_does_not_go_with_groups_of_beams_is_refused(
    more: dict[str, Any], why: str, say: Say, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    assert why in say(*training(trainer_task, tmp_path / "run", **more), code=2)


@pytest.mark.parametrize(
    "more",
    [
        {"init_kl_coef": 0.1},
        {"constraint_logprobs": "vocabulary"},
        {"group_source": "beams"},
        {"group_source": "weighted_beams"},
        {"engine_type": "hf"},
        {"engine_replicas": 2},
        {"max_staleness": 1},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_a_run_trains_on_what_its_samples_were_drawn_from(
    more: dict[str, Any], say: Say, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    say(*training(trainer_task, tmp_path / "run", n_samples_per_prompt=5, train_batch_size=10, **more))
    run = read_run(tmp_path / "run")
    assert run.outcome == "finished"
    # engine and trainer compute the same log-probs of the same distribution; ahead, those of older weights
    assert "max_staleness" in more or max(run.series("policy/logprob_gap_max")) < 1e-3
    assert max(run.series("policy/gradient_norm")) > 0.0
    found = [responses_by_prompt(file) for file in run.rollout_files]
    assert all(set(group) <= EVEN for groups in found for group in groups.values())
    if "group_source" in more:
        assert all(len(set(group)) == 5 for groups in found for group in groups.values())
