"""`rft-train` with rewards that see the images: a reward model, a judge here, a judge behind a server, a function."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.compare import read_rows
from support.vision_task import VisionTask, make_vision_task

from rft_cli.main import main
from rft_models.reward_model.loading import load_reward_model, new_reward_model
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.spec import RewardSpec
from rft_models.tiny_models.text import build_character_model
from rft_trainer.runs.image_entries import entries_of

pytestmark = pytest.mark.xdist_group("vision_rewards")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> VisionTask:
    return make_vision_task(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reward_model(task: VisionTask) -> Path:
    """That nobody trained."""
    new_reward_model(task.model, RewardSpec(), seed=3).save_pretrained(task.root / "rm")
    return task.root / "rm"


def words(task: VisionTask, path: Path, *more: object, data: Path | None = None) -> list[str]:
    """One step without the task's own reward."""
    given = task.rl_words("--max_steps", 1, "--rollout_log_interval", 1, "--num_trajectories_to_save", 99, data=data)
    at = given.index("--reward")
    return [*given[:at], *given[at + 2 :], "--mixed_mm_data", "--save_path", str(path), *map(str, more)]


def rollouts(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "rollouts" / "step_000001.jsonl")


def files_of(row: dict[str, Any]) -> tuple[bytes, ...]:
    return tuple(Path(entry["path"]).read_bytes() for entry in entries_of(row))


def test_a_reward_model_scores_what_it_sees_and_two_ranks_score_as_one(task: VisionTask, reward_model: Path) -> None:
    one, two = task.root / "rm_one", task.root / "rm_two"
    reward = ("--reward_pretrain", f"rm={reward_model}")
    assert main(["rl", *words(task, one, *reward, data=task.mixed)]) == 0
    rows = rollouts(one)
    assert {len(entries_of(row)) for row in rows} == {0, 1}
    scorer = RewardTextScorer(load_reward_model(reward_model))
    for row in rows:
        [scores] = scorer.score([row["prompt"]], [()], [row["response"]], [files_of(row)])
        assert isinstance(scores, dict)
        assert row["reward"] == pytest.approx(scores["score"], abs=1e-5)
    assert main(["rl", *words(task, two, *reward, "--nproc", 2, data=task.mixed)]) == 0
    for row, other in zip(rollouts(two), rows, strict=True):
        assert row["response"] == other["response"]
        assert row["reward"] == pytest.approx(other["reward"], abs=1e-5)


def test_a_judge_of_this_process_sees_the_images(task: VisionTask, tmp_path: Path) -> None:
    question = tmp_path / "question.txt"
    question.write_text("{prompt}{response}")
    run = task.root / "judged"
    judge = ["--judge_pretrain", task.model, "--judge_template", question, "--judge_range", "0", "1"]
    judge += ["--judge_pattern", "(?s)()", "--max_unscored_share", "1", "--judge_max_new_tokens", "4"]
    assert main(["rl", *words(task, run, *judge, data=task.mixed)]) == 0
    assert {row["status"] for row in rollouts(run)} == {"no_verdict"}, "every question was answered, none with a number"


def test_rewards_of_text_alone_are_refused_by_name(
    task: VisionTask, reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = build_character_model(tmp_path / "text", hidden=16, layers=1, heads=2, ffn=16)
    new_reward_model(text, RewardSpec(), seed=3).save_pretrained(tmp_path / "blind")
    for flag, place in (("--reward_pretrain", tmp_path / "blind"), ("--judge_pretrain", text)):
        for command in (["rl"], ["check", "rl"], ["plan", "rl"]):
            given = words(task, tmp_path / "run", flag, place)
            assert main([*command, *given, "--json_errors"]) == 2, command
            problem = json.loads(capsys.readouterr().err.splitlines()[-1])["problem"]
            assert (problem["code"], problem["where"]) == ("reward.no_images", flag)
            assert str(place) in problem["what"]
    assert not (tmp_path / "run").exists()


class Servers:
    """A judge that gives the number of images in the question, and remembers how they came."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = body["messages"][0]["content"]
                parts = content if isinstance(content, list) else []
                seen = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
                outer.addresses += seen
                answer = {"choices": [{"message": {"content": f"<score>{len(seen)}</score>"}}]}
                encoded = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def test_a_judge_behind_a_server_is_sent_the_images(task: VisionTask, servers: Servers) -> None:
    run = task.root / "far"
    judge = ["--judge_url", f"{servers.url}/v1", "--judge_model", "m", "--judge_range", "0", "2"]
    assert main(["rl", *words(task, run, *judge, data=task.mixed)]) == 0
    for row in rollouts(run):
        assert row["reward"] == len(entries_of(row)) / 2
    assert all(address.startswith("data:image/png;base64,") for address in servers.addresses)


SEES = """from pathlib import Path

def colours(responses, labels, *, images):
    return [float(sum(Path(path).stat().st_size for path in seen)) for seen in images]
"""


def test_a_function_of_ones_own_may_ask_for_the_images(task: VisionTask, tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    run = task.root / "own"
    assert main(["rl", *words(task, run, "--reward", f"{tmp_path}/sees.py:colours", data=task.mixed)]) == 0
    rows = rollouts(run)
    assert all(row["reward"] == sum(map(len, files_of(row))) for row in rows)
    assert {row["reward"] > 0 for row in rows} == {True, False}


def test_a_run_shows_its_samples_beside_their_images(task: VisionTask, capsys: pytest.CaptureFixture[str]) -> None:
    run = task.root / "shown"
    capsys.readouterr()
    assert main(["rl", *words(task, run, "--reward", f"{task.root}/reward.py:letters")]) == 0
    assert f"sampled answers, for a browser: {run / 'samples.html'}" in capsys.readouterr().out
    page = (run / "samples.html").read_text()
    shown = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert shown
    assert len(shown) == len(set(shown)), "an image is held once, however many prompts show it"
    (entry,) = entries_of(rollouts(run)[0])
    assert (entry["width"], entry["tokens"]) == (16, 4)
    assert entry["where"].startswith(f"{task.train}:")
