"""Tokenizers from GGUF metadata: the default model's against ids that transformers gave, and small ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fstep.models.gguf_file import GGUFFile
from fstep.models.gguf_tokenizer import TokenType, tokenizer_from_gguf
from fstep.models.hf_config import Fields
from fstep.models.tokenizer import Tokenizer
from fstep.state import CheckpointError
from tests.models.gguf_files import default_model, write

SMOLLM2 = {
    "": [],
    "Hello, world!": [19556, 28, 905, 17],
    "Paris": [38634],
    " Paris": [7042],
    "lighthouse": [92, 24638],
    " lighthouse": [33059],
    "Old Town": [17222, 10522],
    " Old Town": [5763, 10522],
    "café 🔥🔥!": [83, 1939, 2756, 15107, 238, 115, 10813, 238, 115, 17],
    "B 水a火c": [50, 17097, 125, 129, 81, 178, 219, 121, 83],
    " London": [4528],
    " New York": [1315, 2863],
    "  a": [216, 253],
    "a b c d": [81, 278, 265, 287],
    "I have 12345 apples and 3.14 pies": [57, 457, 216, 33, 34, 35, 36, 37, 13855, 284, 216, 35, 30, 33, 36, 42801],
    "don't DON'T we'll it's": [12420, 982, 422, 2154, 23, 68, 392, 3060, 357, 506],
    "tabs\tand\nnewlines\n\n  indented": [100, 7366, 197, 397, 198, 2241, 5110, 8866, 641, 6574],
    "def f(x):\n    return x ** 2  # square\n": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 5222, 198),
    ],
    "日本語のテキスト": [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "한국어 Ελληνικά русский العربية": [
        *(
            33085,
            246,
            181,
            130,
            251,
            183,
            240,
            129,
            5664,
            239,
            17162,
            17162,
            25723,
            11517,
            12001,
            21118,
            26112,
            216,
            9175,
        ),
        *(14714, 9382, 39511, 7872, 24958, 27819, 34966, 20602, 31462, 23339, 43463),
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "x<|im_end|>y": [104, 2, 105],
    "   ": [333],
    "\n\n\n": [16506],
    "\u00a0\u2003": [15442, 321, 221],
    "👩‍👩‍👧": [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
    "a" * 30: [46880] * 7 + [11510],
    "\x00\x01": [190, 191],
    "A'B'C 's 'S": [49, 23, 50, 23, 51, 637, 99, 637, 67],
    "https://example.com/?a=1&b=2": [4687, 1742, 7434, 30, 824, 35005, 81, 45, 33, 22, 82, 45, 34],
    # a digit of any script is a word of its own, as in SmolLM2's tokenizer; transformers joins it to the blank
    " ½": [216, 16738],
}
DEFAULT_CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
)
CHAT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198, 2231, 2, 198, 1, 4093, 198, 25257, 2, 198, 1, 520, 9531, 198),
]
LOST = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = tokenizer_from_gguf(Fields("default", GGUFFile.open(default_model()).metadata))
    assert tokenizer is not None
    return tokenizer


def made(metadata: Mapping[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(Fields("file.gguf", metadata))
    assert tokenizer is not None
    return tokenizer


def refused(metadata: Mapping[str, Any]) -> str:
    with pytest.raises(CheckpointError, match=re.escape("file.gguf")) as caught:
        made(metadata)
    return str(caught.value)


# The default model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SMOLLM2)
def test_the_default_models_ids(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.encode(text) == SMOLLM2[text]
    assert smollm2.decode(SMOLLM2[text], skip_special_tokens=False) == text


def test_the_default_models_particulars(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.decode([1, 4093, 2]) == "user"


def test_the_default_models_chat(smollm2: Tokenizer) -> None:
    """The next turn's prompt begins with the last one's ids and those of the answer, and the newline after it."""
    said = [("user", "hi"), ("assistant", "ok"), ("user", "bye")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert smollm2.apply_chat_template(messages) == DEFAULT_CHAT
    assert smollm2.encode_chat(messages) == CHAT_IDS
    first = smollm2.encode_chat(messages[:1])
    assert CHAT_IDS[: len(first) + 5] == [*first, 2231, 2, 198, 1, 4093]


@settings(max_examples=300)
@given(st.text(max_size=40))
def test_the_default_model_gives_any_text_back(smollm2: Tokenizer, text: str) -> None:
    """But for the bytes that its vocabulary has no token for, which are lost."""
    ids = smollm2.encode(text, split_special_tokens=True)
    kept = bytes(byte for byte in text.encode() if byte not in LOST)
    assert smollm2.decode(ids) == smollm2.backend.decode(ids) == kept.decode("utf-8", "replace")
    assert not smollm2.special_ids & set(ids)


# Byte-level BPE -----------------------------------------------------------------------------------------------------


def byte_level(pre: str | None, merges: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, what the merges make of them, and two special tokens and one that is defined."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [*map(chr, printable), *(chr(256 + n) for n in range(256 - len(printable)))]
    merges = merges or []
    tokens = [*alphabet, *dict.fromkeys(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>"]
    types = [TokenType.NORMAL] * (len(tokens) - 3) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in more.items()}


def words(pre: str | None, text: str) -> list[str]:
    """How a text is cut before the merges."""
    backend = made(byte_level(pre)).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "number", "stop", "capitals"),
    [
        *((pre, [" 12345"], ["$.", "\n\n"], ["'", "LL"]) for pre in ("gpt-2", "default", None)),
        ("smollm", [" ", *"12345"], ["$.", "\n\n"], ["'", "LL"]),
        *((pre, [" ", "123", "45"], ["$.\n\n"], ["'LL"]) for pre in ("llama-bpe", "llama3", "llama-v3")),
        *((pre, [" ", *"12345"], ["$.\n\n"], ["'LL"]) for pre in ("qwen2", "deepseek-r1-qwen")),
    ],
)
def test_how_text_is_cut(pre: str | None, number: list[str], stop: list[str], capitals: list[str]) -> None:
    assert words(pre, "I'll pay 12345$.\n\n") == ["I", "'ll", " pay", *number, *stop]
    assert words(pre, "x'LL") == ["x", *capitals]


def test_tekken_cuts_before_capitals() -> None:
    assert words("tekken", "camelCaseHTTP/\nx") == ["camel", "Case", "HTTP", "/\n", "x"]


def test_qwen_composes_characters() -> None:
    decomposed = "e\u0301"
    assert made(byte_level("qwen2")).decode(made(byte_level("qwen2")).encode(decomposed)) == "é"
    assert made(byte_level("smollm")).decode(made(byte_level("smollm")).encode(decomposed)) == decomposed


def test_a_word_that_is_a_token_is_taken_whole() -> None:
    """Llama 3's vocabulary has tokens that its merges can't reach."""
    merges = ["a b", "b c"]
    metadata = byte_level("llama-bpe", merges)
    metadata["tokenizer.ggml.tokens"][-4] = "abc"  # in place of "bc"
    metadata["tokenizer.ggml.merges"] = ["a b"]
    tokenizer = made(metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert tokenizer.encode("abc", add_special_tokens=False) == [metadata["tokenizer.ggml.tokens"].index("abc")]
    assert len(made(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("abc", add_special_tokens=False)) == 2


@pytest.mark.parametrize(
    ("pre", "more", "bos", "eos"),
    [
        ("smollm", {}, 0, 0),
        ("smollm", {"ggml.add_bos_token": True}, 1, 0),
        ("smollm", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, 1, 1),
        ("llama-bpe", {}, 1, 0),
        ("llama-bpe", {"ggml.add_bos_token": False}, 0, 0),
        ("llama-bpe", {"ggml.bos_token_id": None}, 0, 0),
    ],
)
def test_bos_and_eos_around_a_text(pre: str, more: Mapping[str, Any], bos: int, eos: int) -> None:
    tokenizer = made(byte_level(pre, **more))
    bos_id, eos_id = (tokenizer.backend.token_to_id(token) for token in ("<s>", "</s>"))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert len(plain) == 2
    assert tokenizer.encode("hi") == [bos_id] * bos + plain + [eos_id] * eos


def test_special_and_defined_tokens() -> None:
    tokenizer = made(byte_level("smollm"))
    ids = tokenizer.encode("a<tool></s>")
    assert [tokenizer.backend.id_to_token(id_) for id_ in ids] == ["a", "<tool>", "</s>"]
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool></s>"


def test_without_types_nothing_is_special() -> None:
    metadata = byte_level("smollm")
    del metadata["tokenizer.ggml.token_type"]
    assert made(metadata).special_ids == frozenset()


def test_a_chat_template() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert (
        made(byte_level("smollm", chat_template=template)).apply_chat_template([{"role": "user", "content": "x"}])
        == "<s>x</s>"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "t5"}, ("model='t5'", "gpt2, llama")),
        ({"pre": "jais"}, ("pre='jais'", "smollm", "qwen2", "llama-bpe", "gpt-2")),
        ({"tokens": None}, ("tokens",)),
        ({"tokens": np.arange(3)}, ("tokens",)),
        ({"merges": None}, ("merges",)),
        ({"merges": ["ab"]}, ("merges", "'ab'")),
        ({"merges": ["a nothing"]}, ("tokens", "nothing")),
        ({"token_type": np.ones(3, np.int32)}, ("token_type", "259")),
        ({"bos_token_id": 259}, ("bos_token_id=259", "259")),
        ({"eos_token_id": -1}, ("eos_token_id=-1",)),
        ({"add_bos_token": 1}, ("add_bos_token",)),
    ],
)
def test_metadata_that_makes_no_tokenizer(change: Mapping[str, Any], said: tuple[str, ...]) -> None:
    message = refused(byte_level("smollm") | {f"tokenizer.ggml.{key}": value for key, value in change.items()})
    assert all(part in message for part in said)


def test_a_file_without_a_tokenizer() -> None:
    assert tokenizer_from_gguf(Fields("file.gguf", {"general.architecture": "llama"})) is None


# SentencePiece ------------------------------------------------------------------------------------------------------

PIECES = [
    "▁",
    *"helowrdita",
    "he",
    "ll",
    "llo",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "▁world",
    "it",
    "▁it",
    "lo",
]


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Three special tokens, the bytes, and pieces whose scores say in which order they were learned."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(PIECES)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(n) for n in range(len(PIECES))], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.{key}": value for key, value in more.items()}


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(id_) for id_ in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello world", ["▁hello", "▁world"]),
        ("hello  it", ["▁hello", "▁", "▁it"]),
        (" hello", ["▁", "▁hello"]),
        ("hellold", ["▁hello", "ld"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("it\n", ["▁it", "<0x0A>"]),
        ("", []),
    ],
)
def test_pieces_of_a_text(text: str, pieces: list[str]) -> None:
    tokenizer = made(sentencepiece())
    assert spelled(tokenizer, text) == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bos_is_put_in_front_unless_the_file_says_otherwise() -> None:
    assert made(sentencepiece()).encode("it")[0] == 1
    assert 1 not in made(sentencepiece(**{"ggml.add_bos_token": False})).encode("it")


def test_without_a_blank_in_front() -> None:
    tokenizer = made(sentencepiece(**{"ggml.add_space_prefix": False}))
    assert spelled(tokenizer, "hello world") == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" it")) == " it"


def test_sentencepiece_ids_equal_transformers(transformers: Any, tmp_path: Path) -> None:
    kind = gguf.GGUFValueType.UINT32
    metadata = sentencepiece(**{"ggml.add_bos_token": True})
    written = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    written |= {key: (value, kind) for key, value in written.items() if key.endswith("_id")}
    write(
        tmp_path / "model.gguf",
        {"llama.block_count": 1, **written},
        {"token_embd.weight": np.zeros((4, 4), np.float32)},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = made(GGUFFile.open(tmp_path / "model.gguf").metadata)
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "h" + "".join(rng.choice([*"helowrdita ", "é"], size=12))
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True) == text


def test_scores_are_needed() -> None:
    assert "scores" in refused(sentencepiece(**{"ggml.scores": None}))
