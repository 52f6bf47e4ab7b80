"""What a child does to itself before its run: record where it is, fail at an instant, spoil a weight.

Each takes JSON arguments. They hook into fault points, so that the run itself is the code of production.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from rft.pretraining import stage as pretrain
from rft.stages import rl, sft
from rft_core import fault_points
from rft_models.layers import compiled_blocks
from rft_models.tiny_models.text import build_character_model
from rft_trainer.metrics.phase_timer import Phase, PhaseTimer
from rft_trainer.runs.checkpointing import Saver
from support import terminal_preludes
from support.pathologies import flip_advantages as flip_advantages
from support.pathologies import freeze_weights as freeze_weights
from support.pathologies import no_learning_rate as no_learning_rate
from support.pathologies import same_batch as same_batch
from support.pathologies import stale_engine as stale_engine
from support.pathologies import wrong_eos as wrong_eos
from support.pathologies import wrong_mask as wrong_mask
from support.rank_preludes import differ_at as differ_at
from support.slurm_tasks import as_task_of_srun as as_task_of_srun
from support.terminal_preludes import close_output as close_output

PHASE_BYTES = 64
STAGES = (rl, sft, pretrain)
_hooks: list[Callable[[str], None]] = []


def _add(hook: Callable[[str], None]) -> None:
    _hooks.append(hook)
    fault_points.install(lambda name: [each(name) for each in _hooks] and None)


def _at(point: str, nth: int, action: Callable[[], object]) -> None:
    """Do `action` at the nth pass of a point."""
    passed = Counter[str]()

    def hook(name: str) -> None:
        passed[name] += 1
        if name == point and passed[name] == nth:
            action()

    _add(hook)


def build_model(directory: str, alphabet: str) -> None:
    """An untrained model of hidden size 32."""
    build_character_model(directory, alphabet=alphabet, hidden=32, layers=2, heads=2, ffn=64, max_positions=64, seed=1)


def hang_up_at(point: str, nth: int) -> None:
    """Run in a terminal that hangs up at the nth pass of a point."""
    other_end = terminal_preludes.terminal()
    _at(point, nth, lambda: terminal_preludes.hang_up(other_end))


def lose_reader_at(point: str, nth: int) -> None:
    """Print into a pipe whose reader goes at the nth pass of a point."""
    other_end = terminal_preludes.pipe()
    _at(point, nth, lambda: os.close(other_end))


def storm_at(point: str, nth: int, seconds: float, name: str = "SIGTERM") -> None:
    """Receive a signal again and again from the nth pass of a point on."""
    _at(point, nth, lambda: terminal_preludes.storm(seconds, name))


def remove_at(point: str, nth: int, path: str) -> None:
    """Delete a file at the nth pass of a point."""
    _at(point, nth, lambda: os.unlink(path))


def list_points(path: str) -> None:
    """Append the name of every point that is passed to a file, one a line."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _add(lambda name: os.write(file, f"{name}\n".encode()) and None)


def record_phase(path: str) -> None:
    """Keep the name of the present phase in a mapped file, where it is found after a kill.

    "start" until the loop runs, then the timer's phases, "between" outside of them, and "end" after the loop.
    """
    with open(path, "w+b") as file:
        file.truncate(PHASE_BYTES)
        memory = mmap.mmap(file.fileno(), PHASE_BYTES)

    def say(name: str) -> None:
        memory[:] = name.encode().ljust(PHASE_BYTES)

    say("start")
    timed, saved = PhaseTimer.phase, Saver.save

    @contextmanager
    def phase(self: PhaseTimer, phase: Phase) -> Iterator[None]:
        say(str(phase))
        with timed(self, phase):
            yield
        say("between")

    @wraps(saved)
    def save(self: Saver, step: int, *, episode: int, must: bool = False) -> None:
        say("save")
        saved(self, step, episode=episode, must=must)
        say("between")

    PhaseTimer.phase = phase  # pyright: ignore[reportAttributeAccessIssue]
    Saver.save = save
    for stage in STAGES:
        _wrap_run(stage, lambda training: _say_end(training, say))


def _say_end(training: Any, say: Callable[[str], None]) -> None:
    run = type(training).run

    def run_and_say(self: Any, signals: Any) -> object:
        say("between")
        result = run(self, signals)
        say("end")
        return result

    type(training).run = run_and_say


