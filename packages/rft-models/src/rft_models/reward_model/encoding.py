"""Prompt and response as the tokens that a reward model reads, in its training and wherever it scores.

A text always ends as the reward model's training texts do (the end of the assistant's turn, or the end token): a
score is read at the end of a text, and a state that no training text ended with has no meaning.
"""

from __future__ import annotations

from rft_models.reward_model.shared_images import shared_images_of
from rft_models.reward_model.text import Messages, ended, reward_text
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_models.vision.media import Media

Images = tuple[bytes, ...]


class RewardTextEncoder:
    """Encoder of pairs of prompt and response with a reward model's own tokenizer and chat template.

    Where the tokenizer has a template, the prompt is a conversation and the response the assistant's next turn;
    elsewhere both are one text, with the end token behind it.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self.tokenizer = tokenizer
        self._images = shared_images_of(tokenizer)

    @property
    def takes_images(self) -> bool:
        """Return whether the prompt may have images."""
        return self._images is not None

    def encode(
        self, prompt: str, messages: Messages, response: str, images: Images = ()
    ) -> tuple[list[int], Media | None]:
        """Encode one pair, and its images.

        Args:
            prompt: the prompt as text, used where the tokenizer has no chat template.
            messages: the prompt as a conversation; empty for a prompt that is plain text.
            response: a text without special tokens.
            images: files of the prompt's images, in the order of their places.

        Raises:
            DataError: tokenizer, template or image processor cannot take it.
        """
        return self.encode_text(self.text(prompt, messages, response), images)

    def encode_text(self, text: str, images: Images = (), *, where: str = "prompt") -> tuple[list[int], Media | None]:
        """Encode what `text` returned for a pair, and its images; `where` is what an error names.

        Raises:
            DataError: another number of placeholders than of images, or an image that cannot be used.
        """
        if self._images is None:
            ids, media = self.tokenizer.encode(text, add_special_tokens=not self.tokenizer.has_chat_template), None
        else:
            ids, media = self._images.encode_shared(text, images, where=where)
        return ended(self.tokenizer, ids), media

    def text(self, prompt: str, messages: Messages, response: str) -> str:
        """Return the text of a pair, as `encode` turns it into tokens; markers in the response stand for no image.

        Raises:
            DataError: the template cannot take it.
        """
        if self._images is not None:
            response = self._images.of_response(response)
        return reward_text(self.tokenizer, prompt, messages, response)
