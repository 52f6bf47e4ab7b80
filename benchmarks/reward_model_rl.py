"""GRPO against a reward model of GSM8K solutions: in the process of the training, and behind `rft-train serve-reward`.

    RFT_DATA_DIR=... python benchmarks/reward_model_rl.py [--folder DIR --max_steps 24]

The reward model is that of reward_model_gsm8k.py, the policy a small decoder after a few demonstrations. Three runs of
one seed: the reward model held by the run, the same over HTTP, and over HTTP with a server that is killed (SIGKILL) in
the middle and started again 20 seconds later. Compared are the rewards of equal samples of the first two runs, by the
files of the rollouts, all rewards of the second with scores that are made again, and the SHA-256 of the final weights.
A folder that is given is kept, and what is finished in it is not made again. See README.md. The last line is
`largest_difference=<x> of <n> rewards; weights after the outage <equal or not>`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_model_gsm8k import pairs, reward_model

from rft_models.reward_model.loading import load_reward_model
from rft_models.reward_model.scorer import RewardTextScorer

RESULTS = Path(__file__).resolve().parent / "results" / "reward_model_rl.json"
RFT_TRAIN = str(Path(sys.executable).parent / "rft-train")
TOLERANCE = 1e-5
SAMPLES = 64
"""Of a step."""
MODEL_SECONDS = 120.0
"""Longest time in which a server has loaded its model."""


def main() -> None:
    """Train the reward model and the policy, run three times, compare."""
    chosen = _arguments()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(chosen.folder or made).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        record = compared(folder, chosen)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    for name, rewards in record["mean_rewards"].items():
        print(f"{name:<12} mean reward of the first and the last three steps: {rewards[0]:.4f} {rewards[1]:.4f}")
    print(f"responses equal: {record['num_equal_responses']} of {record['num_samples']}")
    print(f"largest difference of all rewards, scored again here: {record['largest_difference_rescored']:.2e}")
    print(f"server away for {record['outage_seconds']:.1f} s; the run said: {record['said']}")
    equal = "equal" if record["sha256"]["remote"] == record["sha256"]["outage"] else "not equal"
    print(
        f"largest_difference={record['largest_difference']:.2e} of {record['num_equal_responses']} rewards; "
        f"weights after the outage {equal}"
    )
    if equal != "equal" or max(record["largest_difference"], record["largest_difference_rescored"]) > TOLERANCE:
        raise SystemExit(1)


def compared(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run what is not there yet; return the figures."""
    models = trained_reward_model(folder, chosen)
    policy = warm_policy(folder, chosen)
    if not _is_finished(folder / "local"):
        _train(folder, "local", policy, chosen, "--reward_pretrain", f"solution={models}")
    for name in ("remote", "outage"):
        if not _is_finished(folder / name):
            found = _over_http(folder, name, models, policy, chosen)
            (folder / f"{name}.json").write_text(json.dumps(found))
    local, remote, away = (_samples(folder / name) for name in ("local", "remote", "outage"))
    assert local.keys() == remote.keys() == away.keys()
    return {
        "arguments": {name: value for name, value in vars(chosen).items() if name != "folder"},
        "reward_model": json.loads((folder / "reward_model.json").read_text()),
        "num_samples": len(local),
        "num_equal_responses": sum(local[key]["response"] == remote[key]["response"] for key in local),
        "largest_difference": _largest_difference(local, remote),
        "largest_difference_rescored": rescored(models, remote),
        "num_equal_rewards_after_outage": sum(remote[key]["reward"] == away[key]["reward"] for key in local),
        "mean_rewards": {name: _ends(folder / name) for name in ("local", "remote", "outage")},
        "sha256": {name: _weights(folder / name) for name in ("local", "remote", "outage")},
        **json.loads((folder / "outage.json").read_text()),
    }


