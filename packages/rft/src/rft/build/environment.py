"""Environment of the settings, with the chat template between its turns, for conversations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rft.build.rl_data import RlData
from rft_core.errors import DataError
from rft_models.loading.context_length import model_facts
from rft_models.tokenization.chat_template import ChatTurnTemplate
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.async_rollouts.multi_turn import ConversationSamples
from rft_trainer.environments.episodes import EpisodeRunner
from rft_trainer.environments.registry import environment_by_name, has_processes
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import Prompt
from rft_trainer.rollouts.conversation import ConversationLimits, ConversationStepper
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.settings.environment import EvalEnvironmentSettings
from rft_trainer.workers.limits import user_code_limits


@dataclass(frozen=True, slots=True)
class ChosenEnvironment:
    """A loaded environment, with the template and limits of its conversations."""

    settings: EvalEnvironmentSettings
    episodes: EpisodeRunner
    text: ChatTurnTemplate
    calls: ToolCallFormat
    tokenizer: HfTokenizer
    runners: list[EpisodeRunner] = field(default_factory=list[EpisodeRunner])
    """Of the conversations that run ahead of the trainer; `episodes` then are those of evaluations."""

    def opened(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Cut prompts at the end of their last message: the conversation adds the tokens that open the policy's turn.

        Raises:
            DataError: the prompt's tokens do not end with those that open the turn.
        """
        return [self._opened(prompt) for prompt in prompts]

    def room(self, pretrain: str, longest: int, longest_response: int) -> int:
        """Tokens that the engine should hold: `longest` and a turn more, as far as the model places them.

        A wave of turns then is one call, although their contexts differ in length.
        """
        more = self.settings.turn_max_len or longest_response
        return min(longest + more, model_facts(pretrain).max_positions)

    def conversations(self, engine: Engine, room: int, timer: PhaseTimer | None = None) -> Conversations:
        """Make the sampler of conversations on `engine`, which holds `room` tokens."""
        limits = ConversationLimits(self.settings.max_turns, self.settings.turn_max_len, room)
        return Conversations(engine, self.tokenizer, self.episodes, self.text, self.calls, limits, timer=timer)

    def async_conversations(self, longest_response: int) -> ConversationSamples:
        """Make the samples of asynchronous rollouts: each process of the environment with a thread of its own."""
        num = self.settings.environment_workers if has_processes(self.settings.environment) else 1
        self.runners.extend(_episodes(self.settings, 1) for _ in range(num))
        limits = ConversationLimits(self.settings.max_turns, self.settings.turn_max_len)
        taking = ConversationStepper(self.text, self.calls, limits)
        return ConversationSamples(self.tokenizer, self.runners, taking, longest_response)

    def close(self) -> None:
        """End the processes of the environment."""
        for episodes in (self.episodes, *self.runners):
            episodes.close()

    def _opened(self, prompt: Prompt) -> Prompt:
        opens = self.text.generation_ids
        words = self.tokenizer.decode(opens)
        kept = len(prompt.token_ids) - len(opens)
        if prompt.token_ids[kept:] != opens or kept < 1:
            raise DataError(
                code="environment.prompt_end",
                what=f"the tokens of prompt {prompt.prompt_id} do not end with those of {words!r}",
                where=prompt.source,
                why="the chat template puts them in front of the policy's turn, and the conversation begins there",
                state="nothing was sampled",
                do="use a tokenizer that does not join the chat template's words with the prompt's",
            )
        return replace(prompt, token_ids=prompt.token_ids[:kept], text=prompt.text.removesuffix(words))


def open_environment(settings: EvalEnvironmentSettings, tokenizer: HfTokenizer) -> ChosenEnvironment | None:
    """Load the environment of the settings and register its tools with `tokenizer`, which then renders the prompts.

    None without one. The caller closes it.

    Raises:
        OptionsError: no such environment, or one that cannot be used.
        DataError: its file raises while it is imported, or the chat template cannot be used for conversations.
    """
    if not settings.environment:
        return None
    calls = ToolCallFormat(settings.tool_call_pattern)
    episodes = _episodes(settings, settings.environment_workers)
    # before the template is made, because it renders the tools too
    tokenizer.tools = episodes.tools
    try:
        text = ChatTurnTemplate(tokenizer)
    except DataError:
        # its processes run by now, and no caller has the object that would end them
        episodes.close()
        raise
    return ChosenEnvironment(settings, episodes, text, calls, tokenizer)


def _episodes(settings: EvalEnvironmentSettings, num_workers: int) -> EpisodeRunner:
    return environment_by_name(
        settings.environment,
        num_workers=num_workers,
        tool_timeout=settings.tool_timeout,
        rollout_timeout=settings.rollout_timeout,
        limits=user_code_limits(settings.environment_memory, settings.environment_variables),
    )


def enter_environment(
    settings: EvalEnvironmentSettings, tokenizer: HfTokenizer, stack: ExitStack
) -> ChosenEnvironment | None:
    """`open_environment`, closed with `stack`."""
    environment = open_environment(settings, tokenizer)
    if environment is not None:
        stack.callback(environment.close)
    return environment


def opened_data(data: RlData, environment: ChosenEnvironment | None) -> RlData:
    """Return an RL run's data with prompts that end where conversations begin."""
    if environment is None:
        return data
    # no store has these prompts: the tools of an environment are part of them
    return replace(data, prompts=environment.opened(data.prompts), held_out=environment.opened(data.held_out))


def runs_in_processes(settings: EvalEnvironmentSettings) -> bool:
    """Return True for an environment that runs in processes of its own, which can be killed."""
    return has_processes(settings.environment)
