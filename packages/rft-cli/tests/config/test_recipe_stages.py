"""`rft-train recipes run`: every stage once, in order, by its own command; again on the same directory it goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_cli.commands import build, training
from rft_cli.commands import eval as eval_command
from rft_cli.config import recipes
from rft_cli.config.recipe_stages import final_model, option, read_stage
from rft_cli.main import main
from rft_core import fault_points
from rft_core.errors import DataError

TOY = """
recipe:
  command: rl
  task: doubles of one digit
  needs: toy/rows.jsonl
  stages:
    - name: build
      run: >-
        build --texts {data}/toy/rows.jsonl --text_keys input,output --vocab_size 270 --hidden 16 --layers 1
        --heads 2 --ffn 24 --max_positions 32 --seed {seed} --save_path {run}/untrained
    - name: sft
      run: >-
        sft --pretrain {run}/untrained --prompt_data {data}/toy/rows.jsonl --held_out_rows 2 --patience 2
        --train_batch_size 4 --max_epochs 2 --learning_rate 1e-3 --seed {seed} --save_path {run}/sft
      quick: --max_steps 1
    - name: rl
      run: >-
        rl --config {recipe} --pretrain {final:sft} --prompt_data {data}/toy/rows.jsonl --seed {seed}
        --save_path {run}/rl
      quick: --max_steps 1
    - name: answers
      run: >-
        eval --pretrain {final:rl} --eval_data {data}/toy/rows.jsonl --generate_max_len 4 --input_template '{}'
        --output {run}/answers.jsonl
