"""`rft-train conformance`: the log-probabilities of every engine beside the trainer's, on a model of your own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from rft.build.engines import choose_engine, make_engine
from rft.build.models import codec_of
from rft.build.prompt_data import renderer_for
from rft.conformance import ClosingEngine, EngineResult, as_record, compare, draws, next_token_logits
from rft.parallel.parallelize import weights_dtype
from rft.process.machine import Machine, open_machine
from rft.run_lifecycle import environment
from rft.settings import ConformanceSettings
from rft_cli.commands.generate import prompts_of
from rft_cli.config.resolve import resolve
from rft_cli.pages.conformance import facts, failure, page
from rft_core.errors import DataError, OptionsError
from rft_core.keyed_random import derive_key, integers
from rft_engine.settings import ComparedEnginesSettings, DecodingEngineSettings
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.data.prompts import PromptRow
from rft_trainer.evaluation.logprob_mismatch import Draw, Measured, limits_of, measure_gap
from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import Prompt

BUILT_IN = (
    "Once upon a time",
    "The capital of France is",
    "12+34=",
    "def area(radius):\n    return",
    "Question: what is 7 times 8?\nAnswer:",
    '{"name": "Ada", "born":',
    "1, 1, 2, 3, 5, 8,",
    "\u5929\u7a7a\u662f\u4ec0\u4e48\u989c\u8272\uff1f",
)
"""Prose, a fact, a sum, code, a question, JSON, a series, Chinese: the prompts used when none are given."""

_DRAWN_PROMPTS, _DRAWN_TOKENS = 4, 8


def run(argv: list[str]) -> int:
    """Resolve, compare, print the page; an engine that is apart or failed ends it with an error."""
    settings = resolve("conformance", argv).settings
    with open_machine(settings.model.device) as machine:
        _refuse_ranks(machine)
        codec = codec_of(settings.model)
        prompts, prompts_line = _prompts(settings, codec)
        policy = load_policy(
            settings.model.pretrain, dtype=weights_dtype(settings.model.bf16), device=machine.device, codec=codec
        ).eval()
        results = _compare(settings, machine, codec, policy, prompts)
        if settings.output.output:
            _write(settings, machine, policy, results, prompts_line)
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=200)
        limits = limits_of(policy.dtype)
        head = facts(settings.model.pretrain, _kind(policy, machine), prompts_line, limits, _name(policy.dtype))
        console.print(page(results, head, prompts, codec))
    asked = bool(settings.engine.engines)
    error = failure(results, asked, settings.engine.engine_fp8, settings.model.bf16, prompts, codec)
    if error is not None:
        raise error
    return 0


def _refuse_ranks(machine: Machine) -> None:
    if machine.ranks.world_size > 1:
        raise OptionsError(
            code="conformance.one_process",
            what=f"{machine.ranks.world_size} processes were started",
            where="the launcher",
            why="engines are compared one after another in one process; an engine takes its GPUs by itself",
            do="rft-train conformance, without torchrun",
        )


def _prompts(settings: ConformanceSettings, codec: HfTokenizer) -> tuple[list[Prompt], str]:
    """The prompts, and a line about them."""
    data, lengths = settings.data, settings.lengths
    if data.prompt or data.prompt_data:
        prompts = prompts_of(data, codec, lengths.prompt_max_len)
        source = data.prompt_data or "--prompt"
    else:
        room = max(1, model_facts(settings.model.pretrain).max_positions // 2)
        prompts, source = _built_in(settings, codec, min(room, lengths.prompt_max_len))
    noun = "prompt" if len(prompts) == 1 else "prompts"
    each = f"{data.n_samples_per_prompt} samples each of at most {lengths.generate_max_len} tokens"
    return prompts, f"{source}: {len(prompts)} {noun}, {each}, seed {settings.output.seed}"


def _built_in(settings: ConformanceSettings, codec: HfTokenizer, max_tokens: int) -> tuple[list[Prompt], str]:
    """The built-in texts that the tokenizer can write, cut at `most` tokens; drawn tokens where it can write none."""
    limit = settings.data.max_samples or len(BUILT_IN)
    renderer, prompts = renderer_for(settings.data, codec), list[Prompt]()
    for number, text in enumerate(BUILT_IN):
        try:
            row = renderer.render(PromptRow(f"text:{number}", text, None, None, None, "text", number))
        except DataError as error:
            if error.problem.code != "text.unknown_character":
                raise
            continue
        if row.token_ids:
            prompts.append(Prompt(row.prompt_id, row.token_ids[:max_tokens], row.text, None, "text"))
    if prompts:
        return prompts[:limit], "built-in texts (--prompt_data gives your own)"
    drawn = integers(derive_key(settings.output.seed, "prompts"), _DRAWN_PROMPTS * _DRAWN_TOKENS, 0, codec.vocab_size)
    rows = drawn.reshape(_DRAWN_PROMPTS, _DRAWN_TOKENS)[:, :max_tokens]
    ids = [tuple(int(token) for token in row) for row in rows]
    prompts = [Prompt(f"drawn:{i}", row, codec.decode(row), None, "drawn") for i, row in enumerate(ids)]
    return prompts[:limit], "drawn tokens, since the tokenizer cannot write the built-in texts"


def _compare(
    settings: ConformanceSettings, machine: Machine, codec: HfTokenizer, policy: CausalPolicy, prompts: list[Prompt]
) -> list[EngineResult]:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    response = min(settings.lengths.generate_max_len, model_facts(settings.model.pretrain).max_positions - longest)
    if response < 1:
        raise OptionsError(
            code="conformance.no_room",
            what=f"the longest prompt has {longest} tokens, and the model places {longest + response}",
            where="--prompt_data",
            why="a completion needs room behind its prompt",
            do=f"--prompt_max_len {max(1, longest + response - 1)}, with prompts that are shorter",
        )
    token_ids = [prompt.token_ids for prompt in prompts]
    keys = [
        [derive_key(settings.output.seed, "sample", 0, i, j) for j in range(settings.data.n_samples_per_prompt)]
        for i in range(len(prompts))
    ]
    logits, limits = next_token_logits(policy), limits_of(policy.dtype)
    status = Console(stderr=True).status("")  # seen on a terminal alone

    def start(name: str) -> ClosingEngine:
        status.update(f"{name} starts")
        engine = make_engine(
            _one_engine(settings.engine, name), machine, policy, settings.model.pretrain, longest + response
        )
        return cast("ClosingEngine", engine)

    def measure(engine: Engine, draw: Draw) -> Measured:
        status.update(f"draws and scores at temperature {draw.temperature:g}, top-p {draw.top_p:g}")
        return measure_gap(engine, policy, token_ids, keys, draw, limits=limits, logits=logits, device=machine.device)

    with status:
        return compare(
            settings.engine.names,
            draws(response, codec.eos_ids),
            refuse=lambda name: choose_engine(_one_engine(settings.engine, name), machine.device),
            start=start,
            measure=measure,
        )


def _one_engine(settings: ComparedEnginesSettings, name: str) -> DecodingEngineSettings:
    """The settings of one of the compared engines; the names are known ones."""
    taken = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings) if item.name != "engines"}
    return DecodingEngineSettings(**taken, engine_type=name)  # pyright: ignore[reportArgumentType]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(policy: CausalPolicy, machine: Machine) -> str:
    parameters = f"{policy.num_parameters:,} parameters"
    return f"{policy.model.config.model_type}, {parameters}, {_name(policy.dtype)}; {machine.describe()}"


def _write(
    settings: ConformanceSettings,
    machine: Machine,
    policy: CausalPolicy,
    results: list[EngineResult],
    prompts_line: str,
) -> None:
    """Write all figures as one JSON object."""
    told_environment = environment(machine)
    with contextlib.suppress(PackageNotFoundError):
        told_environment["versions"]["vllm"] = version("vllm")
    record = {
        "model": settings.model.pretrain,
        "model_type": policy.model.config.model_type,
        "dtype": _name(policy.dtype),
        "prompts": prompts_line,
        "settings": dataclasses.asdict(settings),
        "limits": dataclasses.asdict(limits_of(policy.dtype)),
        "engines": as_record(results),
        "environment": told_environment,
    }
    Path(settings.output.output).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
