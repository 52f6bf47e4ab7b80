"""An environment of your own in one file: a shop that answers tool calls, and says what a conversation earned.

    rft-train rl --pretrain MODEL --prompt_data train.jsonl --apply_chat_template \
        --environment examples/my_environment.py:Shop --max_turns 6 --generate_max_len 1024 --turn_max_len 256

The prompts ask for the price of a basket ("3 apples and 2 pears"), the label is the right sum. Calls are JSON between
<tool_call> and </tool_call>: {"name": "price", "arguments": {"item": "apple"}}.
"""

from __future__ import annotations

import re

from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt

PRICES = {"apple": 3, "pear": 4, "plum": 2}


class Shop:
    """One basket; made anew for every conversation."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "price",
                "description": "The price of one piece, in cents.",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
            },
        },
    )

    def reset(self, prompt: EnvironmentPrompt, key: int) -> None:
        """`key` is for what is random; prices are not."""
        self.total = int(prompt.label or 0)
        self.asked: set[str] = set()

    def step(self, turn: AssistantTurn) -> Answer:
        """Prices for calls, a tenth for each new one; 1 for the right sum."""
        if not turn.calls:
            said = re.findall(r"\d+", turn.text)
            right = bool(said) and int(said[-1]) == self.total
            return Answer(reward=float(right), done=True, parts={"correctness": float(right)})
        told: list[str] = []
        earned = 0.0
        for call in turn.calls:
            item = str(call.arguments.get("item", "")).rstrip("s")
            price = PRICES.get(item)
            told.append(f"error: no {item[:20]!r} here" if price is None else str(price))
            earned += 0.1 * (price is not None and item not in self.asked)
            self.asked.add(item)
        return Answer(messages=told, reward=earned)
