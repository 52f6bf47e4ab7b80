"""Text and images -> token ids and `Media`, through a model directory's own tokenizer and image processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError
from rft_models.families.vision import VISION_FAMILIES, VisionFamily, is_unknown_vision, is_vision, unknown_family
from rft_models.files.directories import existing_directory, read_json
from rft_models.tokenization.tokenizer import HfTokenizer, load_tokenizer
from rft_models.vision.image_files import ImageSource, PixelRules, missing_extra, open_image, require_image_packages
from rft_models.vision.media import ImageInputs, Media
from rft_models.vision.pixel_limits import pixel_range

MARKER = "<image>"
"""Placeholder of an image in plain text and in the text of a message, for every model."""

Messages = Sequence[Mapping[str, Any]]


class HfProcessor(HfTokenizer):
    """A tokenizer with an image processor.

    Example::

        tokenizer = load_vision_processor("Qwen2.5-VL-3B-Instruct", pixels=PixelRules(max_pixels=200_000))
        token_ids, media = tokenizer.encode_media("<image>How many shapes?", ["shapes.png"])
    """

    def __init__(
        self,
        text: HfTokenizer,
        processor: Any,
        family: VisionFamily,
        image_token_id: int,
        pixels: PixelRules | None = None,
    ) -> None:
        """`processor` is one of transformers', `text` what its texts are tokenized with."""
        super().__init__(text.hf_tokenizer, eos_ids=text.eos_ids, where=text.where)
        self.processor = processor
        self.family = family
        self.image_token_id = image_token_id
        self.pixels = pixels or PixelRules()
        self._range = pixel_range(self.pixels, family, processor.image_processor)

    @property
    def has_chat_template(self) -> bool:
        """Return true where `render_chat` can be used."""
        return bool(self._template)

    @property
    def media_words(self) -> tuple[str, ...]:
        """The marker, and what the model's own texts have in its place."""
        return tuple(dict.fromkeys((MARKER, self.family.marker, str(self.processor.image_token))))

    @property
    def _template(self) -> str | None:
        return self.processor.chat_template or self.hf_tokenizer.chat_template

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """Render messages as one text; a content may be a list of parts, and "<image>" in its text is an image part.

        Raises:
            DataError: no chat template, or the template refuses these messages.
        """
        # the tokenizer renders by its own template, which is none where the processor has it
        own = self.hf_tokenizer.chat_template
        self.hf_tokenizer.chat_template = self._template
        try:
            with_parts = [_in_parts(message) for message in messages]
            return super().render_chat(with_parts, add_generation_prompt=add_generation_prompt)
        finally:
            self.hf_tokenizer.chat_template = own

    def encode_media(
        self,
        prompt: str | Messages,
        images: Sequence[ImageSource],
        *,
        add_generation_prompt: bool = True,
        where: str = "prompt",
    ) -> tuple[list[int], Media | None]:
        """Encode a prompt to token ids with a placeholder for each feature, and its images as the model takes them.

        The ids are those of transformers' processor for the same text and images.

        Args:
            prompt: text with "<image>" (or the model's own placeholder) where the images stand, or messages.
            images: in the order of the placeholders: paths, bytes of files, data URIs, PIL images.
            add_generation_prompt: of messages, end with the start of the assistant's turn.
            where: what an error names.

        Returns:
            (token ids, media), media None without images.

        Raises:
            DataError: another number of placeholders than of images, or an image that cannot be used.
        """
        text = (
            prompt if isinstance(prompt, str) else self.render_chat(prompt, add_generation_prompt=add_generation_prompt)
        )
        token_ids = self._as_processor_does(self._with_own_markers(text))
        # counted before an image is opened: decoding is the costly part
        if token_ids.count(self.image_token_id) != len(images):
            raise _other_number(token_ids.count(self.image_token_id), len(images), where)
        if not images:
            return token_ids, None
        opened = [open_image(image, self.pixels, where=_place(where, n, images)) for n, image in enumerate(images)]
        inputs = tuple(self._inputs(one.image, _place(where, n, images)) for n, one in enumerate(opened))
        expanded, spans = _expanded(token_ids, self.image_token_id, [image.num_tokens for image in inputs])
        files = tuple(one.file for one in opened)
        return expanded, Media(inputs, spans, self.image_token_id, files, self._options)

    def num_image_tokens(self, width: int, height: int) -> int:
        """Count the features of an image of this size, without one: for plans."""
        counts = self.processor._get_num_multimodal_tokens(image_sizes=[[height, width]], **self._size_options)
        return int(counts["num_image_tokens"][0])

    def keep_pixel_range(self) -> None:
        """Make the range of `pixels` the processor's own, so that what is saved scales images as this run does."""
        if self._range is not None:
            least, largest = self._range
            self.processor.image_processor.size = {"shortest_edge": least, "longest_edge": largest}

    def save_pretrained(self, directory: str | Path) -> None:
        """Write tokenizer, image processor and chat template."""
        self.processor.save_pretrained(str(directory))
        self.hf_tokenizer.save_pretrained(str(directory))

    def _with_own_markers(self, text: str) -> str:
        return text if self.family.marker == MARKER else text.replace(MARKER, self.family.marker)

    def _as_processor_does(self, text: str) -> list[int]:
        """Encode with the tokens that the tokenizer puts around a text (LLaVA's "<s>"), unless it has the first.

        The same as a processor of transformers for messages, and for a text that does not begin with that token.
        """
        first = self.hf_tokenizer.bos_token
        return self.encode(text, add_special_tokens=first is None or not text.startswith(first))

    def _inputs(self, image: Any, where: str) -> ImageInputs:
        """Prepare the vision tower's inputs of one image."""
        try:
            # one image a call: grid and number of features are then its own
            prepared = self.processor.image_processor(images=[image], return_tensors="pt", **self._options)
            number = self.processor.replace_image_token(prepared, image_idx=0).count(self.processor.image_token)
        except (ValueError, ZeroDivisionError, TypeError) as error:
            raise DataError(
                code="images.refused_by_processor",
                what=f"the model's image processor refuses {image.width} x {image.height} pixels: {error}",
                where=where,
                why="each architecture accepts images of certain shapes only",
                do="crop the image to a less elongated shape, or leave its row out",
            ) from error
        grid = prepared.get("image_grid_thw")
        pixels = prepared["pixel_values"]
        if grid is None:
            return ImageInputs.of(pixels[0], None, number)
        frames, rows, columns = (int(size) for size in grid[0])
        return ImageInputs.of(pixels, (frames, rows, columns), number)

    @property
    def _options(self) -> dict[str, Any]:
        """Options of the image processor that follow from `pixels`."""
        size = self._size_options
        if not size:
            return {}
        return {"size": {"shortest_edge": size["min_pixels"], "longest_edge": size["max_pixels"]}}

    @property
    def _size_options(self) -> dict[str, int]:
        return {} if self._range is None else {"min_pixels": self._range[0], "max_pixels": self._range[1]}


