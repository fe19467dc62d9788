"""How token ids become text: each token is a piece of UTF-8, and a text is the pieces laid end to end.

This is how every decoder of the models that are built works, byte-level BPE (GPT-2, Radford et al. 2019) and
SentencePiece (Kudo & Richardson 2018) alike, so a text can be made token by token at a constant price.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from fstep.state import CheckpointError

REPLACEMENT: Final = "\ufffd"
DECODERS: Final = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "Sequence")
_ESCAPED = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of single bytes


def _byte_alphabet() -> Mapping[str, int]:
    """The character that stands for each byte in byte-level BPE: itself if it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    return MappingProxyType(alphabet)


_BYTE_OF: Final = _byte_alphabet()


@frozen
class Pieces:
    """The rule by which a vocabulary's tokens become bytes."""

    byte_level: bool = False  #: characters stand for bytes, and a broken character is one U+FFFD
    byte_fallback: bool = False  #: tokens like <0x0A> are bytes, and each broken byte is a U+FFFD
    replaced: tuple[tuple[str, str], ...] = ()  #: what is replaced within a token, and by what
    prefix: str = ""  #: stands before every token
    strip: str = ""  #: what is taken from the start of a text, once

    def bytes_of(self, token: str) -> bytes:
        """The piece that a token stands for."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token that isn't written in the alphabet
                return token.encode()
        for old, new in self.replaced:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        return (self.prefix + token).encode()

    def text_of(self, pieces: bytes, final: bool) -> tuple[str, bytes]:
        """The text of some bytes, and those at their end that begin a character, which `final` has none of.

        What can't be UTF-8 becomes U+FFFD: one for each longest beginning of a character (the Unicode standard's
        advice, section 3.9) or, with byte fallback, for each byte, as SentencePiece does.
        """
        text, used = codecs.utf_8_decode(pieces, "surrogateescape" if self.byte_fallback else "replace", final)
        return (_ESCAPED.sub(REPLACEMENT, text) if self.byte_fallback else text), pieces[used:]


def strip_start(text: str, due: str) -> tuple[str, str]:
    """`text` without the characters at its start that are `due`, and what is due from the text that follows it."""
    count = 0
    while count < min(len(text), len(due)) and text[count] == due[count]:
        count += 1
    return text[count:], due[count:] if count == len(text) else ""


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def pieces_of(decoder: Mapping[str, Any] | None) -> Pieces:
    """The rule of a decoder as tokenizer.json describes it; without one, tokens are words with blanks between them.

    Raises `CheckpointError` for a decoder that doesn't work piece by piece, naming those that do.
    """
    if decoder is None:
        return Pieces(prefix=" ", strip=" ")
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return Pieces(byte_level=True)
    rule: dict[str, Any] = {"replaced": ()}
    fused = False
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        _add_step(rule, step, fused)
    return Pieces(**rule)


def _add_step(rule: dict[str, Any], step: Mapping[str, Any], fused: bool) -> None:
    match step:
        case {"type": "Fuse"}:
            pass
        case {"type": "ByteFallback"} if not fused:
            rule["byte_fallback"] = True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            rule["replaced"] += ((old, new),)
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if fused:
            rule["strip"] = content * start
        case {"type": "Metaspace", "replacement": str(blank), **rest} if not fused:
            rule["replaced"] += ((blank, " "),)
            rule["strip"] = "" if rest.get("prepend_scheme") == "never" else " "
        case _:
            works = ", ".join(DECODERS)
            raise CheckpointError(f"decoder {dict(step)!r}: doesn't work token by token; those that may are {works}")
