"""A disk that refuses: a run trains on and saves later, or ends with a storage error and a resume goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.compare import checkpoints, differences
from support.references import References, Restarts
from support.runs import ForkServer, Prelude
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

STORAGE = 6
SHORT = ("--max_steps", "4", "--save_steps", "2", "--eval_steps", "2", "--rollout_log_interval", "1")
LATER_SAVE, LAST_SAVE = 2, 3
REFUSED_ONCE: dict[str, tuple[Prelude, str]] = {
    "full while a file is flushed": (("refuse_at", ["checkpoint.file.sync.before", 16, "ENOSPC"]), "ENOSPC"),
    "quota while the model is written": (
        ("refuse_at", ["checkpoint.model.write.before", LATER_SAVE, "EDQUOT"]),
        "EDQUOT",
    ),
    "input or output error at the rename": (("refuse_at", ["checkpoint.publish.before", LATER_SAVE, "EIO"]), "EIO"),
    "read-only at the staging directory": (("refuse_at", ["checkpoint.mkdir.before", 5, "EROFS"]), "EROFS"),
}
REFUSED_FOR_GOOD: dict[str, tuple[Prelude, str]] = {
    "quota while the last model is written": (
        ("refuse_at", ["checkpoint.model.write.before", LAST_SAVE, "EDQUOT"]),
        "EDQUOT",
    ),
    "full while a row is appended": (("refuse_at", ["run.append", 4, "ENOSPC"]), "ENOSPC"),
}


@pytest.mark.parametrize("refusal", REFUSED_ONCE)
def test_a_refused_save_costs_that_checkpoint_alone_and_training_goes_on(
    server: ForkServer, task: TinyTask, references: References, runs: Path, refusal: str
) -> None:
    prelude, name = REFUSED_ONCE[refusal]
    ended = server.run(*task.words("rl", runs / "run", *SHORT), preludes=[prelude])
    assert ended.code == 0, ended.output[-3000:]
    assert ended.output.count("training goes on, and the next save tries again (1 of 3") == 1, ended.output[-3000:]
    assert f"cannot save step 2: {runs / 'run' / 'checkpoints'} needs" in ended.output
    assert name in ended.output
    assert [path.name for path in checkpoints(runs / "run")] == ["step_000000", "step_000004"]
    assert not [path for path in (runs / "run" / "checkpoints").iterdir() if path.name.startswith(".staging")]
    assert differences(references.run("rl", *SHORT), runs / "run") == []


def test_a_refused_save_goes_to_the_second_directory_and_the_run_continues_from_there(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run, second = runs / "run", runs / "second"
    words = task.words("rl", run, *SHORT, "--fallback_save_path", str(second))
    preludes: list[Prelude] = [
        ("refuse_at", ["checkpoint.model.write.before", LATER_SAVE, "ENOSPC"]),
        ("signal_at", ["rl.logged", 3, "SIGTERM"]),
        # the save of step 3: this prelude does not see the pass at which the first one refuses
        ("refuse_at", ["checkpoint.model.write.before", LATER_SAVE + 1, "ENOSPC"]),
    ]
    stopped = server.run(*words, preludes=preludes)
    assert stopped.code == 75, stopped.output[-3000:]
    (folder,) = second.iterdir()
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000002", "step_000003"]
    assert checkpoints(run) == [], "two are kept, over both directories together"
    assert stopped.output.count(f"is in {folder}") == 2, stopped.output[-3000:]
    assert "training goes on, and the next save tries again" not in stopped.output
    resumed = server.run("resume", str(run))
    assert resumed.code == 0, resumed.output[-3000:]
    assert "from step 3" in resumed.output
    assert checkpoints(run)[-1].name == "step_000004"
    assert differences(references.run("rl", *SHORT), run) == []


@pytest.mark.parametrize("refusal", REFUSED_FOR_GOOD)
def test_a_disk_that_refuses_costs_no_checkpoint(
    server: ForkServer, task: TinyTask, references: References, runs: Path, refusal: str
) -> None:
    prelude, name = REFUSED_FOR_GOOD[refusal]
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    refused = restarts.start([prelude]).wait()
    assert refused.code == STORAGE, refused.output[-3000:]
    assert name in refused.output
    assert [path.name for path in checkpoints(runs / "run")][:1] == ["step_000000"]
    assert not [path for path in (runs / "run" / "checkpoints").iterdir() if path.name.startswith(".staging")]
    restarts.finish()
    assert restarts.resumes == 1
    assert differences(references.run("rl", *SHORT), runs / "run") == []


def test_sampled_rollouts_that_do_not_fit_end_no_run(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run = runs / "run"
    preludes: list[Prelude] = [("refuse_at", ["run.rename", 8, "ENOSPC"])]
    ended = server.run(*task.words("rl", run, *SHORT), preludes=preludes)
    assert ended.code == 0, ended.output[-3000:]
    (lost,) = json.loads((run / "summary.json").read_text())["verdict"]
    assert lost["code"] == "rows_lost"
    assert "step_000002.jsonl: ENOSPC" in lost["what"]
    assert ended.output.count("the run goes on without these rows") == 1
    assert lost["what"] in ended.output
    assert not (run / "rollouts" / "step_000002.jsonl").exists()
    assert len(differences(references.run("rl", *SHORT), run)) <= 2, "that file and the verdict"


def test_a_file_that_may_not_grow_is_a_storage_error(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    """The limit is the system's own and refuses the weights, which another library writes."""
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    stopped = restarts.start([("signal_at", ["rl.logged", 1, "SIGTERM"])]).wait()
    assert stopped.code == 75
    refused = restarts.start([("limit_file_size", [60_000])]).wait()
    assert refused.code == STORAGE, refused.output[-3000:]
    assert "step 1" in refused.output, "the last good checkpoint is named"
    assert [path.name for path in checkpoints(runs / "run")] == ["step_000000", "step_000001"]
    restarts.finish()
    assert differences(references.run("rl", *SHORT), runs / "run") == []


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    restarts = Restarts(server, task.words("rl", runs / "run", *SHORT), runs / "run")
    assert restarts.start([("signal_at", ["rl.logged", 3, "SIGTERM"])]).wait().code == 75
    weights = checkpoints(runs / "run")[-1] / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    resumed = restarts.finish()
    assert "model.safetensors" in resumed.output, "what was passed over is said"
    assert "continuing" in resumed.output
    assert (runs / "run" / "checkpoints" / "quarantine_step_000003").is_dir()
    assert differences(references.run("rl", *SHORT), runs / "run") == []
