"""One rank differs from the others in one thing: it is named on all of them before a model loads.

Twenty cases (`full`), three of them in the test command: settings, libraries, code, the model's files, data, the
run's folder.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")
PREFLIGHT = 3
LONGEST = 10.0


@dataclass(frozen=True)
class Case:
    """What is different on rank 1, and how it is named."""

    named: str
    changes: dict[str, Any] = field(default_factory=dict)
    spoil: str = ""
    """File of rank 1's own folder that is changed: relative paths lead there."""
    text: str = " "
    """What is appended to it; empty = it is deleted."""
    two_nodes: bool = False


def setting(name: str, value: str) -> Case:
    return Case(f"setting {name}", {"words": [f"--{name}", value]})


CASES = {
    "seed": setting("seed", "77"),
    "learning rate": setting("actor_learning_rate", "1e-9"),
    "batch": setting("train_batch_size", "16"),
    "micro-batch": setting("micro_train_batch_size", "2"),
    "steps": setting("max_steps", "1"),
    "temperature": setting("temperature", "0.5"),
    "clip": setting("eps_clip", "0.1"),
    "response length": setting("generate_max_len", "3"),
    "rewards": setting("reward", "exact"),
    "strategy": Case("setting fsdp", {"words": ["--fsdp"]}),
    "torch": Case("package torch", {"versions": {"torch": "2.0.0"}}),
    "transformers": Case("package transformers", {"versions": {"transformers": "absent"}}),
    "equations": Case("code rft_algos", {"code": ["rft_algos"]}),
    "trainer": Case("code rft_trainer", {"code": ["rft_trainer"]}),
    "model configuration": Case("pretrain: model config.json", spoil="model/config.json"),
    "tokenizer": Case("pretrain: model tokenizer.json", spoil="model/tokenizer.json"),
    "weights": Case("pretrain: model weights", spoil="model/model.safetensors"),
    "training data": Case("file prompt_data 1", spoil="train.jsonl", text="\n", two_nodes=True),
    "evaluation data": Case("file eval_data 1", spoil="heldout.jsonl", text="", two_nodes=True),
    "run folder": Case("run directory", spoil="model/none", text="x"),
}
QUICK = ("learning rate", "tokenizer", "training data")


@pytest.fixture(scope="module")
def folders(task: TinyTask, memory_root: Path) -> tuple[Path, Path]:
    """The same files twice: where rank 0 stands, and where rank 1 does."""
    made = memory_root / "rank_0_stands_here", memory_root / "rank_1_stands_here"
    for folder in made:
        folder.mkdir()
        shutil.copytree(task.model, folder / "model")
        for name in ("train.jsonl", "heldout.jsonl"):
            shutil.copy(task.folder / name, folder / name)
    return made


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.night) for n in CASES])
def test_the_difference_is_named_on_all_ranks_before_a_model_loads(
    server: ForkServer, task: TinyTask, folders: tuple[Path, Path], runs: Path, name: str
) -> None:
    case, (first, other) = CASES[name], folders
    own = runs / "own"
    shutil.copytree(other, own)
    if case.spoil:
        _spoil(own / case.spoil, case.text)
    save_path = "runs/x" if name == "run folder" else str(runs / "run")
    words = ["rl", "--config", str(task.folder / "rl.yaml"), "--pretrain", "model", "--prompt_data", "train.jsonl"]
    words += ["--eval_data", "heldout.jsonl", "--save_path", save_path, "--max_steps", "2"]
    task.words("rl", runs / "run")  # writes rl.yaml
    changes = case.changes | {"start": str(first), "two_nodes": case.two_nodes}
    if case.spoil:
        changes["directory"] = str(own)
    ended = server.run(*words, preludes=[("differ_at", [1, changes])], num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PREFLIGHT, PREFLIGHT), ended.output[-3000:]
    assert ended.output.count("rank 1) differs from node") == 2, "every rank says which one it is"
    assert ended.output.count(f"{case.named} | rank 0: ") == 2, ended.output[-3000:]
    assert ended.seconds < LONGEST
    assert not (runs / "run" / "config.yaml").exists(), "no run was begun"
    assert "step 1/" not in ended.output
    print(json.dumps({"case": name, "seconds": round(ended.seconds, 2)}))


def _spoil(path: Path, text: str) -> None:
    """Change a file that only rank 1 sees."""
    if not text:
        path.unlink()
        return
    with path.open("a") as file:
        file.write(text)


ON_ONE_MACHINE = {
    "labels": ("train.jsonl", lambda text: text.replace('"label": "0', '"label": "1', 1), "prompt_data"),
    "row order": ("train.jsonl", lambda text: "\n".join(reversed(text.splitlines())) + "\n", "prompt_data"),
    "held-out labels": ("heldout.jsonl", lambda text: text.replace('"label": "0', '"label": "1', 1), "eval_data"),
    "reward": ("reward.py", lambda text: text.replace("1.0", "0.5"), "reward"),
    "what the reward imports": ("right.py", lambda text: f"{text}# more\n", "reward"),
}
RULES = {
    "reward.py": "from right import right\n\ndef rule(responses, labels):\n"
    "    return [1.0 * right(r, l) for r, l in zip(responses, labels)]\n",
    "right.py": "def right(response, label):\n    return response.strip() == label\n",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "labels" else pytest.mark.night) for n in ON_ONE_MACHINE]
)
def test_ranks_of_one_machine_that_read_different_things_end_before_a_model_loads(
    server: ForkServer, task: TinyTask, folders: tuple[Path, Path], runs: Path, name: str
) -> None:
    file, change, named = ON_ONE_MACHINE[name]
    places = runs / "first", runs / "other"
    for place in places:
        shutil.copytree(folders[0], place)
        for rule, text in RULES.items():
            (place / rule).write_text(text)
    before = (places[1] / file).read_text()
    (places[1] / file).write_text(change(before))
    assert (places[1] / file).read_text() != before
    task.words("rl", runs / "run")  # writes rl.yaml
    words = ["rl", "--config", str(task.folder / "rl.yaml"), "--pretrain", "model", "--prompt_data", "train.jsonl"]
    words += ["--eval_data", "heldout.jsonl", "--save_path", str(runs / "run"), "--max_steps", "2"]
    words += ["--reward", "reward.py:rule"]
    changes = {"start": str(places[0]), "directory": str(places[1])}
    ended = server.run(*words, preludes=[("differ_at", [1, changes])], num_ranks=2)
    assert (ended.code, *ended.other_codes) == (PREFLIGHT, PREFLIGHT), ended.output[-3000:]
    assert ended.output.count(f"rank 1: {named} | rank 0: ") == 2, ended.output[-3000:]
    assert not (runs / "run" / "config.yaml").exists(), "no run was begun"
    assert "step 1/" not in ended.output
