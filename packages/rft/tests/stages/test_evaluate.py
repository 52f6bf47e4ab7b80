"""Evaluation of a model: what is read, built and closed, the share of each rank, and the intervals of its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.stages import evaluate
from rft_algos.statistics import mean_interval, paired_difference_interval, share_interval, wilson_interval
from rft_core.errors import OptionsError, ServiceError
from rft_trainer.evaluation.comparison import compare_rows
from rft_trainer.evaluation.evaluator import EvaluationResult

ROW = {"status": "ok"}


def prompts(*lengths: int) -> list[Any]:
    return [SimpleNamespace(token_ids=(0,) * length) for length in lengths]


class Run:
    """Settings and parts of an evaluation as doubles."""

    def __init__(
        self,
        calls: Any,
        *,
        environment: Any = None,
        num_scored: int = 2,
        rank: int = 1,
        ranks: int = 2,
        bf16: bool = False,
    ) -> None:
        self.calls = calls
        self.prompts = prompts(3, 7, 5)
        self.environment = environment
        self.result = SimpleNamespace(num_scored=num_scored, why_unscored="broken")
        policy = calls.double("policy")
        evaluator = calls.double("evaluator", with_rows=calls.double("with_rows", returns=(self.result, [[ROW]])))
        metrics = SimpleNamespace(of=lambda names: f"metrics of {names}")
        calls.replace(
            evaluate, TaskMetrics=metrics, constraint_of=lambda *given: None, within=lambda engine, trie, beams: engine
        )
        # it reads the fields of settings, which a double lacks
        calls.replace(evaluate, with_model_directories=lambda settings: settings)
        calls.put(
            evaluate,
            "make_engine row_images read_held_out sampling_options reads_columns require_routes columns_of",
            function_names=["exact"],
            tokenizer_with_images=calls.double("tokenizer"),
            enter_environment=environment,
            as_prompts=self.prompts,
            load_policy=calls.double("loaded", eval=calls.double("eval", returns=policy)),
            response_limits=(20, 27),
            build_reward=calls.double("reward"),
            Evaluator=evaluator,
            ExitStack=calls.double("stack"),
        )
        calls.replace(evaluate, answer_reader=lambda *names: f"answers of {names[0]}", rollout_row="row of a rollout")
        self.settings = calls.double(
            "settings",
            data=calls.double("data", eval_data="e.jsonl"),
            model=calls.double("model", bf16=bf16),
            sampling=calls.double("settings.sampling", num_beams=0),
            output=SimpleNamespace(output="", compare="", eval_by="", seed=3),
            evaluation=SimpleNamespace(eval_n=4, eval_k="2,3", eval_pick="helpful"),
        )
        self.machine = calls.double("machine", ranks=SimpleNamespace(rank=rank, world_size=ranks))

    def evaluate(self) -> Any:
        return evaluate.evaluate(self.settings, self.machine)


@pytest.mark.parametrize("bf16", [True, False])
def test_an_evaluation_gives_its_settings_to_the_parts_that_they_belong_to(calls: Any, bf16: bool) -> None:
    run = Run(calls, bf16=bf16)
    found = run.evaluate()
    assert calls.taken() == [
        "ExitStack()",
        "stack begins",
        "tokenizer_with_images(model, settings.images)",
        "enter_environment(settings.conversation, tokenizer, stack)",
        "row_images(settings.images, 3)",
        "reads_columns(settings)",
        "read_held_out('e.jsonl', data.eval_split, data.max_eval_samples, data, tokenizer, images=row_images(), "
        "label_key=data.label_key, output_key=None, prompt_max_len=settings.sampling.prompt_max_len, "
        "whole_rows=reads_columns())",
        "require_routes(settings.reward, read_held_out())",
        "as_prompts(read_held_out())",
        f"load_policy(model.pretrain, device=machine.device, dtype=torch.{'bfloat16' if bf16 else 'float32'})",
        "eval()",
        "response_limits(settings, 7)",
        "make_engine(settings.engine, machine, policy, model.pretrain, 27)",
        f"columns_of({run.prompts!r})",
        "build_reward(settings, machine, columns=columns_of(), function=None)",
        "sampling_options(settings.sampling, 20, tokenizer.eos_ids)",
        "function_names(settings)",
        f"Evaluator(make_engine(), tokenizer, reward, machine.collectives, {run.prompts!r}, "
        "answer_of='answers of exact', conversations=None, ks=(2, 3), metrics='metrics of data.eval_metrics', "
        "num_samples=4, pick='helpful', ranked=False, sampling=sampling_options(), seed=3)",
        "with_rows('row of a rollout', None)",
        "reward.close()",
        "stack ends",
    ]
    assert found.result is run.result
    assert found.rows == [[ROW]]
    assert found.prompts == run.prompts


def test_conversations_have_prompts_and_room_of_their_environment(calls: Any) -> None:
    opened = prompts(2, 4)
    environment = calls.double(
        "environment", room=calls.double("room", returns=99), opened=calls.double("opened", returns=opened)
    )
    run = Run(calls, environment=environment)
    assert run.evaluate().prompts == opened
    made = calls.taken()
    assert "response_limits(settings, 4)" in made
    assert "room(model.pretrain, 27, 20)" in made
    assert "make_engine(settings.engine, machine, policy, model.pretrain, 99)" in made
    assert "environment.conversations(make_engine(), 99)" in made
    assert any(f"{opened!r}, " in call and "conversations=environment.conversations()" in call for call in made)


def test_a_reward_is_closed_after_an_error_and_no_score_at_all_is_one(calls: Any) -> None:
    with pytest.raises(ServiceError) as unscored:
        Run(calls, num_scored=0).evaluate()
    assert unscored.value.problem.code == "eval.no_scores"
    run = Run(calls)

    def fails(*parts: Any, **more: Any) -> Any:
        raise MemoryError

    calls.taken()
    calls.replace(evaluate, Evaluator=fails)
    with pytest.raises(MemoryError):
        run.evaluate()
    assert calls.taken()[-2:] == ["reward.close()", "stack ends"]


def test_without_rows_nothing_is_loaded(calls: Any) -> None:
    run = Run(calls)
    run.settings.data = SimpleNamespace(eval_data="")
    with pytest.raises(OptionsError) as caught:
        run.evaluate()
    assert caught.value.problem.code == "eval.no_data"
    assert calls.taken() == []


def scored(*correct: float | None, rewards: tuple[float | None, ...] = ()) -> evaluate.Evaluation:
    result = EvaluationResult(rewards or correct, correct, 0, 1.0)
    return evaluate.Evaluation(result, [], [[{"n": 0}, {"n": 1}], [{"n": 2}]])


def test_intervals_are_of_the_answers_that_were_scored() -> None:
    found = scored(True, None, False, True, rewards=(1.0, None, 0.0, 0.5))
    assert found.num_right == 2
    assert found.accuracy_interval == wilson_interval(2, 3)
    assert found.reward_interval == mean_interval([1.0, 0.0, 0.5])
    assert [row["n"] for row in found.flat_rows()] == [0, 1, 2]


def test_several_samples_have_the_interval_of_the_shares_of_their_prompts() -> None:
    found = scored(0.5, None, 1.0, 0.0)
    assert found.num_right == 1
    assert found.accuracy_interval == share_interval([0.5, 1.0, 0.0])


def test_figures_hold_metrics_intervals_groups_and_the_comparison() -> None:
    found = replace(scored(True, False), accuracy_by={"1": wilson_interval(1, 1)})
    figures = found.figures()
    assert figures["metrics"]["eval/accuracy"] == 0.5
    assert figures["intervals"]["accuracy"] == [found.accuracy_interval.low, found.accuracy_interval.high]
    assert figures["accuracy_by"]["1"]["num"] == 1
    assert "compare" not in figures
    rows = [{"prompt_id": "a", "reward": 1.0, "label": "1"}, {"prompt_id": "b", "reward": 0.0, "label": "1"}]
    compared = replace(found, comparison=compare_rows(rows, rows, seed=0, where=""))
    assert compared.figures("base")["compare"]["with"] == "base"


@pytest.mark.parametrize(
    ("before", "after", "pairs"),
    [
        ([1.0, 0.0, None], [0.5, None, 1.0], 0),
        ([1.0, 0.0], [0.5, 1.0], 2),
        ([1.0, None, 0.0, 2.0], [0.5, 1.0, 1.0, 0.0], 3),
    ],
)
def test_a_change_is_that_of_the_prompts_that_both_scored(before: Any, after: Any, pairs: int) -> None:
    found = evaluate.change_interval(before, after)
    both = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    expected = paired_difference_interval([a for a, _ in both], [b for _, b in both]) if pairs else None
    assert found == expected


def test_the_model_of_a_run_is_that_of_its_checkpoint(calls: Any) -> None:
    checkpoint = SimpleNamespace(path=Path("run/checkpoints/step_1"), model_directory=Path("run/model"))
    calls.put(evaluate, resolve_checkpoint=SimpleNamespace(checkpoint=checkpoint))
    found = evaluate.trained_model(Path("run"), asked_by="rft-train eval")
    assert (found.run, found.model_directory) == (Path("run"), Path("run/model"))
    assert calls.taken() == [f"resolve_checkpoint({Path('run')!r}, asked_by='rft-train eval')"]
