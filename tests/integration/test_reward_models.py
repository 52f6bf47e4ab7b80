"""`rft-train` with rewards that are models: what a reward model prefers is learned, and a judge's failures are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from support.compare import read_rows
from support.reward_bench import RewardServers

import rft
from rft.serving.server import RewardServer
from rft.stages.rl import prepared
from rft_cli.config.resolve import resolve
from rft_cli.diagnostics import bundle
from rft_cli.main import main
from rft_core.errors import OptionsError
from rft_core.packed_tokens import PackedTokens
from rft_models.reward_model.loading import load_reward_model, new_reward_model
from rft_models.reward_model.scorer import RewardTextScorer
from rft_models.reward_model.spec import RewardSpec
from rft_models.tiny_models.text import build_character_model

pytestmark = pytest.mark.xdist_group("reward_models")

FAVOURITE = "7"


def prefer(path: Path, pretrain: Path) -> Path:
    """A reward model that was fitted to count sevens: a mean over the states, and the row that least squares gives."""
    spec = RewardSpec(pooling="attention", attention_heads=1, layer=1)
    model = new_reward_model(pretrain, spec, seed=3)
    scorer, pooling = RewardTextScorer(model), model.head.pooling
    assert pooling is not None
    digits = torch.randint(0, 10, (256, 6), generator=torch.Generator().manual_seed(4))
    rows = [scorer.token_ids("12+12=", (), "".join(map(str, row))) for row in digits.tolist()]
    seen: list[torch.Tensor] = []
    model.head.score.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0]))
    with torch.no_grad():
        pooling.query.zero_()
        for weight in (pooling.value_weight, pooling.output_weight):
            weight.copy_(torch.eye(len(weight)))
        model.scores(
            PackedTokens(
                torch.tensor([token for row in rows for token in row]),
                torch.tensor([place for row in rows for place in range(len(row))]),
                torch.tensor([number for number, row in enumerate(rows) for _ in row]),
            ),
        )
        wanted = (digits == int(FAVOURITE)).sum(1, keepdim=True).float()
        model.head.score.weight.copy_(torch.linalg.lstsq(seen[0], wanted).solution.T)
    model.save_pretrained(path)
    return path


class Bench:
    """A policy, a reward model and prompts."""

    def __init__(self, root: Path) -> None:
        self.model = build_character_model(root / "model", hidden=32, layers=1, heads=2, ffn=48, seed=1, init_std=0.2)
        self.reward_model = prefer(root / "sevens", self.model)
        self.data = root / "train.jsonl"
        rows = [{"input": f"{n}+{n}=", "label": str(2 * n)} for n in range(10, 26)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(self, path: Path, *more: str) -> list[str]:
        """A run of sixteen steps."""
        words = f"--pretrain {self.model} --prompt_data {self.data} --eval_data {self.data} --device cpu --max_steps 16"
        words += " --rollout_batch_size 8 --n_samples_per_prompt 8 --train_batch_size 64 --micro_train_batch_size 32"
        words += " --generate_max_len 6 --prompt_max_len 8 --actor_learning_rate 2e-2 --lr_schedule constant"
        words += " --num_episodes 9 --rollout_log_interval 1 --num_trajectories_to_save 64 --init_kl_coef 0"
        return [*words.split(), "--save_interval", "0", "--eval_steps", "0", "--save_path", str(path), *more]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("reward_models"))


@pytest.fixture(autouse=True)
def forget_the_run() -> Iterator[None]:
    yield
    bundle.remember_run_directory(None)


@pytest.fixture
def servers() -> Iterator[RewardServers]:
    made = RewardServers()
    yield made
    made.close()


def rollouts(run: Path, step: int) -> list[dict[str, object]]:
    return read_rows(run / "rollouts" / f"step_{step:06d}.jsonl")


def test_what_a_reward_model_prefers_is_learned(bench: Bench, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["rl", *bench.words(run, "--reward_pretrain", f"sevens={bench.reward_model}")]) == 0
    shares = [
        fmean(str(row["response"]).count(FAVOURITE) / 6 for row in rollouts(run, step)) for step in (1, 2, 15, 16)
    ]
    assert fmean(shares[2:]) > fmean(shares[:2]) + 0.3, shares
    rows = read_rows(run / "metrics.jsonl")
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 1.0
    assert rows[0]["reward/sevens"] == pytest.approx(rows[0]["reward/mean"])
    scorer = RewardTextScorer(load_reward_model(bench.reward_model))
    for row in rollouts(run, 16)[:5]:
        [scores] = scorer.score([str(row["prompt"])], [()], [str(row["response"])])
        assert isinstance(scores, dict)
        assert row["reward"] == pytest.approx(scores["score"], abs=1e-4)
        assert row["breakdown"] == pytest.approx({"sevens": row["reward"]})


def test_everything_at_once_is_one_sum(bench: Bench, servers: RewardServers, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rewards = ["--reward", "exact", "--reward_pretrain", f"a={bench.reward_model},b={bench.reward_model}"]
    rewards += ["--remote_rm_url", f"far={servers.url}/score", "--judge_url", f"{servers.url}/v1", "--judge_model", "m"]
    assert main(["rl", *bench.words(run, *rewards), "--max_steps", "1"]) == 0
    for row in rollouts(run, 1):
        breakdown = row["breakdown"]
        assert isinstance(breakdown, dict)
        assert sorted(breakdown) == ["a", "b", "correctness", "far", "judge"]
        assert breakdown["a"] == breakdown["b"]
        assert breakdown["far"] == len(str(row["response"]))
        assert row["reward"] == pytest.approx(sum(breakdown.values()), abs=1e-6)


def test_a_judge_of_this_process_answers_and_its_failures_are_told(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, question = tmp_path / "run", tmp_path / "question.txt"
    question.write_text("{response}=")
    words = ["--judge_pretrain", str(bench.model), "--judge_template", str(question), "--judge_pattern", r"^(\d)"]
    words += ["--judge_range", "0", "9", "--judge_max_new_tokens", "4", "--max_unscored_share", "1", "--max_steps", "1"]
    assert main(["rl", *bench.words(run, *words)]) == 0
    assert "held here, greedy, question.txt, 0 to 9 become 0 to 1" in capsys.readouterr().out
    rows = rollouts(run, 1)
    told = {str(row["status"]) for row in rows}
    assert told == {"ok", "no_verdict"}, "the untrained judge begins with a digit now and then"
    share = sum(row["status"] == "no_verdict" for row in rows) / len(rows)
    assert read_rows(run / "metrics.jsonl")[0]["reward/status_no_verdict"] == share
    scored: dict[str, object] = {}
    for row in rows:
        assert scored.setdefault(str(row["response"]), row["reward"]) == row["reward"], "equal questions, equal answers"


def test_evaluation_scores_with_the_models_of_the_run(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["--reward_pretrain", str(bench.reward_model), "--reward_weights", "sevens=2"]
    assert main(["rl", *bench.words(run, *words), "--max_steps", "1", "--eval_steps", "1"]) == 0
    after = read_rows(run / "evals.jsonl")[-1]
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["eval/reward"] == pytest.approx(after["eval/reward"], abs=1e-6)


def test_check_says_what_will_score_and_what_is_wrong(
    bench: Bench, servers: RewardServers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = bench.words(tmp_path / "run", "--reward_pretrain", str(bench.reward_model))
    assert main(["check", "rl", *words, "--remote_rm_url", f"{servers.url}/score"]) == 0
    out = capsys.readouterr().out
    assert "sevens: reward model" in out
    assert "reward models stay in memory" in out
    assert f"127.0.0.1: {servers.url}/score, 32 responses a request" in out
    assert "the sum of these" in out
    servers.close()
    for more, code, exit_code in (
        (["--remote_rm_url", f"{servers.url}/score"], "reward.remote", 8),
        (["--reward_pretrain", str(bench.model)], "models.no_reward_head", 4),
        (["--reward_pretrain", f"{bench.reward_model},{bench.reward_model}"], "reward.two_of_a_name", 2),
        (["--judge_pretrain", str(bench.model), "--judge_url", "http://h/v1"], "reward.two_judges", 2),
        (["--judge_url", "http://h/v1"], "reward.judge_model", 2),
        (["--judge_pretrain", str(bench.model), "--judge_pattern", "x"], "reward.judge_pattern", 2),
    ):
        assert main(["check", "rl", *words, *more, "--json_errors"]) == exit_code, more
        assert code in capsys.readouterr().err, more


def test_heads_without_weights_are_not_guessed(bench: Bench, tmp_path: Path) -> None:
    from rft.reward_names import NamedPlace, heads_of

    model = new_reward_model(bench.model, RewardSpec(heads=("kind", "short"), weights=None), seed=3)
    model.save_pretrained(tmp_path / "rm")
    place = NamedPlace("rm", str(tmp_path / "rm"))
    with pytest.raises(OptionsError) as caught:
        heads_of(place, None)
    assert caught.value.problem.do == "--reward_weights rm/kind=1,rm/short=1"
    assert heads_of(place, {"rm/short": 2.0}) == {"kind": 0.0, "short": 2.0}


def test_a_critic_starts_from_the_reward_model(bench: Bench, tmp_path: Path) -> None:
    words = ["--reward_pretrain", str(bench.reward_model), "--critic_pretrain", str(bench.reward_model)]
    words += ["--advantage_estimator", "gae", "--max_steps", "1"]
    resolved = resolve("rl", bench.words(tmp_path / "run", *words))
    with prepared(resolved, ["rft-train", "rl"]) as ready:
        assert ready.training.critic is not None
    assert main(["rl", *bench.words(tmp_path / "again", *words)]) == 0


def served(reward_model: Path, port: int = 0) -> RewardServer:
    return rft.serve_reward(port=port, reward_pretrain=f"sevens={reward_model}", device="cpu")


def test_rewards_over_http_are_those_of_the_model_and_a_server_that_dies_changes_no_bit(
    bench: Bench, tmp_path: Path
) -> None:
    def trained(name: str, *words: str) -> list[dict[str, object]]:
        assert main(["rl", *bench.words(tmp_path / name, *words), "--max_steps", "3", "--save_steps", "3"]) == 0
        return [row for step in (1, 2, 3) for row in rollouts(tmp_path / name, step)]

    here = trained("here", "--reward_pretrain", f"sevens={bench.reward_model}")
    with served(bench.reward_model) as server:
        far = trained("far", "--remote_rm_url", f"sevens={server.url}")
        port = int(server.url.rpartition(":")[2].partition("/")[0])
    assert [row["response"] for row in far] == [row["response"] for row in here]
    assert [row["reward"] for row in far] == pytest.approx([row["reward"] for row in here], abs=1e-5)
    assert {tuple(row["breakdown"]) for row in far} == {("sevens", "sevens/sevens")}

    outages: list[float] = []

    def die_and_return(server: RewardServer) -> None:
        while not (tmp_path / "away/metrics.jsonl").is_file():
            time.sleep(0.005)
        server.close()
        began = time.monotonic()
        time.sleep(1.5)
        running.append(served(bench.reward_model, port))
        outages.append(time.monotonic() - began)

    running = [served(bench.reward_model, port)]
    watcher = threading.Thread(target=die_and_return, args=running)
    watcher.start()
    try:
        away = trained("away", "--remote_rm_url", f"sevens={running[0].url}")
    finally:
        watcher.join(60)
        running[-1].close()
    assert outages
    assert away == far
    step = "checkpoints/step_000003/model/model.safetensors"
    assert (tmp_path / "far" / step).read_bytes() == (tmp_path / "away" / step).read_bytes()
