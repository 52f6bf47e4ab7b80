"""An engine that was left behind by an update is found before the step ends: six ways, twenty places each.

The runs are real: a policy, AdamW, the loop and its check of the engine. What is planted gets past the
verification inside a load, which would refuse most of it before (rft-engine's `native/test_copied_weights.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.stale_runs import PROMPTS, KeptPrefixes, StaleRun, untie, unverified_load

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import ServiceError
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_models.decode.weight_copy import GenerationCopy

PLACES = range(20)
LIMIT = 1e-4
EMBEDDINGS = {"model.embed_tokens.weight", "transformer.wte.weight"}
HEAD = "lm_head.weight"

Planted = tuple[set[str], int]
"""Tensors that stay behind, and how many versions behind the engine says that it is."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sync_skipped(run: StaleRun) -> Planted:
    """The update is not sent at all; the engine hears the new version, or not even that."""
    hears = bool(run.numbers.getrandbits(1))
    replace_load(run.engine, lambda version: run.engine._states.load_weights(version) if hears else None)
    return set(run.names), 0 if hears else 1


def half_the_tensors(run: StaleRun) -> Planted:
    """Half of them stay as they are."""
    left = set(run.numbers.sample(run.names, len(run.names) // 2))

    def load(version: int) -> None:
        unverified_load(run.copy, [(n, t) for n, t in run.policy.named_parameters() if n not in left])
        run.engine._states.load_weights(version)

    replace_load(run.engine, load)
    return left, 0


def tied_weights_missed(run: StaleRun) -> Planted:
    """The update goes to one end of the tied matrix: the output keeps the old values, or both ends do."""
    both = bool(run.numbers.getrandbits(1))
    if not both:
        untie(run.copy)

    def load(version: int) -> None:
        skipped = EMBEDDINGS if both else set()
        unverified_load(run.copy, [(n, t) for n, t in run.policy.named_parameters() if n not in skipped])
        run.engine._states.load_weights(version)

    replace_load(run.engine, load)
    return {name for name in run.names if name in EMBEDDINGS} if both else {HEAD}, 0


def old_weights_again(run: StaleRun) -> Planted:
    """After a whole load the values of some earlier version come back, as from a file that is read again."""
    old = [(name, tensor.clone()) for name, tensor in run.copy.named_tensors()]
    load = run.engine.load_weights

    def load_and_spoil(version: int) -> None:
        load(version)
        unverified_load(run.copy, old)

    replace_load(run.engine, load_and_spoil)
    return set(run.names), 0


def prefixes_kept(run: StaleRun) -> Planted:
    """Keys and values of prompts that were read before the update answer after it. Every tensor is right."""
    before = GenerationCopy(run.policy)
    before.begin()
    for name, tensor in run.copy.named_tensors():
        before.write(name, tensor)
    before.finish()
    seen = {prompt.token_ids for prompt in PROMPTS} | probes_of(run.engine)
    run.engine._model = KeptPrefixes(run.copy, before, seen)  # type: ignore[assignment]
    return set(), 0


def one_replica_missed(run: StaleRun) -> Planted:
    """The update reaches one of two engines."""
    hears = bool(run.numbers.getrandbits(1))
    engine = run.replicas.engines[run.numbers.randrange(2)]
    replace_load(engine, lambda version: engine._states.load_weights(version) if hears else None)
    return set(run.names), 0 if hears else 1


def replace_load(engine: NativeEngineOnCopy, load: Callable[[int], None]) -> None:
    engine.load_weights = load  # type: ignore[method-assign]


def probes_of(engine: NativeEngineOnCopy) -> set[tuple[int, ...]]:
    """What the check has asked this engine."""
    from rft_engine.weight_sync.logprob_probe import _probes

    return {tuple(probe) for probe in _probes(engine.facts.vocab_size, engine.max_len)}


FAULTS = (
    sync_skipped,
    half_the_tensors,
    tied_weights_missed,
    old_weights_again,
    prefixes_kept,
    one_replica_missed,
)
TOLD = re.compile(
    r"engine replica (\d) serves weights v(\d+), trainer is at v(\d+); (\d+) of (\d+) tensors differ"
    r"(?:: (.*?)(?: and (\d+) more)?)?; probe log-prob gap ([\d.e+-]+) \(limit 0\.0001\)"
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_engine_left_behind_is_caught_in_the_same_step(fault: Callable[[StaleRun], Planted], tmp_path: Path) -> None:
    for seed in PLACES:
        run = StaleRun(tmp_path / str(seed), seed, replicas=2 if fault is one_replica_missed else 1)
        step = 1 + seed % 3
        for _ in range(step - 1):
            run.step()
        stale, behind = fault(run)
        with pytest.raises(ServiceError) as caught:
            run.step()
        assert run.loop.progress.step == step - 1, "the step is not done"
        told = TOLD.fullmatch(caught.value.problem.what.split(", mean")[0])
        assert told, caught.value.problem.what
        replica, engine_version, trainer_version, num_differing, num_tensors = map(int, told.groups()[:5])
        assert (engine_version, trainer_version) == (step - behind, step)
        named = set(told[6].split(", ")) if told[6] else set()
        assert named <= stale, (named, stale)
        assert len(named) == min(num_differing, 5)
        assert len(named) + int(told[7] or 0) == num_differing <= num_tensors
        assert num_differing == len(stale), "an optimizer step moves every tensor"
        assert float(told[8]) > LIMIT
        with pytest.raises(ServiceError) as caught:
            run.replicas.engines[replica].generate([[3]], [[1]], SamplingOptions(temperature=1.0, max_new_tokens=1))
        assert caught.value.problem.code == "engine.logprob_parity"


def test_engines_in_step_are_not_suspected(tmp_path: Path) -> None:
    for seed in PLACES:
        run = StaleRun(tmp_path / str(seed), seed, replicas=1 + seed % 2)
        before = {name: tensor.detach().clone() for name, tensor in run.policy.named_parameters()}
        for number in range(3):
            metrics = run.step()
            assert float(metrics["engine/probe_gap"]) < LIMIT / 10
            assert run.engine.weight_version == number + 1
        assert all(bool((tensor != before[name]).any()) for name, tensor in run.policy.named_parameters())
