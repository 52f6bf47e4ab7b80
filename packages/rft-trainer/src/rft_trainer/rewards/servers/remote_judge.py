"""A judge behind an OpenAI-compatible server (`POST .../chat/completions`), as vLLM and SGLang serve one.

A question without images is a text; one with images is a list of parts, each image a part of type image_url whose
address holds the file itself (data:image/png;base64,...).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rft_core.errors import ServiceError
from rft_trainer.data.images import MARKER
from rft_trainer.records.scores import RewardStatus, Score
from rft_trainer.rewards.images import Images, message_parts, probe_image
from rft_trainer.rewards.servers.http_client import Endpoint, RequestFailure

_SEED_BITS = 0x7FFF_FFFF
_PROBE = "Say yes."


class RemoteJudge:
    """Judge behind a server: one request a question, `concurrency` at once; temperature 0."""

    def __init__(self, endpoint: Endpoint, model: str, *, max_new_tokens: int, concurrency: int = 8) -> None:
        self._endpoint = endpoint
        self._model = model
        self._max_new_tokens = max_new_tokens
        self._concurrency = concurrency

    def start(self, *, with_image: bool = False) -> None:
        """Ask one question, so that a server that is not there is found before the run begins.

        `with_image`: about an image, so that a model that sees none is found too.

        Raises:
            ServiceError: there was no answer.
        """
        images = (probe_image(),) if with_image else ()
        # not waited for: a wrong address shows itself at once
        question = MARKER * len(images) + _PROBE
        answer = self._answer(question, 0, images, waits=False)
        # a score in place of a text is the reason why there was no answer
        if isinstance(answer, Score):
            about = " about an image" if with_image else ""
            raise ServiceError(
                code="reward.judge",
                what=f"the judge did not answer one question{about}: {answer.detail}",
                where=f"--judge_url {self._endpoint.url}",
                why="every response of the run would be without a reward",
                state="nothing was started",
                do="serve a vision-language model there, and name it by --judge_model"
                if with_image
                else "start the server, or correct --judge_url and --judge_model",
            )

    def ask(
        self, questions: Sequence[str], keys: Sequence[int], images: Sequence[Images] | None = None
    ) -> list[str | Score]:
        """Answer each question with one request, as `Judge.ask`."""
        seen = images if images is not None else [()] * len(questions)
        # threads only wait for the server; `map` keeps the order of the questions
        with ThreadPoolExecutor(max(1, min(self._concurrency, len(questions))), "judge") as threads:
            try:
                return list(threads.map(self._answer, questions, keys, seen))
            except BaseException:
                self.close()  # leaving the block waits for the other threads, which may wait for the server
                raise

    def close(self) -> None:
        """End every wait for the server."""
        self._endpoint.close()

    def _body(self, question: str, key: int, images: Images = ()) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": message_parts(question, images) if images else question}],
            "temperature": 0,
            "max_tokens": self._max_new_tokens,
            "seed": key & _SEED_BITS,
        }

    def _answer(self, question: str, key: int, images: Images = (), *, waits: bool = True) -> str | Score:
        try:
            body, probe = self._body(question, key, images), self._body(_PROBE, 0)
            answer: Any = self._endpoint.post(body, probe, waits=waits)
        except RequestFailure as failure:
            return Score(None, failure.status, detail=failure.detail)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if isinstance(content, str):
            return content
        return Score(None, RewardStatus.FAILED, detail=f"the judge's server answered {str(answer)[:80]}")