pretrain: model
rollout_batch_size: 4
n_samples_per_prompt: 2
train_batch_size: 8
max_steps: 2
generate_max_len: 4
prompt_max_len: 16
save_steps: 1
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a file, and data that it finds through the environment."""
    folder = tmp_path / "data" / "toy"
    folder.mkdir(parents=True)
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i), "label": str(2 * i)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("RFT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(TOY)
    return recipe


def start(*argv: str) -> int:
    return main(["recipes", "run", "toy.yaml", "--save_path", "made", *argv])


def summary(stage: str) -> dict[str, Any]:
    return json.loads((Path("made") / stage / "summary.json").read_text())


def printed_commands(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith("  rft-train ")][:4]


def test_every_stage_runs_on_what_the_one_before_it_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--seed", "7") == 0
    shown = capsys.readouterr().out
    assert [summary(stage)["outcome"] for stage in ("sft", "rl")] == ["finished", "finished"]
    assert [summary(stage)["seed"] for stage in ("sft", "rl")] == [7, 7]
    answers = [json.loads(line) for line in Path("made/answers.jsonl").read_text().splitlines()]
    assert len(answers) == 8
    assert "all 4 stages are finished" in shown
    made = Path("made").resolve()
    rl_config = (made / "rl" / "config.yaml").read_text()
    assert f"pretrain: {final_model(made / 'sft')}" in rl_config
    assert (made / "recipe.yaml").read_text() == TOY


def test_the_printed_commands_are_what_a_person_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert start() == 0
    told = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  rft-train ")]
    made = str(Path("made").resolve())
    commands = [line for line in told if made in line and ("--save_path" in line or "--output" in line)]
    assert [line.split()[1] for line in commands] == ["build", "sft", "rl", "eval"]
    again = [line.replace(made, f"{made}-by-hand") for line in commands]
    import shlex

    for line in again:
        assert main(shlex.split(line)[1:]) == 0
    for part in ("sft", "rl"):
        one, two = (final_model(Path(f"{made}{suffix}") / part) for suffix in ("", "-by-hand"))
        assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_finished_stages_are_passed_over(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start() == 0
    capsys.readouterr()
    for module in (build, training, eval_command):
        monkeypatch.setattr(module, "run", lambda *words: pytest.fail("a finished stage ran again"))
    assert start() == 0
    assert capsys.readouterr().out.count("finished already") == 4


def test_the_first_failure_ends_it_with_its_code_and_a_later_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training.run

    def fails(command: str, argv: Sequence[str]) -> int:
        if command == "sft":
            return run(command, argv)
        raise DataError(code="test.broken", what="broken", where="here", why="a rule")

    with monkeypatch.context() as broken:
        broken.setattr(training, "run", fails)
        assert start() == 4
    assert summary("sft")["outcome"] == "finished"
    assert not Path("made/answers.jsonl").exists()
    first = final_model(Path("made/sft")).stat().st_mtime_ns
    assert start() == 0
    assert final_model(Path("made/sft")).stat().st_mtime_ns == first
    assert Path("made/answers.jsonl").exists()


def stop_at(point: str, passes: int) -> None:
    """Send this process a SIGTERM at the nth pass of a point."""
    seen = 0

    def hook(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == passes:
            os.kill(os.getpid(), signal.SIGTERM)

    fault_points.install(hook)


def test_an_interrupted_stage_is_continued_to_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert start() == 0
    Path("made").rename("whole")
    stop_at("rl.logged", 1)
    try:
        assert start() == 75
    finally:
        fault_points.install(None)
    assert summary("rl")["outcome"] == "interrupted"
    capsys.readouterr()
    assert start() == 0
    shown = capsys.readouterr().out
    assert f"rft-train resume {Path('made/rl').resolve()}" in shown
    assert summary("rl")["outcome"] == "finished"
    one, two = (final_model(Path(name) / "rl") / "model.safetensors" for name in ("whole", "made"))
    assert one.read_bytes() == two.read_bytes()


def test_a_stage_without_a_checkpoint_starts_again_and_nothing_is_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--quick") == 0
    rl_run = Path("made/rl")
    (rl_run / "summary.json").unlink()
    for checkpoint in (rl_run / "checkpoints").glob("step_*"):
        checkpoint.rename(rl_run / f"away-{checkpoint.name}")
    assert start("--quick") == 0
    assert summary("rl")["outcome"] == "finished"
    assert Path("made/rl-unsaved-1/config.yaml").exists()
    assert "moved to" in capsys.readouterr().out


def test_quick_adds_its_flags_and_is_remembered() -> None:
    assert start("--quick") == 0
    assert (summary("sft")["steps"], summary("rl")["steps"]) == (1, 1)
    assert start() == 0, "the directory says that it is a quick one"


@pytest.mark.parametrize("changed", [["--seed", "8"], ["--data", "elsewhere"]])
def test_other_choices_on_the_same_directory_are_refused(
    changed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").symlink_to(tmp_path / "data")
    Path("made").mkdir()
    record = {"recipe": str(tmp_path / "toy.yaml"), "data": str(tmp_path / "data2"), "seed": "7", "quick": False}
    if changed[0] == "--seed":
        record["data"] = str(tmp_path / "data")
    Path("made/stages.json").write_text(json.dumps(record))
    assert start(*changed) == 2
    assert f"{changed[0].strip('-')} = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prepare", "argv", "code", "part"),
    [
        ("unset", [], 4, "the data directory is not given: toy needs toy/rows.jsonl"),
        ("", ["--data", "data/toy"], 4, "--data {root}/data"),
        ("", ["--data", "nowhere"], 4, "has no toy/rows.jsonl"),
        ("", ["--seed", "one"], 2, "--seed one"),
        ("", ["--sede", "1"], 2, "--seed"),
        ("", ["--seed"], 2, "--seed needs a value"),
        ("", ["more"], 2, "'more'"),
        ("ranks", [], 2, "started as 2 processes"),
        ("files", [], 2, "holds files and is not the run of a recipe"),
        ("broken", [], 2, "--max_stepz"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    prepare: str,
    argv: list[str],
    code: int,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if prepare == "unset":
        monkeypatch.delenv("RFT_DATA_DIR")
    elif prepare == "ranks":
        monkeypatch.setenv("WORLD_SIZE", "2")
    elif prepare == "files":
        Path("made").mkdir()
        Path("made/thesis.txt").write_text("precious")
    elif prepare == "broken":
        Path("toy.yaml").write_text(TOY.replace("--max_epochs 2", "--max_stepz 2"))
    before = {path for path in Path("made").rglob("*")} if Path("made").exists() else set()
    assert start(*argv) == code
    assert part.format(root=tmp_path) in capsys.readouterr().err
    after = {path for path in Path("made").rglob("*")} if Path("made").exists() else set()
    assert after == before


def test_a_recipe_of_one_command_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "run", "quickstart"]) == 2
    assert "rft-train quickstart\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a", "run": ""},
        {"run": "sft --seed 1"},
        {"name": "a", "run": "quickstart"},
        {"name": "a", "run": "remove -r x"},
        {"name": "a", "run": "sft", "fast": "x"},
        {"name": "a", "run": "sft 'x"},
    ],
)
def test_a_stage_that_cannot_be_run_is_refused_with_its_file(fields: dict[str, str]) -> None:
    with pytest.raises(DataError) as caught:
        read_stage(fields, Path("my.yaml"))
    assert caught.value.problem.where == "my.yaml"


def test_places_are_filled_word_by_word(tmp_path: Path) -> None:
    stage = read_stage({"name": "s", "run": "sft --pretrain {final:a} --x={data}/b --t '{input} {}' {seed}"}, Path())
    values = {"run": str(tmp_path), "data": "/with space", "seed": "4", "recipe": "r"}
    (tmp_path / "a" / "checkpoints" / "step_000002" / "model").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "step_000010" / "model").mkdir(parents=True)
    newest = str(tmp_path / "a" / "checkpoints" / "step_000010" / "model")
    words = stage.words(values, quick=False)
    assert words == ["sft", "--pretrain", newest, "--x=/with space/b", "--t", "{input} {}", "4"]
    assert (option(words, "pretrain"), option(words, "x"), option(words, "y")) == (newest, "/with space/b", "")


@pytest.mark.parametrize("name", [name for name in recipes.names() if recipes.load(name).stages])
def test_the_stages_of_the_installed_recipes_can_be_resolved(name: str, tmp_path: Path) -> None:
    from rft_cli.config.resolve import resolve

    values = {"run": str(tmp_path), "data": "data", "seed": "4", "recipe": name}
    for stage in recipes.load(name).stages:
        for quick in (False, True):
            words = stage.words(values, quick=quick)
            assert resolve(stage.command, words[1:]).notes == ()
