"""Tokenizers built from the metadata of a GGUF file: byte-level BPE and SentencePiece's BPE."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from fstep.models.hf_config import Fields
from fstep.models.tokenizer import Tokenizer, surround
from fstep.state import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

MODELS: Final = ("gpt2", "llama")  #: values of tokenizer.ggml.model: byte-level BPE, and SentencePiece's BPE
_KEY = "tokenizer.ggml."
_BLANK = "▁"  # SentencePiece's blank

# How the published tokenizers of these families cut a text into words before BPE.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


class TokenType(enum.IntEnum):
    """What tokenizer.ggml.token_type says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@frozen
class _Cut:
    """A value of tokenizer.ggml.pre: how text is prepared for byte-level BPE."""

    pattern: str | None = None  #: None: GPT-2's own
    single_digits: bool = False  #: every digit is a word
    composed: bool = False  #: Unicode's form C first
    whole_words: bool = False  #: a word that is a token isn't merged together
    adds_bos: bool = False  #: unless the file says otherwise


_GPT2 = _Cut()
_LLAMA3 = _Cut(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, adds_bos=True)
_QWEN2 = _Cut(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}", composed=True)
_TEKKEN = _Cut(rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}", whole_words=True, adds_bos=True)
_CUTS: Final = MappingProxyType(
    {
        "default": _GPT2,
        "gpt-2": _GPT2,
        "smollm": _Cut(single_digits=True),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _TEKKEN,
    }
)


def tokenizer_from_gguf(fields: Fields) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describes; None if there is none.

    The parts of it that GGUF has no words for (how a text is cut into words) are those of the published tokenizer that
    tokenizer.ggml.pre names. Raises `CheckpointError` naming the key and, where there is a choice, what works.
    """
    if not fields.has(f"{_KEY}model"):
        return None
    vocab = _Vocabulary.read(fields)
    try:
        backend, adds_bos = _build(fields, vocab)
    except CheckpointError:
        raise
    except Exception as error:  # the package raises nothing more exact
        raise CheckpointError(f"{fields.source}: {_KEY}tokens: no tokenizer can be made of it: {error}") from None
    _add_tokens(backend, vocab)
    bos_token, eos_token = vocab.named(fields, "bos"), vocab.named(fields, "eos")
    before = bos_token if fields.flag(f"{_KEY}add_bos_token", adds_bos) else None
    after = eos_token if fields.flag(f"{_KEY}add_eos_token", False) else None
    if before or after:
        surround(backend, vocab.ids_of(before), vocab.ids_of(after))
    template = fields.text("tokenizer.chat_template", "") or None
    return Tokenizer(backend, bos_token, eos_token, template)


@frozen(eq=False)
class _Vocabulary:
    """The tokens by id, with the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    @classmethod
    def read(cls, fields: Fields) -> _Vocabulary:
        tokens = _strings(fields, f"{_KEY}tokens")
        types = _numbers(fields, f"{_KEY}token_type", len(tokens), TokenType.NORMAL)
        return cls(tokens, [int(each) for each in types], {token: id_ for id_, token in enumerate(tokens)})

    def of_type(self, *types: TokenType) -> list[str]:
        return [token for token, each in zip(self.tokens, self.types, strict=True) if token and each in types]

    def named(self, fields: Fields, name: str) -> str | None:
        """The token that has a role, such as "bos"."""
        key = f"{_KEY}{name}_token_id"
        token_id = fields.values.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise fields.error(key, f"must be the id of one of {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def ids_of(self, token: str | None) -> Mapping[str, int]:
        return {token: self.ids[token]} if token else {}


def _build(fields: Fields, vocab: _Vocabulary) -> tuple[Backend, bool]:
    """The tokenizer but for its added tokens, and whether it puts BOS in front if the file doesn't say."""
    match fields.text(f"{_KEY}model", ""):
        case "gpt2":
            cut = _cut(fields)
            return _byte_level(vocab, _merges(fields), cut), cut.adds_bos
        case "llama":
            scores = _numbers(fields, f"{_KEY}scores", len(vocab.tokens), None)
            return _sentencepiece(vocab, scores, fields.flag(f"{_KEY}add_space_prefix", True)), True
        case _:
            raise fields.error(f"{_KEY}model", f"those that work are {', '.join(MODELS)}")


def _cut(fields: Fields) -> _Cut:
    name = fields.text(f"{_KEY}pre", "default")
    if name not in _CUTS:
        raise fields.error(f"{_KEY}pre", f"unknown pre-tokenizer; those that work are {', '.join(_CUTS)}")
    return _CUTS[name]


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _strings(fields, f"{_KEY}merges"):
        left, blank, right = merge.partition(" ")
        if not blank:
            raise CheckpointError(f"{fields.source}: {_KEY}merges: {merge!r} must be two tokens with a blank between")
        merges.append((left, right))
    return merges


def _byte_level(vocab: _Vocabulary, merges: list[tuple[str, str]], cut: _Cut) -> Backend:
    from tokenizers import Tokenizer as Backend  # not before it is used: the extra "hf" brings it
    from tokenizers import decoders, models, normalizers

    backend = Backend(models.BPE(dict(vocab.ids), merges, ignore_merges=cut.whole_words))
    backend.pre_tokenizer = _pre_tokenizer(cut)
    if cut.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(cut: _Cut) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None)
    if cut.pattern is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut.pattern), "isolated"), spelled])
    if cut.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), spelled])
    return spelled


def _sentencepiece(vocab: _Vocabulary, scores: Sequence[float], space_prefix: bool) -> Backend:
    """SentencePiece's BPE: at each place the pair whose join has the best score is merged first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = next(iter(vocab.of_type(TokenType.UNKNOWN)), None)
    merges = [(left, right) for *_, left, right in sorted(_pairs(vocab, scores))]
    backend = Backend(models.BPE(dict(vocab.ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks = normalizers.Replace(" ", _BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if space_prefix else blanks
    steps: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * space_prefix)
    return backend


def _pairs(vocab: _Vocabulary, scores: Sequence[float]) -> Iterator[tuple[float, int, int, str, str]]:
    """Every way to cut a token into two tokens, to be sorted by score, then by id."""
    normal = {token: vocab.ids[token] for token in vocab.of_type(TokenType.NORMAL)}
    for token, token_id in normal.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                yield -scores[token_id], normal[left], normal[right], left, right


def _add_tokens(backend: Backend, vocab: _Vocabulary) -> None:
    """Tokens that are found in a text before it is cut: special ones, and those that their author defined."""
    from tokenizers import AddedToken

    add: Any = backend  # its stubs leave the type of tokens open
    special = vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    add.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    add.add_tokens([AddedToken(token, normalized=False) for token in vocab.of_type(TokenType.USER_DEFINED)])


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.values.get(key)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in cast("list[object]", value)):
        raise CheckpointError(f"{fields.source}: {key} must be a list of strings")
    return cast("list[str]", value)


def _numbers(fields: Fields, key: str, count: int, default: float | None) -> Sequence[float]:
    """One number a token. Without a default the key must be there."""
    value = fields.values.get(key)
    if value is None and default is not None:
        return [default] * count
    if not isinstance(value, np.ndarray) or len(cast("NDArray[Any]", value)) != count:
        raise CheckpointError(f"{fields.source}: {key} must be a list of {count} numbers, one a token")
    return cast("NDArray[Any]", value).tolist()
