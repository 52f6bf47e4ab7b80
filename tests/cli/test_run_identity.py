"""What decides the result of a run is changed between two of its starts: each change is refused by name, or recorded.

Files change underneath, flags are given, ranks read different things. A refusal comes before a model loads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rft import run_lifecycle
from rft.identity.changes import Facts, continued_record
from rft.identity.contents import run_contents
from rft.identity.continuation import continuation
from rft.identity.record import plain, with_checksum
from rft.identity.storage import read_record
from rft_cli.config.resolve import resolve
from rft_core.errors import OptionsError
from rft_models.policy.causal_policy import CausalPolicy

REWARD = """from shares import share

def digits(responses, labels):
    return [share(response) for response in responses]

def letters(responses, labels):
    return [1.0 - share(response) for response in responses]
"""
SHARES = """def share(text):
    return sum(letter.isdigit() for letter in text) / (1 + len(text))
"""


def edit(file: str, old: str, new: str) -> Callable[[Path], None]:
    """Replace a text in a file, once."""

    def change(folder: Path) -> None:
        path = folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def lose(*names: str) -> Callable[[Path], None]:
    """Take the lines of these settings out of config.yaml."""

    def change(folder: Path) -> None:
        path = folder / "run" / "config.yaml"
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith(tuple(f"{name}:" for name in names))]
        assert len(lines) - len(kept) == len(names)
        path.write_text("\n".join(kept) + "\n")

    return change


def on_bytes(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of a file."""

    def changed(folder: Path) -> None:
        before = (folder / file).read_bytes()
        assert change(before) != before
        (folder / file).write_bytes(change(before))

    return changed


def rehashed(scheme: int) -> Callable[[Path], None]:
    """Record the rows by the hash of another scheme; 0 is that of versions that had no numbers."""

    def change(folder: Path) -> None:
        path = folder / "run" / "identity.json"
        record = json.loads(path.read_text())
        del record["sha256"]
        rows = record["contents"]["prompt_data"]
        rows |= {"digest": "0" * 64, "scheme": scheme}
        if not scheme:
            del rows["scheme"]
        path.write_text(json.dumps(with_checksum(record)))

    return change


def both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    """Make one change, then the other."""

    def change(folder: Path) -> None:
        first(folder)
        second(folder)

    return change


def flipped(data: bytes) -> bytes:
    """One bit near the end is another."""
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def first_line_lost(data: bytes) -> bytes:
    """All rows but the first."""
    return data.partition(b"\n")[2]


def reversed_lines(data: bytes) -> bytes:
    """The rows in another order."""
    return b"".join(reversed(data.splitlines(keepends=True)))


@dataclass(frozen=True)
class Underneath:
    """A change of a file that nobody says a word about, the code of its refusal and what this names."""

    change: Callable[[Path], None]
    code: str
    names: str
    accepted: bool = True
    """Whether the refusal names the flag that takes it knowingly."""


