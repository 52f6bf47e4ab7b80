"""Comparison of engines: what each is asked, what becomes of failures, and every figure of the record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft import conformance
from rft.conformance import DrawResult, EngineResult
from rft.settings import ConformanceModelSettings, ConformanceOutputSettings, ConformanceSettings
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import DataError, OptionsError, PreflightError, ServiceError
from rft_core.keyed_random import derive_key
from rft_engine.settings import ComparedEnginesSettings, DecodingEngineSettings, ProbeLengthSettings
from rft_trainer.evaluation.logprob_mismatch import FULL, HALF
from rft_trainer.records.rollouts import Prompt
from rft_trainer.settings.data import ConformanceDataSettings

WAYS = conformance.draws(6, (3,))
ABSENT = PreflightError(code="engine.absent", what="w", where="h", why="y", do="d")
REFUSED = OptionsError(code="engine.top_p", what="w", where="h", why="y", do="d")


@dataclass(frozen=True)
class Figures:
    """Figures of a gap."""

    num: int
    largest: float


def measured(verdict: str = "equal", largest: float = 0.0, samples: Any = ((1,), (2,)), kept: Any = None) -> Any:
    return SimpleNamespace(
        verdict=verdict,
        gap=Figures(2, largest),
        worst=Figures(3, math.nan),
        num_beyond=4,
        kept_mass=kept,
        worst_kept=kept,
        num_outside=5,
        samples=samples,
    )


def test_tokens_are_drawn_at_two_temperatures_without_and_with_top_p() -> None:
    assert [(way.temperature, way.top_p, way.max_new_tokens, way.stop_token_ids) for way in WAYS] == [
        (1.0, 1.0, 6, (3,)),
        (1.0, 0.9, 6, (3,)),
        (0.7, 1.0, 6, (3,)),
        (0.7, 0.9, 6, (3,)),
    ]


class Engines:
    """Engines that note what is done with them; `failing` gives an error for (engine, step)."""

    def __init__(self, failing: dict[tuple[str, str], Exception], ways: int = 2) -> None:
        self.done: list[str] = []
        self._failing, self._ways = failing, ways

    def _do(self, name: str, step: str) -> None:
        self.done.append(f"{name} {step}")
        if (name, step) in self._failing:
            raise self._failing[name, step]

    def _start(self, name: str) -> Any:
        self._do(name, "starts")
        return SimpleNamespace(
            name=name,
            load_weights=lambda version: self._do(name, f"loads {version}"),
            close=lambda: self._do(name, "closes"),
        )

    def _measure(self, engine: Any, draw: SamplingOptions) -> Any:
        self._do(engine.name, f"draws {draw.temperature:g} {draw.top_p:g}")
        return measured(samples=((1,), (2,), (3 if engine.name == "native" else 4,)))

    def compare(self, *names: str) -> list[EngineResult]:
        return conformance.compare(
            names,
            WAYS[: self._ways],
            refuse=lambda name: self._do(name, "is asked for"),
            start=self._start,
            measure=self._measure,
        )


def test_each_engine_is_started_loaded_drawn_from_and_closed_before_the_next() -> None:
    engines = Engines({})
    results = engines.compare("native", "hf")
    assert engines.done == [
        f"{name} {step}"
        for name in ("native", "hf")
        for step in ("is asked for", "starts", "loads 1", "draws 1 1", "draws 1 0.9", "closes")
    ]
    assert [(result.name, result.state, result.problem) for result in results] == [
        ("native", "measured", None),
        ("hf", "measured", None),
    ]
    # two of three samples are those of the native engine, which is compared with nothing
    assert [[one.same for one in result.draws] for result in results] == [[None, None], [2, 2]]
    assert [[one.draw for one in result.draws] for result in results] == [WAYS[:2]] * 2
    assert [result.draws[0].same for result in Engines({}).compare("hf", "native")] == [None, None]


@pytest.mark.parametrize(
    ("failing", "state", "code", "num_draws", "closed"),
    [
        (("is asked for", ABSENT), "absent", "engine.absent", 0, False),
        (("is asked for", REFUSED), "absent", "engine.top_p", 0, False),
        (("starts", RuntimeError("")), "failed", "conformance.engine_failed", 0, False),
        (("loads 1", KeyError("rope")), "failed", "conformance.engine_failed", 0, True),
        (("draws 1 0.9", RuntimeError("no memory\nat x")), "failed", "conformance.engine_failed", 1, True),
        (
            ("draws 1 1", ServiceError(code="engine.died", what="w", where="h", why="y", do="d")),
            "failed",
            "engine.died",
            0,
            True,
        ),
    ],
)
def test_a_failure_is_the_row_of_its_engine_and_ends_no_other(
    failing: tuple[str, Exception], state: str, code: str, num_draws: int, closed: bool
) -> None:
    engines = Engines({("hf", failing[0]): failing[1]})
    broken, sound = engines.compare("hf", "native")
    assert (broken.state, len(broken.draws), sound.state) == (state, num_draws, "measured")
    assert broken.problem is not None
    assert broken.problem.code == code
    assert (broken.problem.where == "engine hf") is (code == "conformance.engine_failed")
    assert ("hf closes" in engines.done) is closed


def test_a_way_of_drawing_that_an_engine_refuses_is_a_draw_without_figures() -> None:
    results = Engines({("hf", "draws 1 0.9"): REFUSED}).compare("native", "hf")
    first, second = results[1].draws
    assert (results[1].state, first.same, second.measured, second.same) == ("measured", 2, None, None)
    assert second.problem is REFUSED.problem


def test_an_error_that_is_no_librarys_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Engines({("hf", "starts"): ZeroDivisionError()}).compare("hf")


def result_of(*figures: tuple[str, float] | None) -> EngineResult:
    drawn = [DrawResult(WAYS[0], None if one is None else measured(*one)) for one in figures]
    return EngineResult("hf", "measured", tuple(drawn))


@pytest.mark.parametrize(
    ("figures", "verdict", "worst"),
    [
        ((), None, None),
        ((None,), None, None),
        ((("equal", 0.1), None, ("close", 0.01)), "close", 2),
        ((("apart", 0.1), ("close", 0.5)), "apart", 0),
        ((("apart", 0.1), ("apart", 0.5), ("apart", 0.3)), "apart", 1),
        ((("apart", 0.1), ("apart", math.nan), ("apart", 0.3)), "apart", 1),
        ((("apart", math.inf), ("apart", 0.3)), "apart", 0),
    ],
)
def test_the_worst_draw_is_that_of_the_worst_verdict_and_the_largest_gap(
    figures: Any, verdict: str | None, worst: int | None
) -> None:
    result = result_of(*figures)
    assert result.verdict == verdict
    assert result.worst is (None if worst is None else result.draws[worst])


def test_the_record_has_every_figure_and_null_for_what_is_not_finite() -> None:
    kept = Figures(6, math.inf)
    drawn = (
        DrawResult(WAYS[1], measured("close", 0.5, kept=kept), same=1),
        DrawResult(WAYS[0], measured()),
        DrawResult(WAYS[2], None, REFUSED.problem),
        DrawResult(WAYS[3], None),
    )
    measured_row, absent = conformance.as_record(
        [EngineResult("hf", "measured", drawn), EngineResult("vllm", "absent", problem=ABSENT.problem)]
    )
    assert absent == {
        "engine": "vllm",
        "state": "absent",
        "verdict": None,
        "problem": asdict(ABSENT.problem),
        "draws": [],
    }
    assert (measured_row["verdict"], measured_row["problem"]) == ("close", None)
    figures: Any = measured_row["draws"]
    assert figures[0] == {
        "temperature": 1.0,
        "top_p": 0.9,
        "verdict": "close",
        "gap": {"num": 2, "largest": 0.5},
        "worst": {"num": 3, "largest": None},
        "tokens_beyond": 4,
        "kept_mass": {"num": 6, "largest": None},
        "worst_kept": {"num": 6, "largest": None},
        "tokens_outside": 5,
        "samples": 2,
        "samples_as_native": 1,
    }
    assert (figures[1]["kept_mass"], figures[1]["worst_kept"], figures[1]["samples_as_native"]) == (None, None, None)
    assert figures[2] == {"temperature": 0.7, "top_p": 1.0, "problem": asdict(REFUSED.problem)}
    assert figures[3] == {"temperature": 0.7, "top_p": 0.9, "problem": None}


def test_the_trainers_logits_are_those_before_each_target_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_ROWS_OF_LOGITS", 2)
    policy: Any = SimpleNamespace(
        hidden_states=lambda tokens: torch.arange(10.0)[:, None],
        head=SimpleNamespace(logits=lambda rows: rows * 2),
    )
    targets = torch.tensor([False, True, True, False, False, True, True, True, False, True])
    chunks = list(conformance.next_token_logits(policy)(SimpleNamespace(targets_T=targets)))  # type: ignore[arg-type]
    assert [chunk[:, 0].tolist() for chunk in chunks] == [[0.0, 2.0], [8.0, 10.0], [12.0, 16.0]]


class Texts:
    """Renders what it can write: each letter is a token."""

    def __init__(self, writes: Any) -> None:
        self._writes = writes

    def render(self, row: Any) -> Any:
        if not self._writes(row.text):
            raise DataError(code="text.unknown_character", what="w", where="h", why="y")
        return SimpleNamespace(prompt_id=row.prompt_id, text=row.text, token_ids=tuple(map(ord, row.text)))


def run(calls: Any, writes: Any = lambda text: True, *, positions: int = 100, ranks: int = 1, **given: Any) -> Any:
    """The comparison of one run, its engines left out: (what is compared, the calls)."""
    policy = calls.double("policy", dtype=torch.float32)
    loaded = calls.double("loaded", eval=calls.double("eval", returns=policy))
    tokenizer = calls.double("tokenizer", eos_ids=(3,), vocab_size=50, decode=lambda ids: f"{len(ids)} tokens")
    compared: dict[str, Any] = {}

    def compare(names: Any, ways: Any, **doing: Any) -> str:
        compared.update(doing, names=names, ways=ways)
        return "results"

    renderer = writes if isinstance(writes, Texts) else Texts(writes)
    calls.put(
        conformance,
        "make_engine measure_gap choose_engine",
        tokenizer_of=tokenizer,
        load_policy=loaded,
        model_facts=SimpleNamespace(max_positions=positions),
        renderer_for=renderer,
        given_prompts=[Prompt("p:0", (1, 2, 3), "abc", None, "p"), Prompt("p:1", (4, 5), "de", None, "p")],
        next_token_logits="logits",
    )
    calls.replace(conformance, compare=compare)
    settings = ConformanceSettings(
        model=ConformanceModelSettings(pretrain="dir", device="cpu"),
        data=ConformanceDataSettings(**{name: given[name] for name in given if name not in ("prompt_len", "most")}),
        lengths=ProbeLengthSettings(
            prompt_max_len=given.get("prompt_len", 1024), generate_max_len=given.get("most", 8)
        ),
        engine=ComparedEnginesSettings(engines="hf,native", engine_max_rows=7),
        output=ConformanceOutputSettings(seed=5),
    )
    machine = calls.double("machine", ranks=SimpleNamespace(world_size=ranks))
    found = conformance.compare_engines(settings, machine, calls.double("show"))
    return found, compared, settings


def test_given_prompts_are_compared_with_keys_of_their_own_in_every_engine(calls: Any) -> None:
    found, compared, settings = run(calls, prompt_data="p.jsonl", n_samples_per_prompt=2)
    assert calls.taken() == [
        f"tokenizer_of({settings.model!r})",
        f"given_prompts({settings.data!r}, tokenizer, 1024)",
        "load_policy('dir', device=machine.device, dtype=torch.float32, tokenizer=tokenizer)",
        "eval()",
        "model_facts('dir')",
        "next_token_logits(policy)",
    ]
    assert (found.results, found.tokenizer, found.policy) == ("results", "tokenizer", "policy")
    assert (found.prompts.source, [prompt.prompt_id for prompt in found.prompts.prompts]) == ("p.jsonl", ["p:0", "p:1"])
    assert (found.limits, found.dtype, found.model_type) == (FULL, "float32", "policy.model.config.model_type")
    assert (compared["names"], compared["ways"]) == (("native", "hf"), conformance.draws(8, (3,)))
    one = DecodingEngineSettings(engine_type="hf", engine_max_rows=7)
    compared["refuse"]("hf")
    assert compared["start"]("hf") == "make_engine()"
    assert compared["measure"]("engine", WAYS[3]) == "measure_gap()"
    keys = [[derive_key(5, "sample", 0, i, j) for j in range(2)] for i in range(2)]
    made = calls.taken()
    assert [call for call in made if not call.startswith("show(")] == [
        f"choose_engine({one!r}, machine.device)",
        f"make_engine({one!r}, machine, policy, 'dir', 11)",
        f"measure_gap('engine', policy, [(1, 2, 3), (4, 5)], {keys!r}, {WAYS[3]!r}, device=machine.device, "
        f"limits={FULL!r}, logits='logits')",
    ]
    assert len(made) == 5


def test_a_prompt_of_the_command_line_is_its_own_source(calls: Any) -> None:
    found, _, _ = run(calls, prompt="abc")
    assert found.prompts.source == "--prompt"


@pytest.mark.parametrize(("positions", "most", "new"), [(100, 8, 8), (7, 8, 4), (4, 8, 1)])
def test_a_completion_has_the_room_that_the_longest_prompt_leaves(
    calls: Any, positions: int, most: int, new: int
) -> None:
    _, compared, _ = run(calls, prompt="a", positions=positions, most=most)
    assert compared["ways"][0].max_new_tokens == new


def test_prompts_without_room_and_several_processes_are_refused(calls: Any) -> None:
    for given, code, do in (
        ({"prompt": "a", "positions": 3}, "conformance.no_room", "--prompt_max_len 2,"),
        ({"prompt": "a", "positions": 1}, "conformance.no_room", "--prompt_max_len 1,"),
        ({"prompt": "a", "ranks": 2}, "conformance.one_process", "rft-train conformance"),
    ):
        with pytest.raises(OptionsError) as caught:
            run(calls, **given)
        assert caught.value.problem.code == code
        assert caught.value.problem.do.startswith(do)


@pytest.mark.parametrize(
    ("max_samples", "positions", "prompt_len", "count", "longest"),
    [(0, 100, 1024, 8, 40), (3, 100, 1024, 3, 24), (16, 12, 1024, 8, 6), (16, 100, 5, 8, 5)],
)
def test_without_prompts_the_built_in_texts_are_taken_cut_to_half_of_the_model(
    calls: Any, max_samples: int, positions: int, prompt_len: int, count: int, longest: int
) -> None:
    found, _, _ = run(calls, max_samples=max_samples, positions=positions, prompt_len=prompt_len)
    prompts = found.prompts.prompts
    assert [prompt.prompt_id for prompt in prompts] == [f"text:{number}" for number in range(count)]
    assert [prompt.text for prompt in prompts] == list(conformance.BUILT_IN[:count])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert lengths == [min(len(text), longest) for text in conformance.BUILT_IN[:count]]


def test_texts_that_a_tokenizer_cannot_write_are_left_out(calls: Any) -> None:
    found, _, _ = run(calls, str.isascii)
    assert [prompt.prompt_id for prompt in found.prompts.prompts] == [f"text:{number}" for number in range(7)]

    class Damaged(Texts):
        def render(self, row: Any) -> Any:
            raise DataError(code="text.other", what="w", where="h", why="y")

    with pytest.raises(DataError):
        run(calls, Damaged(None))


def test_where_none_can_be_written_tokens_are_drawn_by_the_seed(calls: Any) -> None:
    found, _, _ = run(calls, lambda text: False, max_samples=3)
    prompts = found.prompts.prompts
    assert [prompt.prompt_id for prompt in prompts] == ["drawn:0", "drawn:1", "drawn:2"]
    assert [(len(prompt.token_ids), prompt.text) for prompt in prompts] == [(8, "8 tokens")] * 3
    assert len({prompt.token_ids for prompt in prompts}) == 3
    assert all(0 <= token < 50 for prompt in prompts for token in prompt.token_ids)
    again, _, _ = run(calls, lambda text: False, max_samples=0, prompt_len=5)
    assert len(again.prompts.prompts) == 4
    assert [prompt.token_ids for prompt in again.prompts.prompts[:3]] == [prompt.token_ids[:5] for prompt in prompts]
    # an empty text is no prompt either
    empty = Texts(lambda text: True)
    empty.render = lambda row: SimpleNamespace(token_ids=())  # type: ignore[method-assign]
    assert run(calls, empty)[0].prompts.prompts[0].prompt_id == "drawn:0"


def test_the_full_record_names_model_settings_limits_and_packages(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, settings = run(calls, prompt="a")
    monkeypatch.setattr(conformance, "environment", lambda machine: {"versions": {"torch": "1"}, "machine": machine})

    def version(package: str) -> str:
        if package == "vllm":
            raise PackageNotFoundError
        return f"{package} 9"

    monkeypatch.setattr(conformance, "version", version)
    comparison: Any = SimpleNamespace(model_type="llama", dtype="bfloat16", limits=HALF, results=[])
    machine: Any = "machine"
    assert conformance.full_record(settings, machine, comparison, "eight texts") == {
        "model": "dir",
        "model_type": "llama",
        "dtype": "bfloat16",
        "prompts": "eight texts",
        "settings": asdict(settings),
        "limits": asdict(HALF),
        "engines": [],
        "environment": {"versions": {"torch": "1", "sglang": "sglang 9"}, "machine": "machine"},
    }
