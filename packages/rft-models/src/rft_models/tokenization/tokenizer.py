"""Text to token ids and back, and chat templates, through a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rft_core.errors import DataError
from rft_models.files.config_values import MOST_TOKENS, check_token_id, wrong_value
from rft_models.own_decoder.registration import register_for
from rft_models.tokenization.byte_level import byte_symbols, characters_of
from rft_models.tokenization.template_limits import oversized
from rft_models.tokenization.time_limit import call_within

_CLASSES_OF_THE_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that add nothing to tokenizer.json."""

_MOST_SECONDS = 10.0
"""For one conversation: a template takes less than a thousandth of it."""

_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_TEXTS_OF_CALL = 64
"""Texts that are encoded at a time: the results of more of them do not stay in the caches of a core."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Opens a passage of the assistant in a chat template."""

COMPANIONS = ("genrec.json",)
"""Files beside a tokenizer that describe the texts which a model was trained on; they go where the tokenizer goes."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class HfTokenizer:
    """A tokenizer: `encode`, `decode`, `render_chat`, and the ids that end a response.

    `eos_ids` are the tokenizer's end token and those that `generation_config.json` lists (chat
    models end a turn with another token than a document).
    """

    def __init__(self, tokenizer: Any, *, eos_ids: Sequence[int] = (), where: str = "tokenizer") -> None:
        self.hf_tokenizer = tokenizer
        self.where = where
        self.tools: Sequence[Mapping[str, Any]] = ()
        """JSON schemas of the tools that `render_chat` describes to the model."""
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_ids]))
        self.vocab_size = len(tokenizer)
        self.companions: Mapping[str, bytes] = {}
        """Contents of the files of `COMPANIONS` that stood beside it."""
        self._closed_alphabet = _closed_alphabet(tokenizer)

    @cached_property
    def _whole_tokens(self) -> re.Pattern[str]:
        tokens = {*self.hf_tokenizer.all_special_tokens, *self.hf_tokenizer.get_added_vocab()}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    @property
    def pad_id(self) -> int:
        """Id that fills padding: the padding token, else the end token, else 0."""
        if self.hf_tokenizer.pad_token_id is not None:
            return int(self.hf_tokenizer.pad_token_id)
        return self.eos_ids[0] if self.eos_ids else 0

    @property
    def digest(self) -> str:
        """SHA-256 of all that the tokens of a text or a chat follow from."""
        hf = self.hf_tokenizer
        record = [hf.backend_tokenizer.to_str(), hf.chat_template, list(self.eos_ids)]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Return true where `render_chat` can be used."""
        return bool(self.hf_tokenizer.chat_template)

    @property
    def media_words(self) -> tuple[str, ...]:
        """Words that stand for an image in a text; none here."""
        return ()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode `text` as token ids.

        Raises:
            DataError: the tokenizer has a fixed set of characters and `text` has another one.
        """
        if self._closed_alphabet is not None:
            self._refuse_unknown_characters(text, self._closed_alphabet)
        with self._compiled_part():
            return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))
        raise AssertionError

    @contextmanager
    def _compiled_part(self) -> Generator[None]:
        """Turn what the compiled tokenizer raises, which is a plain `Exception`, into a `DataError`."""
        try:
            yield
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise DataError(
                code="models.tokenizer_damaged",
                what=f"the tokenizer cannot encode a text: {_first_line(error)}",
                where=self.where,
                why="its files lack what its own rules need, such as the token for unknown characters",
                do="copy tokenizer.json of the model again",
            ) from error

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Encode each text as `encode` does, all in one call of the tokenizer's compiled part.

        Raises:
            DataError: as `encode` does.
        """
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is None or len(texts) < 2:
            return [self.encode(text, add_special_tokens) for text in texts]
        # the first one through the library, which sets truncation, padding and special tokens of the compiled part
        first = self.encode(texts[0], add_special_tokens)
        if self._closed_alphabet is not None:
            for text in texts[1:]:
                self._refuse_unknown_characters(text, self._closed_alphabet)
        found = [first]
        for start in range(1, len(texts), _TEXTS_OF_CALL):
            some = list(texts[start : start + _TEXTS_OF_CALL])
            with self._compiled_part():
                encodings = backend.encode_batch_fast(some, add_special_tokens=add_special_tokens)
            found += [encoding.ids for encoding in encodings]
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode `ids` to text, spaces as they are."""
        return self.hf_tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Decode several sequences without special tokens, in one call of the tokenizer's compiled part."""
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.decode(ids, skip_special_tokens=True) for ids in batch]
        return backend.decode_batch([list(ids) for ids in batch], skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render `messages` (role and content each) as one text, with the start of the assistant's turn on request.

        The result holds the template's special tokens; encode it with `add_special_tokens=False`.

        Raises:
            DataError: no chat template, or the template refuses these messages.
        """
        self._require_chat_template()
        text = self._run_template(
            messages,
            lambda: self.hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in self.tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            ),
        )
        assert isinstance(text, str)
        return text

    def assistant_spans(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]] | None:
        """Return (first, behind the last) character of each passage that the template marks as the assistant's words.

        The passages are those between `{% generation %}` and `{% endgeneration %}`, in the rendering without a
        generation prompt; None where the template marks nothing.

        Raises:
            DataError: no chat template, or the template refuses these messages.
        """
        self._require_chat_template()
        tools = [dict(tool) for tool in self.tools] or None
        template = self.hf_tokenizer.get_chat_template(None, tools)
        if not _GENERATION.search(template):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        _, indices = self._run_template(
            messages,
            lambda: cast(Any, render_jinja_template)(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.hf_tokenizer.special_tokens_map,
            ),
        )
        return [(int(first), int(behind)) for first, behind in indices[0]]

    def _require_chat_template(self) -> None:
        if not self.has_chat_template:
            raise DataError(
                code="text.no_chat_template",
                what="a chat was given, but the tokenizer has no chat template",
                where=self.where,
                why="the model's template defines how roles become text; a guessed one would train on the wrong format",
                do="give prompts as plain text, or put chat_template.jinja into the model's directory",
            )

    def _run_template(self, messages: Sequence[Mapping[str, Any]], render: Callable[[], Any]) -> Any:
        """Run the template within its time, with its own errors as `DataError`."""
        import jinja2

        template = self.hf_tokenizer.chat_template
        fault = oversized(template) if isinstance(template, str) else ""
        if fault:
            raise self._broken_template(f"holds {fault}: it may make a text of any size")
        try:
            return call_within(_MOST_SECONDS, render)
        except TimeoutError as error:
            raise self._broken_template(
                f"did not end within {_MOST_SECONDS:g} s for {len(messages)} messages"
            ) from error
        except jinja2.TemplateError as error:
            raise DataError(
                code="text.chat_refused",
                what=f"the chat template refused {len(messages)} messages: {error}",
                where=self.where,
                why="templates accept only certain roles in a certain order",
                do=f"change the roles {[message.get('role') for message in messages][:8]} to what the template takes",
            ) from error
        # what a template's own expressions raise, such as a sum of text and nothing, or a range without end
        except _TEMPLATE_ERRORS as error:
            raise self._broken_template(f"failed for {len(messages)} messages: {_named(error)}") from error

    def _broken_template(self, what: str) -> DataError:
        return DataError(
            code="text.chat_template_broken",
            what=f"the chat template {what}",
            where=self.where,
            why="a template is a short program of the model's directory, which is run for every conversation",
            do="copy chat_template.jinja and tokenizer_config.json of the model again",
        )

    def keep_pixel_range(self) -> None:
        """Do nothing: a tokenizer of text has no image processor."""

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the tokenizer's files, chat template and companions included."""
        self.hf_tokenizer.save_pretrained(str(directory))
        for name, content in self.companions.items():
            (Path(directory) / name).write_bytes(content)

    def _refuse_unknown_characters(self, text: str, alphabet: frozenset[str]) -> None:
        # special and added tokens are one token each, whatever characters they are written with
        text = self._whole_tokens.sub("", text)
        unknown = sorted(set(text) - alphabet)
        normalizer = self.hf_tokenizer.backend_tokenizer.normalizer
        if unknown and normalizer is not None:
            # an e and its accent become one character, for example
            unknown = sorted(set(normalizer.normalize_str(text)) - alphabet)
        if unknown:
            raise DataError(
                code="text.unknown_character",
                what=f"characters {''.join(unknown)[:40]!r} are not among the tokenizer's {len(alphabet)}",
                where=self.where,
                why="this tokenizer has one token a character and none for unknown ones",
                do=f"remove {unknown[0]!r} from the text, or build the model with it in the alphabet",
            )


def _last_model(path: Path) -> str:
    """Return the model of the newest checkpoint where the directory is a run, to be given in its place."""
    models = sorted(path.glob("checkpoints/step_*/model"))
    return f"--pretrain {models[-1]}" if models else ""


def load_tokenizer(directory: str | Path) -> HfTokenizer:
    """Load the tokenizer of a Hugging Face directory, local files only, no code from the directory.

    Raises:
        DataError: directory or tokenizer files absent, damaged, or in need of code of their own.
    """
    from rft_models.files.directories import existing_directory, read_json

    path = existing_directory(directory)
    files = [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not files:
        raise DataError(
            code="models.no_tokenizer",
            what=f"no tokenizer file ({', '.join(_TOKENIZER_FILES[:2])}, ...) in {path}",
            where=str(path),
            why="a model directory must be complete: text cannot become ids without its tokenizer",
            do=_last_model(path) or f"copy tokenizer.json and tokenizer_config.json of the model into {path}",
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).is_file():
            content = read_json(path / name)
            if name == "tokenizer.json":
                _refuse_huge_ids(path / name, content)
    # beside tokenizer.json the code is not needed and not looked at
    if "auto_map" in _json_or_empty(path / "tokenizer_config.json") and "tokenizer.json" not in files:
        raise DataError(
            code="models.tokenizer_needs_code",
            what="tokenizer_config.json has an auto_map: the tokenizer is Python code in the directory",
            where=str(path / "tokenizer_config.json"),
            why="code from a model directory is never run",
            do="convert the tokenizer to tokenizer.json",
        )
    tokenizer = HfTokenizer(_from_pretrained(path), eos_ids=_generation_eos_ids(path), where=str(path))
    tokenizer.companions = {name: (path / name).read_bytes() for name in COMPANIONS if (path / name).is_file()}
    return tokenizer


def _from_pretrained(path: Path) -> Any:
    # AutoTokenizer puts the class of the model's family in the place of this one, which for Qwen2 replaces the
    # normalizer and the splitting that tokenizer.json holds; to import it takes a second, with all models' code
    as_written = _json_or_empty(path / "tokenizer_config.json").get("tokenizer_class") in _CLASSES_OF_THE_FILE
    kind: Any
    if as_written and (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as kind
    else:
        from transformers import AutoTokenizer as kind

        register_for(path)  # the automatic class reads config.json, and knows families of transformers alone
    try:
        made = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        made.encode("")  # what a value of another kind breaks, such as a text as the greatest length
        return made
    except Exception as error:  # the compiled tokenizer raises plain exceptions for what it cannot read
        raise DataError(
            code="models.tokenizer_damaged",
            what=f"the tokenizer does not load: {_first_line(error)}",
            where=str(path),
            why="its files are damaged, or of a kind that this transformers does not know",
            do=f"copy the tokenizer files into {path} again",
        ) from error


def _refuse_huge_ids(file: Path, content: dict[str, Any]) -> None:
    """Raise `DataError` for an id that no vocabulary has: the tokenizer would take memory for all ids below it."""
    model = content.get("model")
    vocab = cast(dict[str, Any], model).get("vocab") if isinstance(model, dict) else None
    for token, index in cast(dict[str, Any], vocab).items() if isinstance(vocab, dict) else ():
        if not isinstance(index, int) or not 0 <= index < MOST_TOKENS:
            raise wrong_value(file, f"model.vocab[{token!r}]", index, f"a token id from 0 to {MOST_TOKENS - 1}")
    added = content.get("added_tokens")
    for entry in cast(list[Any], added) if isinstance(added, list) else ():
        index = cast(dict[str, Any], entry).get("id") if isinstance(entry, dict) else None
        if not isinstance(index, int) or not 0 <= index < MOST_TOKENS:
            raise wrong_value(file, "added_tokens.id", index, f"a token id from 0 to {MOST_TOKENS - 1}")


def _generation_eos_ids(path: Path) -> list[int]:
    file = path / "generation_config.json"
    value = _json_or_empty(file).get("eos_token_id")
    check_token_id(file, "eos_token_id", value)
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _json_or_empty(path: Path) -> dict[str, Any]:
    from rft_models.files.directories import read_json

    return read_json(path) if path.is_file() else {}


def _closed_alphabet(tokenizer: Any) -> frozenset[str] | None:
    """Return the characters of a tokenizer that has a token for each of them and for no other, else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.unk_token is not None:
        return None
    model = json.loads(backend.to_str())["model"]
    if model.get("type") == "WordLevel":
        return frozenset(token for token in model["vocab"] if len(token) == 1)
    # every text can be written in bytes where all of them have tokens
    symbols = byte_symbols().values()
    if model.get("type") != "BPE" or model.get("byte_fallback") or all(symbol in model["vocab"] for symbol in symbols):
        return None
    decoder = json.loads(backend.to_str())["decoder"] or {}
    return characters_of(model["vocab"]) if decoder.get("type") == "ByteLevel" else None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