def load_processor(directory: str | Path, *, pixels: PixelRules | None = None) -> HfTokenizer:
    """Load the tokenizer of a directory, with its image processor where the model takes images.

    Raises:
        DataError: files absent or damaged.
        OptionsError: the model takes images, and pillow or torchvision is not installed.
    """
    config = existing_directory(directory) / "config.json"
    if config.is_file() and is_vision(read_json(config).get("model_type", "")):
        return load_vision_processor(directory, pixels=pixels)
    return load_tokenizer(directory)


def load_vision_processor(directory: str | Path, *, pixels: PixelRules | None = None) -> HfProcessor:
    """Tokenizer and processor of a vision-language model's directory, local files only, no code from it.

    Raises:
        DataError: not such a directory, or files absent or damaged.
        OptionsError: pillow or torchvision is not installed, or `pixels` leaves this model no image.
    """
    require_image_packages()
    text = load_tokenizer(directory)
    path = existing_directory(directory)
    config = read_json(path / "config.json")
    model_type = config.get("model_type", "")
    if is_unknown_vision(config):
        raise unknown_family(config, str(path / "config.json"))
    if not is_vision(model_type):
        raise DataError(
            code="vision.other_model",
            what=f"model_type {model_type!r} takes no images here",
            where=str(path / "config.json"),
            why=f"known are {', '.join(sorted(VISION_FAMILIES))}",
            do="choose a directory of one of these",
        )
    processor = _load_processor(path)
    # one tokenizer for both: AutoProcessor may have loaded the files as another class, see `load_tokenizer`
    processor.tokenizer = text.hf_tokenizer
    image_token_id = config.get("image_token_id", config.get("image_token_index"))
    own_id = text.hf_tokenizer.convert_tokens_to_ids(processor.image_token)
    if image_token_id is None:
        image_token_id = own_id
    if own_id != image_token_id:
        raise DataError(
            code="vision.other_placeholder",
            what=f"images are at token {image_token_id} in config.json, but {processor.image_token} is token {own_id}",
            where=str(path),
            why="features are put where this token stands",
            do="copy config.json and the tokenizer files of one and the same model",
        )
    return HfProcessor(text, processor, VISION_FAMILIES[model_type], int(image_token_id), pixels)


def _load_processor(path: Path) -> Any:
    try:
        from transformers import AutoProcessor

        processor = cast(Any, AutoProcessor).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise missing_extra("torchvision") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_processor(path, str(error).strip().splitlines()[:1]) from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token"):
        raise _no_processor(path, [f"its processor is a {type(processor).__name__}"])
    return processor


def _no_processor(path: Path, words: list[str]) -> DataError:
    return DataError(
        code="vision.no_processor",
        what=f"the image processor does not load: {words[0] if words else 'no reason given'}",
        where=str(path),
        why="preprocessor_config.json (or processor_config.json) describes how images become inputs of the model",
        do=f"copy preprocessor_config.json and the chat template of the model into {path}",
    )


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose text contains markers with a list of parts as its content."""
    content = message.get("content")
    if isinstance(content, str):
        return message if MARKER not in content else {**message, "content": _parts_of(content)}
    if not isinstance(content, Sequence):
        return message
    parts: list[Any] = []
    for part in cast(Sequence[Any], content):
        is_text = isinstance(part, Mapping) and cast(Mapping[str, Any], part).get("type") == "text"
        parts += _parts_of(str(cast(Mapping[str, Any], part)["text"])) if is_text else [part]
    return {**message, "content": parts}


def _parts_of(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARKER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _expanded(
    token_ids: Sequence[int], image_token_id: int, counts: Sequence[int]
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Return the tokens with placeholder n repeated `counts[n]` times, and (first, number) of each run."""
    expanded: list[int] = []
    spans: list[tuple[int, int]] = []
    for token in token_ids:
        if token != image_token_id:
            expanded.append(token)
            continue
        number = counts[len(spans)]
        spans.append((len(expanded), number))
        expanded += [image_token_id] * number
    return expanded, tuple(spans)


def _place(where: str, number: int, images: Sequence[Any]) -> str:
    return where if len(images) == 1 else f"{where}, image {number + 1} of {len(images)}"


def _other_number(num_placeholders: int, num_images: int, where: str) -> DataError:
    return DataError(
        code="images.other_number",
        what=f"{num_placeholders} placeholders for {num_images} images",
        where=where,
        why="each image stands at one placeholder: <image> in text, or a part of type image in a message",
        do="write one placeholder in the prompt for every image of the images column",
    )
