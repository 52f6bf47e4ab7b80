"""`genrec run` from people to figures in one call, again where nothing has changed, and where one option has."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from rft_cli.main import main
from rft_genrec.pipeline import run

pytestmark = pytest.mark.xdist_group("genrec_pipeline")

STAGES = ("data", "embed", "sid", "sft", "rl", "eval")
SHORT = "--device cpu --save_interval 0 --eval_steps 0 --max_eval_samples 4"
OPTIONS = {
    "data": "--source synthetic --users 40 --personas 1 --dataset_name made",
    "embed": "--svd_dim 8",
    "sid": "--levels 2 --codes 32 --held_out_share 0 --kmeans_iterations 5",
    "sft": f"{SHORT} --rows sequences --max_steps 2 --hidden_size 16 --num_layers 1 --num_heads 2 --max_seq_len 32",
    "rl": f"{SHORT} --max_steps 1 --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16",
    "eval": "--device cpu --num_beams 10 --max_eval_samples 8 --bootstrap_draws 10",
}


def in_this_process(words: Sequence[str]) -> Generator[str, None, int]:
    """A stage without a second start of Python; that stages are processes is seen in test_training.py."""
    yield from ()
    return main(list(words))


def words_of(folder: Path, **changed: str) -> list[str]:
    options = [f"--{name}_options={text}" for name, text in (OPTIONS | changed).items()]
    return ["genrec", "run", "--stages", ",".join(STAGES), "--save_path", str(folder), *options]


def what_became(printed: str) -> dict[str, str]:
    """What each stage did, by its name."""
    lines = [line.partition(", ")[2] for line in printed.splitlines() if line.startswith("stage ")]
    return {name: text for name, _, text in (line.partition(": ") for line in lines)}


def test_six_stages_run_once_and_then_what_depends_on_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "command_lines", in_this_process)
    folder = tmp_path / "run"
    assert main(words_of(folder)) == 0
    assert what_became(capsys.readouterr().out) == dict.fromkeys(STAGES, "begins")
    results = json.loads((folder / "eval" / "results.json").read_text())
    assert {"model", "popularity", "transitions"} <= set(results["methods"])
    manifest = json.loads((folder / "stages" / "eval.json").read_text())
    # what was evaluated is the model of the stage rl
    assert [name for name in manifest["reads"] if name.startswith("rl/checkpoints/")]

    assert main(words_of(folder)) == 0
    same = dict.fromkeys(STAGES, "options and inputs are unchanged, passed over")
    assert what_became(capsys.readouterr().out) == same

    assert main(words_of(folder, rl=f"{OPTIONS['rl']} --temperature 2")) == 0
    became = what_became(capsys.readouterr().out)
    assert {name: became[name] for name in STAGES[:4]} == {name: same[name] for name in STAGES[:4]}
    assert became["rl"] == "begins again, since its options have changed"
    assert became["eval"].startswith("begins again, since rl/checkpoints/")
    assert (folder / "rl-1" / "summary.json").is_file()


def test_what_a_stage_is_told_is_a_command_that_can_be_typed(tmp_path: Path) -> None:
    from rft_genrec.pipeline.stages import filled, stages_of
    from rft_genrec.settings.run import GenrecRunSettings, PipelineSettings, StageOptionSettings

    settings = GenrecRunSettings(
        pipeline=PipelineSettings(stages=",".join(STAGES), save_path=str(tmp_path)),
        options=StageOptionSettings(**{f"{name}_options": text for name, text in OPTIONS.items()}),
    )
    for stage in stages_of(settings):
        words = filled(stage, tmp_path)
        assert shlex.split(shlex.join(words)) == words
        assert main([*words, "--print_config"]) == 0
