"""What the page of one run shows beside its curves."""

from collections.abc import Callable
from pathlib import Path

from rft.dashboard import run_facts
from rft.dashboard.run_facts import FactStore

Make = Callable[..., Path]


def test_outcome_times_settings_and_what_the_guard_found_are_there(make_run: Make) -> None:
    run = make_run(
        summary={
            "outcome": "finished",
            "speed": {"code": "reward_bound", "what": "the reward takes half", "do": "more workers"},
            "eval": {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5, "kind": "x"}},
        }
    )
    (run / "numerics.jsonl").write_text('{"step": 2, "what": "back to step 1"}\n{"step": 3, "rows": ["a"]}\n')
    facts = run_facts.run_facts(run)
    assert facts["sentence"].startswith("The run finished after 3 steps")
    assert facts["state"] == "ended"
    assert [row[1:] for row in facts["phases"]] == [["train", 6.0, 1.0]]
    assert facts["evaluations"] == [["accuracy", 0.25, 0.5]]
    assert facts["alarms"] == [[3, "rows ['a']"], [2, "back to step 1"]]
    assert ["actor_learning_rate", "0.001", "command line"] in facts["settings"]
    assert facts["speed"]["do"] == "more workers"
    assert "hf_aaa" not in facts["command"]


def test_evaluations_of_a_run_that_goes_on_are_those_so_far(make_run: Make) -> None:
    run = make_run()
    (run / "evals.jsonl").write_text('{"step": 0, "eval/loss": 2.0}\n{"step": 3, "eval/loss": 1.0, "name": "x"}\n')
    assert run_facts.run_facts(run)["evaluations"] == [["loss", 2.0, 1.0]]


def test_facts_are_computed_again_only_after_a_while(make_run: Make) -> None:
    run, store = make_run(), FactStore()
    assert store.facts(run)["step"] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    assert store.facts(run)["step"] == 3
    later = FactStore()
    assert later.facts(run)["step"] == 4