def _wrap_run(stage: Any, found: Callable[[Any], None]) -> None:
    """Show `found` the loop as soon as it is built."""
    name = {rl: "build_rl", sft: "build_sft", pretrain: "build_pretrain"}[stage]
    build = getattr(stage, name)

    def built(*arguments: Any, **named: Any) -> Any:
        training = build(*arguments, **named)
        found(training)
        return training

    setattr(stage, name, built)


def signal_at(point: str, nth: int, name: str) -> None:
    """Send this process a signal at the nth pass of a point."""
    _at(point, nth, lambda: os.kill(os.getpid(), signal.Signals[name]))


def kill_in_the_first_save(point: str, num_passes: int) -> None:
    """Hold the first checkpoint before it is published, and kill this process once `point` was passed so often."""
    enough, passed = threading.Event(), Counter[str]()
    if not num_passes:
        enough.set()

    def hook(name: str) -> None:
        passed[name] += 1
        if passed[point] == num_passes:
            enough.set()
        if name == "checkpoint.publish.before":
            enough.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

    _add(hook)


def signal_rank_at(rank: int, point: str, nth: int, name: str) -> None:
    """`signal_at` in one of the ranks."""
    if os.environ["RANK"] == str(rank):
        signal_at(point, nth, name)


def kill_replica_at(nth: int) -> None:
    """Kill one of the engine processes at the nth sample that any of them hands out."""

    def kill() -> None:
        replicas = _replicas()
        assert replicas, "no engine process is there"
        os.kill(replicas[nth % len(replicas)], signal.SIGKILL)

    _at("replica.drawn", nth, kill)


def kill_replicas_from(nth: int, mark: str = "") -> None:
    """Kill every engine process whenever one hands out a sample, from the nth sample on; then `mark` is made."""
    passed = Counter[str]()

    def hook(name: str) -> None:
        passed[name] += 1
        if name == "replica.drawn" and passed[name] >= nth:
            if mark and passed[name] == nth:
                Path(mark).touch()
            for pid in _replicas():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    _add(hook)


def _replicas() -> list[int]:
    """Processes of engines that this process has started."""
    parts = Path("/proc/self/task").glob("*/children")
    children = [int(pid) for part in parts for pid in part.read_text().split()]
    return [pid for pid in children if b"rft.replica_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def signal_in_phase(name: str, nth: int, signal_name: str) -> None:
    """Send this process a signal as it enters a phase of the timer for the nth time."""
    _in_phase(name, nth, lambda: os.kill(os.getpid(), signal.Signals[signal_name]))


def _in_phase(name: str, nth: int, action: Callable[[], object]) -> None:
    timed, passed = PhaseTimer.phase, Counter[str]()

    @contextmanager
    def phase(self: PhaseTimer, phase: Phase) -> Iterator[None]:
        with timed(self, phase):
            passed[phase] += 1
            if phase == name and passed[phase] == nth:
                action()
            yield

    PhaseTimer.phase = phase  # pyright: ignore[reportAttributeAccessIssue]


def signal_in_micro_batch(nth: int, name: str) -> None:
    """Send this process a signal before the nth forward pass of a training step, counted from the start of the run."""
    passed = Counter[str]()

    def before(batch: Any) -> None:
        passed["forward"] += 1
        if passed["forward"] == nth:
            os.kill(os.getpid(), signal.Signals[name])

    for stage in STAGES:
        _wrap_run(stage, lambda training: _before_losses(training.updater, before))


def refuse_at(point: str, nth: int, name: str) -> None:
    """The operating system refuses, with this error, at the nth pass of a point."""
    number = getattr(errno, name)

    def refuse() -> None:
        raise OSError(number, os.strerror(number), "injected")

    _at(point, nth, refuse)


def refuse_every(point: str, nth: int, name: str) -> None:
    """`refuse_at` at every nth pass."""
    passes = count(1)

    def hook(found: str) -> None:
        if found == point and next(passes) % nth == 0:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), "injected")

    _add(hook)


def refuse_rank_at(rank: int, point: str, nth: int, name: str) -> None:
    """`refuse_at` in one of the ranks."""
    if os.environ["RANK"] == str(rank):
        refuse_at(point, nth, name)


def sleep_rank_at(rank: int, point: str, nth: int, seconds: float) -> None:
    """One of the ranks sleeps at the nth pass of a point."""
    if os.environ["RANK"] == str(rank):
        _at(point, nth, lambda: time.sleep(seconds))


