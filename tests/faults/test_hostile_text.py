"""H9: texts of a model that attack what reads them: answers, LaTeX, choices, tags, JSON, tool calls, patterns, code."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.fault_counts import counted

from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards import answers
from rft_trainer.rewards.math import MathReward, is_well_formed, question_of
from rft_trainer.rewards.rules import fuzzy, json_schema
from rft_trainer.rewards.rules.choice import ChoiceReward
from rft_trainer.rewards.rules.final_answer import final_answer
from rft_trainer.rewards.rules.format import FormatReward
from rft_trainer.rewards.rules.numeric import NumericReward
from rft_trainer.rewards.unit_tests.code import program_of

CANARY = "/rft-hostile-text"
CODE = (
    f"__import__('os').system('touch {CANARY}')",
    f"open('{CANARY}', 'w')",
    "().__class__.__base__.__subclasses__()",
    "exec('1')",
    "lambda: 0",
    "eval(compile('1', '', 'eval'))",
    "{0.__class__.__init__.__globals__}",
    "%n%s%x",
    "!!python/object/apply:os.system [ls]",
    "${jndi:ldap://127.0.0.1/a}",
    "]]><!ENTITY a SYSTEM 'file:///etc/passwd'>",
    "\\input{/etc/passwd}\\write18{ls}",
)
PIECES = (
    *CODE,
    *(
        "\\boxed{",
        "}",
        "{",
        "####",
        "$",
        "\\frac{1}{",
        "\\sqrt{",
        "\\left(",
        "\\right)",
        "^",
        "^{10^{10}}",
        "!",
        "\\int_0^",
    ),
    *(
        "\\sum_{n=1}^{10^9}",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "9" * 101,
        "1e999",
        "NaN",
        "-",
        "1/0",
        "0.",
        ",",
    ),
    *("<answer>", "</answer>", "<think>", "</think>", "<tool_call>", "</tool_call>", "```python\n", "```", "```json\n"),
    *(
        '{"name": "add", "arguments": {}}',
        '{"name":',
        "[",
        "[" * 50,
        "]",
        "null",
        '"\\ud800"',
        "\\u0000",
        "Infinity",
        "1E400",
    ),
    *(
        "answer is (B)",
        "Answer: C",
        "(A)",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "\ud83d",
        "\u0661\u0662",
        "\ufeff",
        "\n",
        " ",
        "a",
    ),
)
"""What texts are made of, besides runs of one piece and random characters."""
LATEX = (
    *(
        "\\frac{1}{",
        "\\sqrt{",
        "\\sqrt[99]{",
        "\\left(",
        "\\right)",
        "^{99}",
        "^{9999}",
        "!",
        "\\int_0^1 ",
        "x",
        "dx",
        "+",
    ),
    *(
        "\\sum_{n=1}^{999999} n",
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\binom{9999}{99}",
        "\\lim_{x\\to 0}",
        "}",
    ),
    *(
        "\\text{a}",
        "\\pi",
        "99999",
        "=",
        ",",
        "\\{1,2\\}",
        "\\cup",
        "(0,1]",
        "\\infty",
        "\\mathrm{open}('x')",
        "\\input{a}",
    ),
    *(
        "a.b",
        "lambda: 0",
        "open('x','w')",
        "().x",
        "[1]",
        "|x|",
        "<",
        "\\log_{2}",
        "\\sin",
        "-",
        "/0",
        "\\%",
        ";",
        "999!",
    ),
)
"""What answers are made of that algebra reads."""
FORBIDDEN = (
    "exec",
    "compile",
    "os.system",
    "subprocess.Popen",
    "socket.connect",
    "os.exec",
    "os.posix_spawn",
    "ctypes.dlopen",
)
MOST_SECONDS, MOST_MEMORY = 0.05, 64 << 20
LONGEST = 4000


def hostile_text(rng: Random) -> str:
    """Pieces in any order, one of them over and over, or characters of all kinds."""
    kind = rng.random()
    if kind < 0.2:
        text = rng.choice(PIECES) * rng.randint(1, 400)
    elif kind < 0.3:
        text = "".join(chr(rng.randrange(0x3000)) for _ in range(rng.randint(0, 200)))
    else:
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
    if rng.random() < 0.2:
        text = f"\\boxed{{{text}}}" if rng.random() < 0.5 else f"#### {text}"
    return text[:LONGEST]


def readers() -> dict[str, Callable[[str], object]]:
    """Everything that reads a response in the process of a run, or in a scoring process, by name."""
    tags, pattern = ToolCallFormat(), ToolCallFormat(r"\[(?P<name>\w+): (?P<arguments>[^\]]*)\]")
    rules = {"numeric": NumericReward(), "choice": ChoiceReward(), "format": FormatReward()}
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}})

    def item(text: str, label: str = "A") -> RewardItem:
        return RewardItem("p", "?", text, label, "stop", 1)

    def scored(rule: Callable[[list[RewardItem]], list[Score]], label: str) -> Callable[[str], object]:
        return lambda text: rule([item(text, label)])[0].value

    return {
        "answers": lambda text: (answers.marked_answers(text), answers.parse_quantity(text), answers.is_readable(text)),
        "math": lambda text: (question_of(item(text, "18")), is_well_formed(item(text, "18"))),
        "numeric": scored(rules["numeric"], "18"),
        "choice": scored(rules["choice"], "A"),
        "format": scored(rules["format"], ""),
        "fuzzy": lambda text: fuzzy.judge({"response": text[:300], "labels": ["the right answer"], "measure": "f1"}),
        "json": lambda text: json_schema.judge({"response": text, "schema": ""}),
        "schema": lambda text: json_schema.judge({"response": text, "schema": schema}),
        "tool calls": tags.parse,
        "tool calls by a pattern": pattern.parse,
        "program": program_of,
        "final answer": final_answer,
    }


def timed(read: Callable[[str], object], text: str) -> tuple[object, float]:
    """What a reader makes of a text, and the processor time that it takes."""
    began = time.thread_time()
    found = read(text)
    return found, time.thread_time() - began


def algebra_text(rng: Random) -> str:
    """LaTeX that algebra is asked about: pieces of sense and of none, braces closed, short enough to be read."""
    while True:
        text = "".join(rng.choices(LATEX, k=rng.randint(1, 12)))
        text += "}" * (text.count("{") - text.count("}"))
        if answers.is_readable(text) and answers.parse_number(text) is None:
            return text


@contextmanager
def watched(seen: Counter[str]) -> Iterator[None]:
    """Count what the interpreter says it does: code that is compiled or run, files, processes, connections."""
    active = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active[0] and (event in FORBIDDEN or (event == "open" and CANARY in str(arguments[0]))):
            seen[event] += 1

    sys.addaudithook(hook)  # a hook cannot be taken away again
    try:
        yield
    finally:
        active[0] = False


@counted(500, 1_000_000)
def test_h9_no_text_runs_code_or_takes_long(number: int) -> None:
    """Each reader returns within its time and memory, and makes the interpreter compile or run nothing."""
    seen, slow, longest, most, ends = Counter[str](), list[str](), 0.0, 0, Counter[str]()
    table = readers()
    for read in table.values():
        read("warm up 1 <answer>B</answer>")  # imports are code that is run
        read('{"name": "x"}')
    names = list(table)
    with watched(seen):
        for seed in range(number):
            rng = Random(f"h9 {seed}")
            name, text = names[seed % len(names)], hostile_text(rng)
            traced = seed % 19 == 0  # which takes time of its own
            if traced:
                tracemalloc.start()
            found, took = timed(table[name], text)
            if traced:
                most = max(most, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            else:
                # of three times the shortest: what the interpreter itself does now and then is no cost of the text
                took = min([took, *(timed(table[name], text)[1] for _ in range(2))]) if took > longest else took
                longest = max(longest, took)
                slow += [f"{name}: {took:.3f} s for {text[:200]!r}"] if took > MOST_SECONDS else []
            ends[name] += found is not None
    assert seen == {}
    assert slow == []
    assert most < MOST_MEMORY
    print(f"\nH9: {number} texts; at most {1000 * longest:.1f} ms and {most / 2**20:.2f} MiB of a text")


@counted(12, 5000)
def test_h9_no_answer_breaks_algebra(number: int) -> None:
    """Answers that algebra reads, in processes: a verdict or a status of that answer, and the next one is judged."""
    ends = Counter[str]()
    reward = MathReward(num_workers=2, timeout=5.0)
    try:
        for start in range(0, number, 200):
            texts = [algebra_text(Random(f"algebra {seed}")) for seed in range(start, min(number, start + 200))]
            asked = [*(f"\\boxed{{{text}}}" for text in texts), "\\boxed{\\frac{2}{4}}"]
            scores = reward([RewardItem("p", "?", text, "\\frac{1}{2}", "stop", 1) for text in asked])
            assert scores[-1].value == 1.0
            ends.update(f"{score.status} {score.value}" for score in scores[:-1])
            assert {score.status for score in scores} <= {RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.FAILED}
    finally:
        reward.close()
    assert not Path(CANARY).exists()
    print(f"\nH9, algebra: {number}, {dict(ends)}")


def test_h9_the_watch_sees_code_that_runs() -> None:
    seen = Counter[str]()
    with watched(seen):
        eval("1")  # noqa: S307
    assert seen["exec"] >= 1
    with pytest.raises(FileNotFoundError):
        open(f"/nowhere{CANARY}").close()