def rescored(model: Path, samples: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> float:
    """Score every sample in this process; return the largest difference from its reward."""
    scorer, rows = RewardTextScorer(load_reward_model(model)), list(samples.values())
    found = 0.0
    for start in range(0, len(rows), SAMPLES // 4):
        part = rows[start : start + SAMPLES // 4]
        scores = scorer.score([row["prompt"] for row in part], [()] * len(part), [row["response"] for row in part])
        for row, score in zip(part, scores, strict=True):
            assert isinstance(score, dict), score
            found = max(found, abs(score["score"] - row["reward"]))
    return found


def _largest_difference(
    one: Mapping[tuple[str, str, int], Mapping[str, Any]], other: Mapping[tuple[str, str, int], Mapping[str, Any]]
) -> float:
    """Return the largest difference of rewards for equal responses."""
    same = [key for key in one if one[key]["response"] == other[key]["response"]]
    return max(abs(one[key]["reward"] - other[key]["reward"]) for key in same)


def trained_reward_model(folder: Path, chosen: argparse.Namespace) -> Path:
    """Return the reward model of reward_model_gsm8k.py, trained as there."""
    train, held_out = pairs(chosen.seed, chosen.max_pairs)
    if not (folder / "reward_model.json").is_file():
        record = reward_model(folder, train, held_out, chosen)
        shares = {"held_out_pairs": len(held_out), "training_pairs": len(train), **record}
        (folder / "reward_model.json").write_text(json.dumps(shares))
    return sorted((folder / "rm" / "checkpoints").glob("step_*/model"))[-1]


def warm_policy(folder: Path, chosen: argparse.Namespace) -> Path:
    """Return a small decoder that has seen demonstrations."""
    words = f"--texts {folder}/texts.txt --hidden {chosen.policy_hidden} --layers 2 --vocab_size 1024 --seed 0"
    if not (folder / "policy" / "config.json").is_file():
        _run("build", *words.split(), "--max_positions", "1024", "--save_path", str(folder / "policy"))
    words = f"--pretrain {folder}/policy --prompt_data {folder}/train.jsonl --output_key chosen --max_epochs 9 --seed 0"
    words += f" --max_steps {chosen.policy_steps} --train_batch_size 16 --micro_train_batch_size 16"
    if not _is_finished(folder / "warm"):
        _run("sft", *words.split(), "--learning_rate", "2e-3", "--save_path", str(folder / "warm"))
    return sorted((folder / "warm" / "checkpoints").glob("step_*/model"))[-1]


def _over_http(folder: Path, name: str, model: Path, policy: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train with the reward behind a server; in the run `outage` it is killed in the middle and comes back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [_served(model, port)]
    found = dict[str, Any]()

    def kill_and_return() -> None:
        while _num_steps(folder / name) < chosen.max_steps // 2:
            if has_ended.wait(0.05):
                return
        servers[-1].send_signal(signal.SIGKILL)
        servers[-1].wait()
        began = time.monotonic()
        time.sleep(chosen.outage)
        servers.append(_served(model, port))
        found.update(outage_seconds=time.monotonic() - began, killed_after_step=_num_steps(folder / name))

    has_ended = threading.Event()
    watcher = threading.Thread(target=kill_and_return)
    try:
        if name == "outage":
            watcher.start()
        # a request a step: a model scores the same texts to the same bits only where they are packed alike
        words = ["--remote_rm_batch_size", str(SAMPLES), "--remote_rm_url", f"solution=http://127.0.0.1:{port}/score"]
        said = _train(folder, name, policy, chosen, *words)
        if name == "outage":
            lines = [line.strip() for line in said.splitlines() if "is away" in line or "answers again" in line]
            found["said"] = " / ".join(lines).replace(f":{port}", "")
    finally:
        has_ended.set()
        if watcher.ident is not None:
            watcher.join()
        servers[-1].terminate()
        servers[-1].wait()
    return found


def _served(model: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it has its model."""
    words = ["serve-reward", "--reward_pretrain", f"solution={model}", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen([RFT_TRAIN, *words], stdout=subprocess.DEVNULL)
    ends = time.monotonic() + MODEL_SECONDS
    while time.monotonic() < ends and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return server
    raise RuntimeError(f"the server on port {port} did not answer in {MODEL_SECONDS:.0f} s")


def _train(folder: Path, name: str, policy: Path, chosen: argparse.Namespace, *reward: str) -> str:
    words = f"--pretrain {policy} --prompt_data {folder}/train.jsonl --max_steps {chosen.max_steps} --num_episodes 9"
    words += " --rollout_batch_size 8 --n_samples_per_prompt 8 --train_batch_size 64 --micro_train_batch_size 32"
    words += f" --generate_max_len {chosen.generate_max_len} --prompt_max_len 400 --actor_learning_rate 1e-3"
    words += " --lr_schedule constant --rollout_log_interval 1 --num_trajectories_to_save 64 --token_records off"
    words += " --save_interval 0 --eval_steps 0 --init_kl_coef 0 --seed 0 --device cpu"
    return _run("rl", *words.split(), "--save_path", str(folder / name), *reward)


def _run(*words: str) -> str:
    """Run a command that must succeed; return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ended = subprocess.run(
        [RFT_TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"rft-train {words[0]} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
    return ended.stdout


def _samples(run: Path) -> Mapping[tuple[str, str, int], Mapping[str, Any]]:
    """Return every sample of a run by step, prompt and number."""
    found = {
        (file.stem, row["prompt_id"], row["sample"]): row
        for file in sorted((run / "rollouts").glob("*.jsonl"))
        for row in _rows(file)
    }
    assert all(row["status"] == "ok" for row in found.values())
    return found


def _ends(run: Path) -> Sequence[float]:
    rewards = [row["reward/mean"] for row in _rows(run / "metrics.jsonl")]
    return [sum(part) / len(part) for part in (rewards[:3], rewards[-3:])]


def _weights(run: Path) -> str:
    return hashlib.sha256(max((run / "checkpoints").glob("step_*/model/model.safetensors")).read_bytes()).hexdigest()


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _num_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _is_finished(run: Path) -> bool:
    path = run / "summary.json"
    return path.is_file() and json.loads(path.read_text())["outcome"] == "finished"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="")
    parser.add_argument("--max_steps", type=int, default=24)
    parser.add_argument("--outage", type=float, default=20.0, help="seconds")
    parser.add_argument("--generate_max_len", type=int, default=96)
    parser.add_argument("--policy_hidden", type=int, default=128)
    parser.add_argument("--policy_steps", type=int, default=120)
    parser.add_argument("--hidden", type=int, default=192, help="of the reward model, as in reward_model_gsm8k.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max_epochs", type=int, default=1)
    parser.add_argument("--max_pairs", type=int, default=0)
    parser.add_argument("--sft_steps", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