def raise_rank_at(rank: int, point: str, nth: int, text: str) -> None:
    """One of the ranks raises a ValueError at the nth pass of a point."""

    def fail() -> None:
        raise ValueError(text)

    if os.environ["RANK"] == str(rank):
        _at(point, nth, fail)


def leak_in_rank(rank: int, point: str, num_bytes: int) -> None:
    """One of the ranks keeps so many bytes more from each pass of a point on."""
    kept: list[bytes] = []

    def hook(name: str) -> None:
        if name == point:
            kept.append(b"1" * num_bytes)

    if os.environ["RANK"] == str(rank):
        _add(hook)


def sleep_rank_in_phase(rank: int, name: str, nth: int, seconds: float) -> None:
    """One of the ranks sleeps in a phase of the timer that it enters for the nth time."""
    if os.environ["RANK"] == str(rank):
        _in_phase(name, nth, lambda: time.sleep(seconds))


def limit_file_size(num_bytes: int) -> None:
    """No file of this process grows beyond `num_bytes`: a write that would is refused with EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def spoil_a_weight(point: str, nth: int, name_part: str, value: float) -> None:
    """Set one number of the first parameter whose name has `name_part`, at the nth pass of a point."""

    def found(training: Any) -> None:
        policy = training.updater.model

        def spoil() -> None:
            parameter = next(p for name, p in policy.named_parameters() if name_part in name)
            with torch.no_grad():
                parameter.view(-1)[0] = value

        _at(point, nth, spoil)

    for stage in STAGES:
        _wrap_run(stage, found)


def spoil_gradients(first: int, last: int, digests: str) -> None:
    """Make the gradient NaN in updates `first` to `last` (from 1), and note the weights' hash after each attempt."""

    def found(training: Any) -> None:
        optimizer = training.updater._optimizer
        step = optimizer.step

        def spoiled(learning_rate: float, **options: Any) -> Any:
            if first <= training.progress.updates + 1 <= last:
                parameter = next(iter(optimizer._parameters.values()))
                parameter.grad = torch.full_like(parameter, float("nan"))
            outcome = step(learning_rate, **options)
            with open(digests, "a", encoding="ascii") as file:
                file.write(f"{outcome.applied} {optimizer.weights_hash()}\n")
            return outcome

        optimizer.step = spoiled

    for stage in STAGES:
        _wrap_run(stage, found)


def spoil_rows(part: str, numbers: list[int], factor: float = float("nan"), since: int = 1) -> None:
    """Multiply the loss of the policy or of the critic in every micro-batch with these rows of the training data.

    From the update with the number `since` on; NaN makes it one that is not finite.
    """

    def found(training: Any) -> None:
        updater = training.updater if part == "policy" else training.critic.update
        texts = [_characters(tokens) for number in numbers for tokens in _rows_of(training, number)]
        inner = updater._loss

        class Spoiled:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def __call__(self, batch: Any, counts: Any, totals: Any) -> Any:
                output = inner(batch, counts, totals)
                held = _characters(batch.token_ids_T.tolist())
                spoiled = training.progress.updates + 1 >= since and any(text in held for text in texts)
                return replace(output, loss=output.loss * factor) if spoiled else output

        updater._loss = Spoiled()

    for stage in STAGES:
        _wrap_run(stage, found)


def run_out_of_memory(rank: int, most_tokens: int, since: int = 1) -> None:
    """On one of the ranks no micro-batch of more tokens fits into memory, from the update with this number on."""
    if os.environ["RANK"] != str(rank):
        return

    def found(training: Any) -> None:
        updater = training.updater
        inner = updater._loss

        class Limited:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def __call__(self, batch: Any, counts: Any, totals: Any) -> Any:
                if len(batch.token_ids_T) > most_tokens and training.progress.updates + 1 >= since:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return inner(batch, counts, totals)

        updater._loss = Limited()

    for stage in STAGES:
        _wrap_run(stage, found)


def _rows_of(training: Any, number: int) -> list[Sequence[int]]:
    """Tokens of a row of the training data; of a window of texts, those of each document in it."""
    if hasattr(training, "windows"):
        return [piece.token_ids for piece in training.windows[number]]
    rows = training.samples if hasattr(training, "samples") else training.prompts
    return [rows[number].token_ids]


