"""Runner of a user's environment in processes that can be killed, with deadlines for turns and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from rft_core.errors import DataError
from rft_trainer.environments.episodes import Episode, Reply, oldest_kept
from rft_trainer.environments.protocol import Answer
from rft_trainer.records.scores import RewardStatus
from rft_trainer.workers.limits import ProcessLimits
from rft_trainer.workers.pool import Job, Outcome, WorkerPool


class UserEpisodes:
    """Runner of a class in a user's file; an episode stays with one process, which a hung or dying tool ends.

    The other episodes of a process that was killed go on in a new one, which walks their environments through the
    turns they had; a tool that acts on the world acts again then.
    """

    def __init__(
        self,
        path: str,
        name: str,
        *,
        num_workers: int = 1,
        tool_timeout: float = 10.0,
        rollout_timeout: float = 60.0,
        limits: ProcessLimits | None = None,
    ) -> None:
        """Load the file and check the class.

        Args:
            path: a Python file.
            name: a class in it; see `protocol.Environment`.
            num_workers: processes, each of which imports the file.
            tool_timeout: seconds for each tool call of a turn (one for a turn without calls), and for a reset.
            rollout_timeout: seconds of the environment in a whole conversation.
            limits: memory of each process, and the secrets that it sees.

        Raises:
            OptionsError: no such file or class, or one that cannot be used.
            DataError: the file raises while it is imported.
        """
        self._tool_timeout, self._rollout_timeout = tool_timeout, rollout_timeout
        task = f"environment:{path}:{name}"
        # a pool of one process each: an episode must reach the process that has its environment
        self._pools = [WorkerPool(task, num_workers=1, limits=limits) for _ in range(num_workers)]
        self._holders: list[list[int]] = [[] for _ in self._pools]
        """Process ids of each pool at its last call: others have seen none of its episodes."""
        # one process now, so that a file that does not load is refused before the run begins
        self._pools[0].start()
        [described] = self._pools[0].run([Job({"kind": "tools"}, tool_timeout)])
        result = described.result
        self.tools: Sequence[Mapping[str, Any]] = tuple(result["tools"]) if isinstance(result, dict) else ()

    def reset(self, episodes: Sequence[Episode], oldest: int | None = None) -> list[Reply]:
        """Begin episodes in their processes, as `EpisodeRunner.reset`."""
        first = oldest_kept(episodes, oldest)
        jobs = [Job(_request("reset", e) | {"first": first}, self._tool_timeout) for e in episodes]
        return self._run(episodes, jobs)

    def step(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Answer the last turns; an episode that has used up its seconds times out without a call."""
        late = [episode.seconds >= self._rollout_timeout for episode in episodes]
        asked = [episode for episode, is_late in zip(episodes, late, strict=True) if not is_late]
        jobs = [Job(_request("step", e) | {"turns": [asdict(t) for t in e.turns]}, self._allowed(e)) for e in asked]
        replies = iter(self._run(asked, jobs))
        timeout = Reply(
            RewardStatus.TIMEOUT, detail=f"the environment took more than {self._rollout_timeout:g} s in all"
        )
        return [timeout if is_late else next(replies) for is_late in late]

    def close(self) -> None:
        """Stop the worker processes."""
        for pool in self._pools:
            pool.close()

    def _allowed(self, episode: Episode) -> float:
        """Return the seconds allowed for the turn, plus those of the earlier turns if its process was killed since."""
        left = self._rollout_timeout - episode.seconds
        index = episode.number % len(self._pools)
        seconds = min(self._tool_timeout * max(1, len(episode.turns[-1].calls)), left)
        again = self._pools[index].process_ids != self._holders[index]
        # a new process has to replay the earlier turns first
        return seconds + (self._tool_timeout * len(episode.turns) if again else 0.0)

    def _run(self, episodes: Sequence[Episode], jobs: Sequence[Job]) -> list[Reply]:
        """Run each job in the process of its episode, the processes in parallel."""
        shares: list[list[int]] = [[] for _ in self._pools]
        for index, episode in enumerate(episodes):
            # by number, so that every turn of an episode meets the same process
            shares[episode.number % len(shares)].append(index)
        if len(self._pools) == 1:
            done = [self._pools[0].run(jobs)]
        else:
            with ThreadPoolExecutor(len(self._pools)) as threads:
                work = zip(self._pools, shares, strict=True)
                done = list(threads.map(lambda one: one[0].run([jobs[i] for i in one[1]]), work))
        # after the run, which may have replaced processes
        self._holders = [pool.process_ids for pool in self._pools]
        outcomes = {
            i: outcome for share, part in zip(shares, done, strict=True) for i, outcome in zip(share, part, strict=True)
        }
        return [_reply(outcomes[index], job) for index, job in enumerate(jobs)]


def _request(kind: str, episode: Episode) -> dict[str, object]:
    return {"kind": kind, "number": episode.number, "prompt": asdict(episode.prompt), "key": episode.key}


def _reply(outcome: Outcome, job: Job) -> Reply:
    result = outcome.result
    if outcome.status is not RewardStatus.OK:
        where = f" at {outcome.location}" if outcome.location else ""
        # a timeout has used all that it was given; a crash does not say
        seconds = job.seconds if outcome.status is RewardStatus.TIMEOUT else 0.0
        return Reply(outcome.status, seconds=seconds, detail=f"{outcome.detail}{where}")
    assert isinstance(result, dict)
    if "image" in result:
        raise _image_in_message(result["image"])
    answer = Answer(
        result["messages"], result.get("reward", 0.0), result.get("done", False), dict(result.get("parts", {}))
    )
    return Reply(RewardStatus.OK, answer, float(result["seconds"]))


def _image_in_message(message: str) -> DataError:
    return DataError(
        code="environment.image",
        what=f"the environment answered with an image: {message}",
        where="--environment",
        why="images of a conversation are those of its prompt: an observation is text, which the chat template renders",
        state="the conversations of this step are not used",
        do="answer with text; give images with the prompt (--images_key)",
    )