CONFIG, RECORD, PLACE = "run/config.yaml", "run/identity.json", "run/env.json"
RATE, SEVERAL = "actor_learning_rate", ("n_samples_per_prompt", "generate_max_len")
FILES, SETTINGS, DAMAGED = "identity.files_changed", "identity.settings_changed", "resume.config_damaged"
UNDERNEATH = {
    "reward": Underneath(edit("reward.py", "share(response)", "2 * share(response)"), FILES, "reward"),
    "what the reward imports": Underneath(edit("shares.py", "1 + len", "2 + len"), FILES, "reward"),
    "reference weights": Underneath(on_bytes("model/model.safetensors", flipped), FILES, "weights"),
    "model configuration": Underneath(edit("model/config.json", '_eps": 1e-06', '_eps": 1e-05'), FILES, "model"),
    "tokenizer": Underneath(edit("model/tokenizer_config.json", "{", '{"x": 1,'), FILES, "tokenizer"),
    "chat template": Underneath(on_bytes("model/chat_template.jinja", lambda text: text + b" "), FILES, "tokenizer"),
    "a label": Underneath(edit("train.jsonl", '"label": "20"', '"label": "21"'), FILES, "prompt_data"),
    "the order of rows": Underneath(on_bytes("train.jsonl", reversed_lines), FILES, "prompt_data"),
    "a hash of another scheme": Underneath(rehashed(0), "identity.hash_scheme", "prompt_data"),
    "a hash of another scheme and a label": Underneath(
        both(rehashed(7), edit("heldout.jsonl", '"label": "140"', '"label": "141"')), FILES, "prompt_data"
    ),
    "a row less": Underneath(on_bytes("train.jsonl", first_line_lost), "identity.other_rows", "rows", accepted=False),
    "a held-out label": Underneath(edit("heldout.jsonl", '"label": "140"', '"label": "141"'), FILES, "eval_data"),
    "a digit": Underneath(edit(CONFIG, f"{RATE}: 0.01", f"{RATE}: 0.02"), SETTINGS, RATE),
    "a lost line": Underneath(lose("rollout_batch_size"), SETTINGS, "rollout_batch_size"),
    "three lost lines": Underneath(lose(*SEVERAL, "temperature"), SETTINGS, ",".join(SEVERAL)),
    "the reward's line": Underneath(lose("reward"), SETTINGS, "reward"),
    "the rows' line": Underneath(lose("eval_data"), SETTINGS, "eval_data"),
    "another reward": Underneath(edit(CONFIG, "reward.py:digits", "reward.py:letters"), FILES, "reward"),
    "another algorithm": Underneath(edit(CONFIG, "group_norm", "rloo"), FILES, "advantage_estimator"),
    "a seed in the file": Underneath(edit(CONFIG, "seed: 42", "seed: 43"), "identity.fixed", "seed", accepted=False),
    "the line of the model": Underneath(lose("pretrain"), DAMAGED, CONFIG, accepted=False),
    "the first half": Underneath(
        on_bytes(CONFIG, lambda text: text[: text.index(b"\n", len(text) // 2) + 1]), SETTINGS, "max_steps"
    ),
    "zeros": Underneath(on_bytes(CONFIG, lambda text: text + b"\0\0\0"), DAMAGED, CONFIG, accepted=False),
    "a tag": Underneath(edit(CONFIG, "seed: 42", "seed: !!python/tuple 42"), DAMAGED, CONFIG, accepted=False),
    "a name": Underneath(edit(CONFIG, "temperature:", "temprature:"), DAMAGED, "temprature", accepted=False),
    "the record": Underneath(on_bytes(RECORD, flipped), "identity.damaged", RECORD, accepted=False),
    "the place": Underneath(on_bytes(PLACE, lambda t: t[:40]), "resume.environment_damaged", PLACE, accepted=False),
}


@dataclass(frozen=True)
class Flag:
    """A flag of a resume, and the setting or content that is another one from there on."""

    words: str
    also: tuple[str, ...] = field(default=())
    """Names of contents that change with it."""

    @property
    def name(self) -> str:
        """The setting."""
        return self.words.split()[0].removeprefix("--")


FLAGS = [
    Flag("--actor_learning_rate 0.001"),
    Flag("--advantage_estimator rloo", ("advantage_estimator",)),
    Flag("--rollout_batch_size 3"),
    Flag("--n_samples_per_prompt 2"),
    Flag("--generate_max_len 8"),
    Flag("--temperature 0.5"),
    Flag("--init_kl_coef 0.1"),
    Flag("--adam_betas 0.8 0.9"),
    Flag("--eps_clip 0.1"),
    Flag("--max_steps 7"),
    Flag("--reward reward.py:letters", ("reward",)),
    Flag("--pretrain other", ("model", "weights")),
    Flag("--micro_train_batch_size 2"),
    Flag("--log_interval 2"),
]
REFUSED_FLAGS = {
    "--seed 7": "--ckpt_weights_only",
    "--max_staleness 2": "--ckpt_weights_only",
    "--lora_rank 4": "leave --lora_rank out",
    "--enable_ema": "--ckpt_weights_only",
    "--freeze_prefix model.norm": "--ckpt_weights_only",
    "--train_only_tokens_from 3": "--ckpt_weights_only",
}


@pytest.fixture(scope="module")
def begun(bench: Any, memory_root: Path, call: Callable[..., Any]) -> Iterator[Path]:
    """A folder with a run of one step, and all that the run names, under relative paths."""
    folder = memory_root / "identity"
    shutil.copytree(bench.model, folder / "model")
    shutil.copytree(bench.deep, folder / "other")
    shutil.copy(bench.train, folder / "train.jsonl")
    shutil.copy(bench.held_out, folder / "heldout.jsonl")
    (folder / "reward.py").write_text(REWARD)
    (folder / "shares.py").write_text(SHARES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = "--pretrain model --prompt_data train.jsonl --eval_data heldout.jsonl --device cpu --max_steps 1"
        words += " --num_episodes 9 --reward reward.py:digits --rollout_batch_size 2 --n_samples_per_prompt 4"
        words += " --train_batch_size 8 --generate_max_len 12 --prompt_max_len 40 --actor_learning_rate 1e-2"
        words += " --lr_schedule constant --lr_warmup_ratio 0 --save_path run"
        outcome = call("rl", *words.split())
    assert outcome.code == 0, outcome.err
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def moved(begun: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder in another place, which is the working directory."""
    folder = runs / "moved"
    shutil.copytree(begun, folder)
    file = folder / "run" / "env.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"working_directory": str(folder)}))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is made."""

    def made(*parts: Any, **more: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(CausalPolicy, "__init__", made)


def files_of(folder: Path) -> dict[Path, bytes]:
    """All files of a run but its logs and reports of failures."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in paths if "logs" not in path.parts and "bundle" not in path.name}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", UNDERNEATH)
def test_a_change_underneath_is_refused_by_name(name: str, moved: Path, call: Any) -> None:
    case = UNDERNEATH[name]
    case.change(moved)
    before = files_of(moved / "run")
    outcome = call("resume", moved / "run", "--json_errors")
    assert outcome.code in (2, 4, 5), outcome.err
    problem = outcome.problem
    assert problem["code"] == case.code, problem
    assert ("--accept_changes" in problem["do"]) == case.accepted
    told = problem["do"].rpartition("--accept_changes ")[2] if case.accepted else problem["what"] + problem["where"]
    assert case.names in told
    left = files_of(moved / "run")
    assert {path: left[path] for path in before} == before, "the run is untouched"


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_of_a_resume_is_recorded_and_holds_in_the_next(flag: Flag, moved: Path) -> None:
    run = moved / "run"
    own = ["--config", str(run / "config.yaml"), "--save_path", str(run)]
    recorded = read_record(run)
    assert recorded is not None
    kept = recorded.identity.contents
    at = continuation(resolve("rl", [*own, *flag.words.split()]), run)
    contents = run_contents(at.resolved, kept["prompt_data"], kept["eval_data"])
    facts = Facts(contents, recorded.identity.versions, recorded.identity.machine)
    continued_record(at, facts, run, 1).write(run)
    after = read_record(run)
    assert after is not None
    changes = {change.name: change for change in after.identity.changes}
    assert set(changes) == {flag.name, *flag.also}
    new = plain(at.resolved.values[flag.name])
    if flag.name not in flag.also:
        change = changes[flag.name]
        assert (change.step, change.after, change.origin) == (1, new, "command line")
    again = continuation(resolve("rl", own), run)
    assert plain(again.resolved.values[flag.name]) == new
    assert again.recorded is not None
    assert again.recorded.identity.sha256 == after.identity.sha256
    free = flag.name in ("micro_train_batch_size", "log_interval")
    assert (after.identity.sha256 == recorded.identity.sha256) is free


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("words", REFUSED_FLAGS)
def test_a_flag_that_no_resume_can_take_is_refused_before_a_model_loads(words: str, moved: Path, call: Any) -> None:
    outcome = call("resume", moved / "run", *words.split(), "--json_errors")
    assert (outcome.code, outcome.problem["code"]) == (2, "identity.fixed")
    name = words.partition(" ")[0].removeprefix("--")
    assert outcome.problem["what"].startswith(f"a resume cannot change {name} from ")
    assert REFUSED_FLAGS[words] in outcome.problem["do"]


@pytest.mark.usefixtures("no_model")
def test_other_versions_of_packages_are_refused_by_name(
    moved: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_lifecycle.versions()
    monkeypatch.setattr(run_lifecycle, "versions", lambda: found | {"torch": "9.9", "python": "3.99"})
    outcome = call("resume", moved / "run", "--json_errors")
    assert outcome.problem["code"] == FILES
    assert outcome.problem["do"].endswith("--accept_changes versions")
    assert f"torch {found['torch']} in the record, 9.9 now" in outcome.problem["where"]
    assert "python" not in outcome.problem["where"]


def test_a_run_in_another_place_with_its_files_goes_on_and_every_checkpoint_has_its_record(
    moved: Path, call: Any
) -> None:
    outcome = call("resume", moved / "run", "--max_steps", "2")
    assert outcome.code == 0, outcome.err
    record = json.loads((moved / "run" / "identity.json").read_text())
    newest = json.loads((moved / "run" / "checkpoints" / "step_000002" / "manifest.json").read_text())
    metadata = newest["manifest"]["metadata"]
    assert metadata["identity"] == {key: record[key] for key in metadata["identity"]}
    assert metadata["identity_sha256"] == record["identity_sha256"]
    assert [change["name"] for change in record["changes"]] == ["max_steps"]
    assert record["config"] == (moved / "run" / "config.yaml").read_text()
    assert "max_steps: 2" in record["config"]


@pytest.mark.usefixtures("no_model")
def test_a_hash_of_another_scheme_is_not_taken_for_other_rows(moved: Path, call: Any) -> None:
    rehashed(0)(moved)
    problem = call("resume", moved / "run", "--json_errors").problem
    assert "hash scheme without a number) in the record" in problem["where"]
    assert "cannot tell whether the rows are the same" in problem["why"]
    assert problem["do"].startswith("where the rows are those that the run began with")


def test_what_was_accepted_once_is_accepted_for_good(moved: Path, call: Any) -> None:
    edit("reward.py", "share(response)", "2 * share(response)")(moved)
    edit("train.jsonl", '"label": "20"', '"label": "21"')(moved)
    words = ["--max_steps", "2", "--accept_changes", "reward,prompt_data"]
    outcome = call("resume", moved / "run", *words)
    assert outcome.code == 0, outcome.err
    outcome = call("resume", moved / "run", "--max_steps", "3", "--accept_changes", "reward")
    assert outcome.code == 0, outcome.err
    assert "accept_changes: reward is as recorded" in outcome.out + outcome.err
    changes = json.loads((moved / "run" / "identity.json").read_text())["changes"]
    assert [(change["step"], change["name"]) for change in changes] == [
        (1, "max_steps"),
        (1, "prompt_data"),
        (1, "reward"),
        (2, "max_steps"),
    ]
    assert "accept_changes" not in (moved / "run" / "config.yaml").read_text().replace("accept_changes: ''", "")


def test_an_edited_config_is_put_back_by_the_remedy(moved: Path, call: Any) -> None:
    config = moved / "run" / "config.yaml"
    before = config.read_bytes()
    on_bytes("run/config.yaml", lambda text: text + b"\0")(moved)
    remedy = call("resume", moved / "run", "--json_errors").problem["do"]
    assert remedy.startswith(f"mv {config} {config}.damaged && rft-train resume {moved / 'run'}")
    config.rename(f"{config}.damaged")
    outcome = call("resume", moved / "run", "--json_errors")
    assert outcome.problem["code"] == "run.finished", "it goes as far as before"
    assert config.read_bytes() == before


def test_a_lost_record_is_read_from_the_newest_checkpoint(moved: Path, call: Any) -> None:
    (moved / "run" / "identity.json").unlink()
    edit("reward.py", "share(response)", "2 * share(response)")(moved)
    outcome = call("resume", moved / "run", "--max_steps", "2", "--json_errors")
    assert outcome.problem["code"] == FILES
    assert "manifest.json records" in outcome.problem["what"]
    outcome = call("resume", moved / "run", "--max_steps", "2", "--accept_changes", "reward")
    assert outcome.code == 0, outcome.err
    assert [change.name for change in read_record(moved / "run").identity.changes] == ["max_steps", "reward"]  # type: ignore[union-attr]


def test_a_whole_command_that_goes_on_has_no_other_settings_than_the_run(moved: Path, call: Any) -> None:
    words = "--pretrain model --prompt_data train.jsonl --eval_data heldout.jsonl --device cpu --max_steps 2"
    words += " --num_episodes 9 --reward reward.py:digits --rollout_batch_size 2 --n_samples_per_prompt 4"
    words += " --train_batch_size 8 --prompt_max_len 40 --lr_schedule constant --lr_warmup_ratio 0"
    words += " --save_path run --load_checkpoint"
    lacks = call("rl", *words.split(), "--actor_learning_rate", "3e-2", "--json_errors")
    assert lacks.problem["code"] == SETTINGS
    assert "generate_max_len: 12 in the record (command line), 1024 now (default)" in lacks.problem["where"]
    assert "actor_learning_rate" not in lacks.problem["where"], "a flag is a word that somebody says"
    assert lacks.problem["do"].endswith("this command, with --accept_changes generate_max_len")
    outcome = call("rl", *words.split(), "--generate_max_len", "12", "--actor_learning_rate", "3e-2")
    assert outcome.code == 0, outcome.err
    outcome = call("resume", "run", "--max_steps", "3")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (moved / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy/learning_rate"] for row in rows] == [0.01, 0.03, 0.03]
    # a resume was given the number of steps: it holds where a file or a default has the one before
    held = call("rl", *words.replace("--max_steps 2 ", "").split(), "--generate_max_len", "12", "--json_errors")
    assert (
        "actor_learning_rate: 0.03 in the record (command line, at step 1), 1e-06 now (default)"
        in (held.problem["where"])
    )


def test_a_run_of_an_earlier_version_goes_on_and_is_recorded_from_there(moved: Path, call: Any) -> None:
    (moved / "run" / "identity.json").unlink()
    for path in (moved / "run" / "checkpoints").glob("step_*"):
        rewrite_metadata(path / "manifest.json")
    outcome = call("resume", "run", "--max_steps", "2")
    assert outcome.code == 0, outcome.err
    assert (outcome.out + outcome.err).count("kept no record") == 1
    assert "max_steps: 2" in (moved / "run" / "config.yaml").read_text()
    edit("shares.py", "1 + len", "2 + len")(moved)
    assert call("resume", "run", "--max_steps", "3", "--json_errors").problem["code"] == FILES


def rewrite_metadata(file: Path) -> None:
    """Write a manifest as a version without records wrote it."""
    from dataclasses import replace

    from rft_dist.checkpoint_format.manifest import parse_manifest

    manifest = parse_manifest(file.read_bytes())
    metadata = {key: value for key, value in manifest.metadata.items() if not key.startswith("identity")}
    file.write_bytes(replace(manifest, metadata=metadata).to_bytes())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["resume", "run", "--accept_changes", "rewrad"], "identity.unknown_name"),
        (["resume", "run", "--accept_changes", "pretrain"], "identity.unknown_name"),
        (
            ["sft", "--pretrain", "model", "--prompt_data", "train.jsonl", "--accept_changes", "tokenizer"],
            "identity.nothing_continued",
        ),
        (
            ["sft", "--pretrain", "model", "--prompt_data", "train.jsonl", "--save_path", "run", "--load_checkpoint"],
            "identity.other_command",
        ),
    ],
)
def test_a_start_that_fits_no_record_is_refused(words: list[str], code: str, moved: Path, call: Any) -> None:
    assert call(*words, "--json_errors").problem["code"] == code


def test_a_kill_between_record_and_config_loses_no_override(moved: Path) -> None:
    run = moved / "run"
    own = ["--config", str(run / "config.yaml"), "--save_path", str(run)]
    before = (run / "config.yaml").read_bytes()
    recorded = read_record(run)
    assert recorded is not None
    facts = Facts(recorded.identity.contents, recorded.identity.versions, recorded.identity.machine)
    given = continuation(resolve("rl", [*own, "--adam_betas", "0.5", "0.6", "--temperature", "0.5"]), run)
    continued_record(given, facts, run, 1).write(run)
    (run / "config.yaml").write_bytes(before)
    again = continuation(resolve("rl", own), run)
    assert again.resolved.values["adam_betas"] == again.resolved.settings.optimizer.adam_betas == (0.5, 0.6)
    assert again.resolved.settings.sampling.temperature == 0.5
    continued_record(again, facts, run, 1).write(run)
    assert continuation(resolve("rl", own), run).resolved.origins["temperature"].kind == "file"
    assert "temperature: 0.5" in (run / "config.yaml").read_text()
    edit("run/config.yaml", "temperature: 0.5", "temperature: 0.7")(moved)
    with pytest.raises(OptionsError) as caught:
        continuation(resolve("rl", own), run)
    assert caught.value.problem.code == SETTINGS


def test_a_run_from_the_weights_of_another_goes_on_with_the_same_reference(moved: Path, call: Any) -> None:
    remedy = call("resume", moved / "run", "--seed", "7", "--temperature", "0.5", "--json_errors").problem["do"]
    words = remedy.split()
    assert " ".join(words[4:8]) == "--temperature 0.5 --seed 7" or " ".join(words[4:8]) == "--seed 7 --temperature 0.5"
    started = call(*words[1:])
    assert started.code == 0, started.err
    assert call("resume", moved / "run", "--max_steps", "2").code == 0
    refused = call("resume", moved / "run-2", "--max_steps", "2", "--json_errors").problem
    assert (refused["code"], refused["do"].split()[-1]) == (FILES, "ckpt_path")
    assert "step_000001 of run" in refused["where"]
    assert "step_000002 of run" in refused["where"]
