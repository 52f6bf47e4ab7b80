"""The batch arithmetic of a run, done once and exactly: rollouts, updates, steps, and what is partial.

The flags mean what LightRFT's do. `rollout_batch_size` counts prompts a rollout and
`train_batch_size` responses an optimizer step, both over all ranks; `micro_rollout_batch_size`
and `micro_train_batch_size` count sequences a forward on one rank. A rollout of R prompts gives
R x n samples:

- train_batch_size <= R x n: the samples are cut into ceil(R n / train_batch_size) updates, the
  last possibly smaller, with its own denominator;
- train_batch_size > R x n: an update collects train_batch_size / (R n) whole rollouts, and must be
  a multiple of R n; the last collection of an episode may be smaller.

Nothing is rounded down to zero, nothing is corrected without saying so, and each sample of an
episode is in exactly one update of each of the `max_epochs` passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from rft_core.errors import OptionsError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The batch sizes of a run as the user set them."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    train_batch_size: int
    micro_train_batch_size: int = 1
    micro_rollout_batch_size: int = 1
    max_epochs: int = 1
    num_episodes: int = 1
    world_size: int = 1
    max_samples: int | None = None
    group_estimator: bool = False
    """Whether the advantage compares the samples of one prompt with each other, so that it needs two."""

    @property
    def samples_per_rollout(self) -> int:
        """Samples of a full rollout over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step as planned: samples `start` to `stop` of those that `rollouts` of an episode gave."""

    rollouts: range
    pass_number: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Counts of prompts, rollouts, samples and updates of a run; made by `plan_batches`."""

    settings: BatchSizes
    prompts_given: int
    """Prompts that the data hold."""
    num_prompts: int
    """Prompts of an episode: those given, or the first `max_samples` of them."""

    @property
    def samples_per_episode(self) -> int:
        return self.num_prompts * self.settings.n_samples_per_prompt

    @property
    def rollouts_per_episode(self) -> int:
        return _ceil(self.num_prompts, self.settings.rollout_batch_size)

    @property
    def last_rollout_prompts(self) -> int:
        """Prompts of an episode's last rollout, which may be fewer than `rollout_batch_size`."""
        return self.num_prompts - (self.rollouts_per_episode - 1) * self.settings.rollout_batch_size

    @property
    def rollouts_per_update(self) -> int:
        """Rollouts collected before the samples are cut into updates; 1 unless an update is larger than a rollout."""
        return max(1, self.settings.train_batch_size // self.settings.samples_per_rollout)

    @property
    def collection_size(self) -> int:
        """Samples of a full collection: of the rollouts that are cut into updates together."""
        return self.rollouts_per_update * self.settings.samples_per_rollout

    @property
    def steps_per_episode(self) -> int:
        """Optimizer steps of an episode, all `max_epochs` passes."""
        full, rest = divmod(self.samples_per_episode, self.collection_size)
        return (full * len(self.cut(self.collection_size)) + len(self.cut(rest))) * self.settings.max_epochs

    @property
    def smallest_update(self) -> int:
        """Samples of the smallest update that occurs."""
        full, rest = divmod(self.samples_per_episode, self.collection_size)
        parts = (self.cut(self.collection_size) if full else []) + self.cut(rest)
        return min(len(part) for part in parts)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps_per_episode * self.settings.num_episodes

    @property
    def total_samples(self) -> int:
        """Samples generated in the run."""
        return self.samples_per_episode * self.settings.num_episodes

    def cut(self, num_samples: int) -> list[range]:
        """Split `num_samples` collected samples into the updates of one pass; the last may be smaller."""
        size = self.settings.train_batch_size
        return [range(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]

    def rollout_sizes(self) -> list[int]:
        """Return the number of prompts of each rollout of an episode."""
        return [self.settings.rollout_batch_size] * (self.rollouts_per_episode - 1) + [self.last_rollout_prompts]

    def updates(self) -> Iterator[Update]:
        """Yield every optimizer step of one episode, in order."""
        sizes = self.rollout_sizes()
        for first in range(0, len(sizes), self.rollouts_per_update):
            rollouts = range(first, min(first + self.rollouts_per_update, len(sizes)))
            # fewer than a full collection where the last rollout of an episode is partial
            samples = sum(sizes[i] for i in rollouts) * self.settings.n_samples_per_prompt
            for number in range(self.settings.max_epochs):
                for part in self.cut(samples):
                    yield Update(rollouts, number, part.start, part.stop)

    def derivation(self) -> list[str]:
        """Return the arithmetic as lines of text, ending with whatever is partial or unusual."""
        s = self.settings
        n, size = s.n_samples_per_prompt, s.samples_per_rollout
        last = self.last_rollout_prompts
        partial = f" (the last of {last:,} prompts = {last * n:,} samples)" if last < s.rollout_batch_size else ""
        lines = [
            f"{self.num_prompts:,} prompts x {n:,} samples = {self.samples_per_episode:,} samples an episode",
            f"rollouts of {s.rollout_batch_size:,} x {n:,} = {size:,} samples -> "
            f"{self.rollouts_per_episode:,} rollouts{partial}",
            self._update_line(),
            f"{self.steps_per_episode:,} optimizer steps an episode x {s.num_episodes:,} episodes = "
            f"{self.total_steps:,} optimizer steps, {self.total_samples:,} samples",
            self._micro_line(),
        ]
        return lines + self.notes()

    def notes(self) -> list[str]:
        """Return notes on consequences of these numbers that a user may not expect; empty when there are none."""
        s = self.settings
        notes: list[str] = []
        if self.num_prompts < self.prompts_given:
            notes.append(f"max_samples: the first {self.num_prompts:,} of {self.prompts_given:,} prompts are used")
        if self.samples_per_episode < s.train_batch_size:
            notes.append(
                f"an episode has {self.samples_per_episode:,} samples, fewer than train_batch_size = "
                f"{s.train_batch_size:,}: each pass over it is one partial update with its own denominator"
            )
        smallest = self.smallest_update
        if smallest < s.world_size:
            idle = s.world_size - smallest
            samples = "1 sample" if smallest == 1 else f"{smallest:,} samples"
            notes.append(f"an update of {samples} leaves {'1 rank' if idle == 1 else f'{idle:,} ranks'} without one")
        if s.micro_train_batch_size > _ceil(s.train_batch_size, s.world_size):
            notes.append(
                f"micro_train_batch_size = {s.micro_train_batch_size:,} is more than the "
                f"{_ceil(s.train_batch_size, s.world_size):,} samples a rank has: one forward holds them all"
            )
        return notes

    def _update_line(self) -> str:
        s = self.settings
        size = s.samples_per_rollout
        passes = f" x {s.max_epochs:,} passes" if s.max_epochs > 1 else ""
        steps = f"-> {self.steps_per_episode:,} optimizer steps an episode"
        if s.train_batch_size > size:
            collected = f"{self.rollouts_per_update:,} rollouts of {size:,}"
            return f"{collected} = 1 update of {s.train_batch_size:,}{passes} {steps}"
        parts = self.cut(size)
        uneven = "" if len(parts[-1]) == s.train_batch_size else f" (the last of {len(parts[-1]):,})"
        noun = "update" if len(parts) == 1 else "updates"
        return f"{size:,} samples = {len(parts):,} {noun} of {s.train_batch_size:,}{uneven} a rollout{passes} {steps}"

    def _micro_line(self) -> str:
        s = self.settings
        train, rollout = _ceil(s.train_batch_size, s.world_size), _ceil(s.samples_per_rollout, s.world_size)
        ranks = "1 rank" if s.world_size == 1 else f"{s.world_size:,} ranks"
        return (
            f"{ranks}: at most {train:,} samples an update in forwards of {s.micro_train_batch_size:,} "
            f"({_ceil(train, s.micro_train_batch_size):,}), {rollout:,} a rollout in forwards of "
            f"{s.micro_rollout_batch_size:,} ({_ceil(rollout, s.micro_rollout_batch_size):,})"
        )


def plan_batches(num_prompts: int, settings: BatchSizes) -> BatchPlan:
    """Plan the batches of a run, or raise an `OptionsError` with the product, the rule and the change to make.

    Example: `plan_batches(7473, BatchSizes(rollout_batch_size=64, n_samples_per_prompt=8, train_batch_size=256))`
    gives 117 rollouts and 234 optimizer steps.
    """
    _refuse_too_small(settings)
    if num_prompts < 1:
        raise _no_prompts(num_prompts)
    if not is_accepted(settings):
        one_sample = settings.n_samples_per_prompt < _least_samples(settings)
        raise _one_sample(settings) if one_sample else _no_multiple(settings)
    num_used = num_prompts if settings.max_samples is None else min(num_prompts, settings.max_samples)
    return BatchPlan(settings, num_prompts, num_used)


def is_accepted(settings: BatchSizes) -> bool:
    """Return whether a run with at least one prompt can be planned with these numbers."""
    return not _too_small(settings) and _fits(settings.train_batch_size, settings.samples_per_rollout)


def single_changes(settings: BatchSizes) -> dict[str, int]:
    """Return the nearest accepted value of each number that alone can repair a broken rule.

    Empty for accepted numbers, and where no single change is enough.
    """
    if is_accepted(settings):
        return {}
    small = _too_small(settings)
    n, prompts, size = settings.n_samples_per_prompt, settings.rollout_batch_size, settings.train_batch_size
    searches: dict[str, tuple[int, int, Callable[[int], bool]]] = {
        # each number is tried with the others as they are: a person changes one flag
        "train_batch_size": (size, 1, lambda value: _fits(value, prompts * n)),
        "rollout_batch_size": (prompts, 1, lambda value: _fits(size, value * n)),
        "n_samples_per_prompt": (n, _least_samples(settings), lambda value: _fits(size, prompts * value)),
    }
    changes: dict[str, int] = {}
    for name in {**searches, **dict.fromkeys(small)}:
        if small.keys() - {name}:
            continue  # another number is wrong by itself
        if name in searches:
            changes[name] = _nearest(*searches[name])
        elif _fits(size, prompts * n):
            changes[name] = small[name]
    return changes


def _fits(train_batch_size: int, samples_per_rollout: int) -> bool:
    return train_batch_size <= samples_per_rollout or train_batch_size % samples_per_rollout == 0


def _nearest(start: int, least: int, accepted: Callable[[int], bool]) -> int:
    """Return the accepted value of at least `least` nearest to `start`; of two equally near ones the smaller.

    There is one: the train batch may be 1, and a rollout may be as large as the train batch.
    """
    distance = 1
    while True:
        for value in (start - distance, start + distance):
            if value >= least and accepted(value):
                return value
        distance += 1


def _least_samples(settings: BatchSizes) -> int:
    return 2 if settings.group_estimator else 1


def _counted(settings: BatchSizes) -> dict[str, int]:
    """Return every batch size that is set, by name."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {name: value for name, value in values.items() if value is not None and name != "group_estimator"}


def _too_small(settings: BatchSizes) -> dict[str, int]:
    """Return the least accepted value of every number that is below it."""
    least = {"n_samples_per_prompt": _least_samples(settings)}
    return {name: least.get(name, 1) for name, value in _counted(settings).items() if value < least.get(name, 1)}


def _refuse_too_small(settings: BatchSizes) -> None:
    bad = {name: value for name, value in _counted(settings).items() if value < 1}
    if not bad:
        return
    changes = single_changes(settings)
    if not changes:  # several numbers are wrong: their least values, and one change more where those do not fit
        changes = _too_small(settings)
        more = single_changes(replace(settings, **changes))
        changes |= dict(list(more.items())[:1])
    raise OptionsError(
        code="batch.not_positive",
        what=", ".join(f"{name} = {value}" for name, value in bad.items()) + ": each must be at least 1",
        where=", ".join(f"--{name}" for name in bad),
        why="these numbers count prompts, samples, passes and ranks",
        do=_as_flags(changes),
    )


def _no_prompts(num_prompts: int) -> OptionsError:
    return OptionsError(
        code="batch.no_prompts",
        what=f"the data give {num_prompts} prompts; at least 1 is needed",
        where="--prompt_data",
        why="without a prompt there is nothing to train on",
        do="--prompt_data train.jsonl",
    )


def _one_sample(settings: BatchSizes) -> OptionsError:
    changes = single_changes(settings)
    return OptionsError(
        code="batch.one_sample",
        what=(
            f"n_samples_per_prompt = {settings.n_samples_per_prompt} with an advantage estimator that compares "
            "the samples of one prompt"
        ),
        where="--n_samples_per_prompt",
        why="it must be at least 2: with one sample a prompt every group-centred advantage is 0",
        do=f"--n_samples_per_prompt {changes['n_samples_per_prompt']}",
    )


def _no_multiple(settings: BatchSizes) -> OptionsError:
    s = settings
    changes = single_changes(s)
    others = " or ".join(f"{name} {value}" for name, value in changes.items() if name != "train_batch_size")
    return OptionsError(
        code="batch.not_a_multiple",
        what=(
            f"train_batch_size = {s.train_batch_size}, rollout_batch_size x n_samples_per_prompt = "
            f"{s.rollout_batch_size} x {s.n_samples_per_prompt} = {s.samples_per_rollout}"
        ),
        where="--train_batch_size",
        why=(
            f"an update larger than a rollout consists of whole rollouts: it must be a multiple of "
            f"{s.samples_per_rollout}; with the other settings unchanged, {others} would also work"
        ),
        do=f"--train_batch_size {changes['train_batch_size']}",
    )


def _as_flags(changes: dict[str, int]) -> str:
    return " ".join(f"--{name} {value}" for name, value in changes.items())


def _ceil(numerator: int, denominator: int) -> int:
    # in integers: a float would round beyond 2**53
    return -(-numerator // denominator)
