"""Tokens as pieces of UTF-8, against the decoders of the package `tokenizers`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fstep.models.pieces import Pieces, pieces_of, strip_start
from fstep.state import CheckpointError

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁Hello", "▁", "▁▁▁", "a", "é", "水", "<0x>", "<0xZZ>", "x<0x41>", "Ġthe", "Ċ", " ", "<s>", "\n"]
VOCABULARY = [*BYTES, *WORDS, *(chr(256 + n) for n in range(80)), *map(chr, range(33, 127)), *map(chr, range(161, 256))]
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def backend(decoder: Any) -> Backend:
    vocab = {token: id_ for id_, token in enumerate(dict.fromkeys(VOCABULARY))}
    made = Backend(models.WordLevel(vocab, unk_token="a"))
    made.decoder = decoder
    return made


def decoded(made: Backend, ids: list[int]) -> str:
    rule = pieces_of(None if made.decoder is None else json.loads(made.decoder.__getstate__()))
    text, rest = rule.text_of(b"".join(rule.bytes_of(made.id_to_token(id_)) for id_ in ids), final=True)
    assert rest == b""
    return strip_start(text, rule.strip)[0]


BYTE_LEVEL, FALLBACK, PLAIN = (backend(each) for each in (decoders.ByteLevel(), decoders.Sequence(SENTENCEPIECE), None))
IDS = st.lists(st.integers(0, len(dict.fromkeys(VOCABULARY)) - 1), max_size=12)


@given(IDS)
def test_byte_level_equals_the_package(ids: list[int]) -> None:
    """Random bytes are seldom UTF-8: about half of the examples hold a broken character."""
    assert decoded(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids)


@given(IDS)
def test_without_a_decoder_equals_the_package(ids: list[int]) -> None:
    assert decoded(PLAIN, ids) == PLAIN.decode(ids)


@given(st.lists(st.one_of(st.text(max_size=3), st.sampled_from(WORDS), st.binary(max_size=1)), max_size=8))
def test_byte_fallback_equals_the_package(parts: list[str | bytes]) -> None:
    """Characters as bytes, or one byte that is none; a run of bytes with both, the package gives up as a whole."""
    ids: list[int] = []
    for part in parts:
        if part in WORDS:
            ids.append(FALLBACK.token_to_id(part))
        else:
            apart = FALLBACK.token_to_id("a")
            ids += [apart, *(part if isinstance(part, bytes) else part.encode("utf-8", "replace")), apart]
    assert decoded(FALLBACK, ids) == FALLBACK.decode(ids)


def test_a_broken_byte_spoils_nothing_around_it() -> None:
    ids = [*"水".encode(), 0xF0, 0x9F, *"é".encode()]
    assert decoded(FALLBACK, ids) == "水\ufffd\ufffdé"


@pytest.mark.parametrize(
    ("decoder", "tokens", "text"),
    [
        (decoders.Metaspace(), ["▁Hello", "a", "▁"], "Helloa "),
        (decoders.Metaspace(prepend_scheme="never"), ["▁Hello"], " Hello"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), ["Ġthe", "Ċ"], " the\n"),
        (decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()]), ["▁Hello", "<0x41>"], "_Hello<0x41>"),
        (decoders.Sequence([*SENTENCEPIECE[:3], decoders.Strip(" ", 2, 0)]), ["▁▁▁", "a"], " a"),
        (decoders.Sequence([*SENTENCEPIECE[:3], decoders.Strip(" ", 2, 0)]), ["▁", "a", "▁"], "a "),
    ],
)
def test_other_decoders(decoder: Any, tokens: list[str], text: str) -> None:
    made = backend(decoder)
    ids = [made.token_to_id(token) for token in tokens]
    assert decoded(made, ids) == text == made.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    ],
)
def test_decoders_that_look_at_the_whole_text_are_refused(decoder: Any) -> None:
    state = json.loads(decoder.__getstate__())
    with pytest.raises(CheckpointError, match="ByteLevel, Replace, ByteFallback") as caught:
        pieces_of(state)
    assert state.get("decoders", [state])[-1]["type"] in str(caught.value) or "Strip" in str(caught.value)


@given(st.binary(max_size=12), st.integers(0, 12), st.booleans())
def test_a_text_in_two_parts(pieces: bytes, cut: int, byte_fallback: bool) -> None:
    rule = Pieces(byte_fallback=byte_fallback)
    first, rest = rule.text_of(pieces[:cut], final=False)
    assert len(rest) <= 3
    assert rule.text_of(pieces, final=True) == (first + rule.text_of(rest + pieces[cut:], final=True)[0], b"")


@pytest.mark.parametrize(
    ("text", "due", "expected"),
    [
        ("", " ", ("", " ")),
        (" a", " ", ("a", "")),
        ("a ", " ", ("a ", "")),
        (" ", "  ", ("", " ")),
        (" a", "  ", ("a", "")),
    ],
)
def test_what_is_due_from_the_start(text: str, due: str, expected: tuple[str, str]) -> None:
    assert strip_start(text, due) == expected