def _before_losses(updater: Any, action: Callable[[Any], object]) -> None:
    """Show every micro-batch to `action` before its loss is computed."""
    inner = updater._loss

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def __call__(self, batch: Any, counts: Any, totals: Any) -> Any:
            action(batch)
            return inner(batch, counts, totals)

    updater._loss = Watched()


def spoil_an_output(module: str, number: int, value: float) -> None:
    """Plant a value in what a module of the policy returns, in every micro-batch with this row of the training data."""

    def found(training: Any) -> None:
        texts, held = [_characters(tokens) for tokens in _rows_of(training, number)], [False]

        def look(batch: Any) -> None:
            tokens = _characters(batch.token_ids_T.tolist())
            held[0] = any(text in tokens for text in texts)

        def planted(_: Any, __: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if held[0]:
                first = first.clone()
                first.view(-1)[0] = value
            return (first, *output[1:]) if isinstance(output, tuple) else first

        _before_losses(training.updater, look)
        chosen = [inner for name, inner in training.updater.model.model.named_modules() if name.endswith(module)]
        chosen[0].register_forward_hook(planted)

    for stage in STAGES:
        _wrap_run(stage, found)


def spoil_rank_in_update(rank: int, number: int) -> None:
    """On one of the ranks every loss of an update (from 1) is NaN, also where the step is taken again."""
    if os.environ["RANK"] != str(rank):
        return

    def found(training: Any) -> None:
        inner = training.updater._loss

        class Spoiled:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def __call__(self, batch: Any, counts: Any, totals: Any) -> Any:
                output = inner(batch, counts, totals)
                bad = training.progress.updates + 1 == number
                return replace(output, loss=output.loss * float("nan")) if bad else output

        training.updater._loss = Spoiled()

    for stage in STAGES:
        _wrap_run(stage, found)


def break_compilation(text: str) -> None:
    """No graph of a layer compiles here."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(text)

    compiled_blocks.BACKEND = backend  # type: ignore[assignment]


def compile_with(name: str) -> None:
    """Layers are compiled by this backend of torch, which needs no compiler of a machine's language."""
    compiled_blocks.BACKEND = name


def skew_routers(widest: float, layer: int | None = None, num_layers: int = 1) -> None:
    """Add fixed numbers from -widest to widest to the logits of the routers of dots1, whatever their weights learn.

    To those of all layers, or of one `layer` of `num_layers`.
    """
    module: Any = importlib.import_module("transformers.models.dots1.modeling_dots1")
    functional = module.F
    asked = count()

    class Skewed:
        def __getattr__(self, name: str) -> Any:
            return getattr(functional, name)

        def linear(self, states: Any, weight: Any, bias: Any = None) -> Any:
            logits = functional.linear(states, weight, bias)
            # the products of experts are of other types or shapes: a router's weight is [experts, width]
            if weight.shape[0] >= 16:
                return logits
            # every forward asks the routers in the order of the layers
            here = next(asked) % num_layers
            return logits + torch.linspace(-widest, widest, len(weight)) if layer in (None, here) else logits

    module.F = Skewed()


def _characters(tokens: Sequence[int]) -> str:
    """Token ids as one text, so that a row is found in a micro-batch as a part of it."""
    return "".join(map(chr, tokens))


def save_gradients(path: str) -> None:
    """Write the gradients of the first optimizer step, after the last micro-batch and before clipping."""

    def found(training: Any) -> None:
        optimizer = training.updater._optimizer
        step = optimizer.step

        def noted(learning_rate: float, **options: Any) -> Any:
            if not os.path.exists(path):
                save_file({name: p.grad.clone() for name, p in optimizer._parameters.items()}, path)
            return step(learning_rate, **options)

        optimizer.step = noted

    _wrap_run(rl, found)


def count_host_reads(path: str) -> None:
    """Append the reads of tensors by the host to a file, one line a forward and backward of a training step.

    Counted are `item()` and tests of a truth, both of which are one operation of torch.
    """

    class Reads(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            self.number += function is torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **(named or {}))

    def found(training: Any) -> None:
        inner = training.updater._loss

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def __call__(self, batch: Any, counts: Any, totals: Any) -> Any:
                with Reads() as reads:
                    output = inner(batch, counts, totals)
                    torch.autograd.grad(output.loss, training.updater.model.model.lm_head.weight, retain_graph=True)
                with open(path, "a", encoding="ascii") as file:
                    file.write(f"{reads.number}\n")
                return output

        training.updater._loss = Counted()

    for stage in STAGES:
        _wrap_run(stage, found)
