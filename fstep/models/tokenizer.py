"""Tokenizers of checkpoints: text to token ids and back, and conversations to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attrs import field, frozen

from fstep.models.chat_template import Message, compile_template, render
from fstep.models.hf_config import Fields
from fstep.models.pieces import Pieces, pieces_of, strip_start
from fstep.state import CheckpointError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Backend


def well_formed(text: str) -> str:
    """`text` with UTF-16 surrogates that stand in pairs joined to the character they mean, and lone ones as U+FFFD.

    Python strings may hold such halves (from JSON, say), and UTF-8 may not.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@frozen(eq=False)
class Tokenizer:
    """A tokenizer of the package `tokenizers`, with what it doesn't know of itself.

    Text that isn't well-formed is repaired before it is encoded (`well_formed`).
    """

    backend: Backend = field(repr=False)
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_ids: frozenset[int] = field(init=False, repr=False)  #: ids that stand for no text
    pieces: Pieces = field(init=False, repr=False)  #: how its tokens become text

    def __attrs_post_init__(self) -> None:
        added = self.backend.get_added_tokens_decoder()
        object.__setattr__(self, "special_ids", frozenset(id_ for id_, token in added.items() if token.special))
        object.__setattr__(self, "pieces", pieces_of(_decoder(self.backend)))

    @property
    def vocab_size(self) -> int:
        """How many tokens it has; a model's vocabulary may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """The ids of `text`, with BOS and the like around it as the checkpoint says, if `add_special_tokens`.

        A special token that is written out in `text` becomes its id, as chat templates need it; with
        `split_special_tokens` it is text like any other, for text that isn't trusted.
        """
        backend = self._splitting if split_special_tokens else self.backend
        return backend.encode(well_formed(text), add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary stand for nothing."""
        pieces = b"".join(self.piece(id_, skip_special_tokens) for id_ in ids)
        text, _ = self.pieces.text_of(pieces, final=True)
        return strip_start(text, self.pieces.strip)[0]

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token stands for."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        token = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self.pieces.bytes_of(token)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, with the beginning of the answer if `add_generation_prompt`.

        The template writes the special tokens itself: encode its text with `add_special_tokens=False`, or use
        `encode_chat`. Raises `RequestError` for messages that are refused and `CheckpointError` without a template.
        """
        names = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}
        return well_formed(render(self._template, messages, names | {"add_generation_prompt": add_generation_prompt}))

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, with no BOS but the template's."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise CheckpointError("the checkpoint has no chat template: give the prompt as text")
        return compile_template(self.chat_template)

    @cached_property
    def _splitting(self) -> Backend:
        copied = type(self.backend).from_str(self.backend.to_str())
        copied.encode_special_tokens = True
        return copied


def _decoder(backend: Backend) -> Mapping[str, Any] | None:
    """The decoder as tokenizer.json has it, without writing the whole vocabulary out as JSON."""
    decoder: Any = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer in a Hugging Face folder: tokenizer.json, with what tokenizer_config.json says beside it.

    None without tokenizer.json. Raises `CheckpointError` naming the file that can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    backend = _read_backend(path)
    fields = _optional(folder / "tokenizer_config.json")
    bos_token, eos_token = (_special_token(folder, fields, name) for name in ("bos_token", "eos_token"))
    _add_bos(backend, fields, bos_token)
    try:
        return Tokenizer(backend, bos_token, eos_token, _chat_template(folder, fields))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend  # not before it is used: the extra "hf" brings it

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises nothing more exact
        raise CheckpointError(f"{path}: isn't a tokenizer: {error}") from None
    backend.no_truncation()  # settings of somebody's training run, which would cut prompts
    backend.no_padding()
    return backend


def _optional(path: Path) -> Fields:
    return Fields.read(path) if path.exists() else Fields(str(path), {})


def _special_token(folder: Path, fields: Fields, name: str) -> str | None:
    """A special token's text: plain, or as an object with the text inside."""
    for source in (fields, _optional(folder / "special_tokens_map.json")):
        value = source.values.get(name)
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str):
            return value
    return None


def _add_bos(backend: Backend, fields: Fields, bos_token: str | None) -> None:
    """Puts BOS in front of every text if the configuration asks for it and tokenizer.json doesn't do it already."""
    if bos_token is None or not fields.flag("add_bos_token", False):
        return
    bos_id = backend.token_to_id(bos_token)
    if bos_id is not None and bos_id not in backend.encode("", add_special_tokens=True).ids:
        surround(backend, {bos_token: bos_id}, {})


def surround(backend: Backend, before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Makes `backend` put these tokens around every text that it encodes with special tokens."""
    from tokenizers.processors import TemplateProcessing

    single, pair = [*before, "$A", *after], [*before, "$A", "$B", *after]
    backend.post_processor = TemplateProcessing(single, pair, [*{**before, **after}.items()])


def _chat_template(folder: Path, fields: Fields) -> str | None:
    """The template of a file of its own, else that of tokenizer_config.json; of several, the one named "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: isn't UTF-8") from None
    value = fields.values.get("chat_template")
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in cast("list[dict[str, object]]", value)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise fields.error("chat_template", 'must be a string, or a list with one that is named "default"')
    return value
