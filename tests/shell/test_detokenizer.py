"""Text out of token ids as they come: no half characters, nothing of a stop string, nothing lost, nothing twice."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fstep.models.gguf_file import GGUFFile
from fstep.models.gguf_tokenizer import tokenizer_from_gguf
from fstep.models.hf_config import Fields
from fstep.models.tokenizer import Tokenizer
from fstep.shell.detokenizer import Detokenizer
from tests.models.gguf_files import default_model

FIRE = [83, 1939, 2756, 15107, 238, 115, 10813, 238, 115, 17]  # "café 🔥🔥!"
WATER = [50, 17097, 125, 129, 81, 178, 219, 121, 83]  # "B 水a火c"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    tokenizer = tokenizer_from_gguf(Fields("default", GGUFFile.open(default_model()).metadata))
    assert tokenizer is not None
    return tokenizer


def words(*tokens: str) -> Tokenizer:
    """Token `n` stands for `tokens[n]`, written as it is."""
    backend = Backend(models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def of_bytes(*tokens: str) -> Tokenizer:
    """Token `n` stands for the bytes `tokens[n]`, in hexadecimal."""
    alphabet = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    alphabet |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in alphabet)}
    spelled = ["".join(alphabet[byte] for byte in bytes.fromhex(token)) for token in tokens]
    backend = Backend(models.WordLevel({token: id_ for id_, token in enumerate(spelled)}, unk_token=spelled[0]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "▁Hello": 4, "▁world": 5, "▁a": 6, "!": 7}
    vocab |= {f"<0x{byte:02X}>": 8 + byte for byte in range(256)}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def deltas(detokenizer: Detokenizer, ids: Sequence[int], size: int = 1) -> list[str]:
    return [detokenizer.add(ids[at : at + size]) for at in range(0, len(ids), size)]


def cut(items: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    places = [0, *sorted(cuts), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(places)]


# Characters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, ["c", "af", "é", "", "", " 🔥", "", "", "🔥", "!"]),
        (2, ["caf", "é", " 🔥", "", "🔥!"]),
        (3, ["café", " 🔥", "🔥", "!"]),
    ],
)
def test_an_emoji_in_three_tokens(smollm2: Tokenizer, size: int, expected: list[str]) -> None:
    assert deltas(Detokenizer(smollm2), FIRE, size) == expected
    assert "".join(expected) == smollm2.backend.decode(FIRE)


def test_every_split_gives_the_same_text(smollm2: Tokenizer) -> None:
    splits = [cuts for count in range(9) for cuts in itertools.combinations(range(1, 9), count)]
    assert len(splits) == 256
    for cuts in splits:
        detokenizer = Detokenizer(smollm2)
        parts = [detokenizer.add(part) for part in cut(WATER, cuts)]
        assert "".join(parts) == detokenizer.text == "B 水a火c"
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("ids", [FIRE, WATER])
def test_a_text_that_is_cut_off(smollm2: Tokenizer, ids: list[int]) -> None:
    for end in range(len(ids) + 1):
        detokenizer = Detokenizer(smollm2)
        parts = [*deltas(detokenizer, ids[:end]), detokenizer.flush()]
        assert "".join(parts) == detokenizer.text == smollm2.backend.decode(ids[:end])
        assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("tokens", "expected", "rest"),
    [
        (["61", "f09f", "9880", "62"], ["a", "", "😀", "b"], ""),
        (["c3"], [""], "\ufffd"),
        (["c3", "61"], ["", "\ufffda"], ""),
        (["e697a5e6", "9cac"], ["", "日本"], ""),
        (["f09f", "98", "80", "21"], ["", "", "😀", "!"], ""),
        (["20", "20", "0a"], [" ", " ", "\n"], ""),
        (["f09f918be2", "808d", "f09fa4b0"], ["", "👋\u200d", "🤰"], ""),
        (["ff", "ff", "61"], ["\ufffd", "\ufffd", "a"], ""),  # what can't become a character needn't wait
        (["efbfbd"], ["\ufffd"], ""),  # nor does a U+FFFD that is meant
    ],
)
def test_unfinished_characters_wait(tokens: list[str], expected: list[str], rest: str) -> None:
    unique = list(dict.fromkeys(tokens))
    detokenizer = Detokenizer(of_bytes(*unique))
    assert deltas(detokenizer, [unique.index(token) for token in tokens]) == expected
    assert detokenizer.flush() == rest


RANDOM_IDS = st.one_of(st.lists(st.integers(0, 49151), max_size=20), st.lists(st.integers(17, 260), max_size=30))


@settings(max_examples=300)
@given(ids=RANDOM_IDS, cuts=st.lists(st.integers(0, 20), max_size=6), end=st.integers(0, 30))
def test_random_ids_in_random_steps(smollm2: Tokenizer, ids: list[int], cuts: list[int], end: int) -> None:
    """Half of the examples are single bytes, most of which make no characters."""
    ids = ids[:end]
    detokenizer = Detokenizer(smollm2)
    parts = [detokenizer.add(part) for part in cut(ids, [min(each, len(ids)) for each in cuts])]
    whole = smollm2.backend.decode(ids)
    assert whole.startswith("".join(parts))
    assert "".join(parts) + detokenizer.flush() == detokenizer.text == whole == smollm2.decode(ids)
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.stopped is None


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_half_a_character_is_never_out(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, split_special_tokens=True)
    whole = smollm2.decode(ids)
    detokenizer = Detokenizer(smollm2)
    for delta in deltas(detokenizer, ids):
        assert "\ufffd" not in delta or "\ufffd" in whole
    assert detokenizer.text + detokenizer.flush() == whole


def test_blanks_are_kept(smollm2: Tokenizer) -> None:
    for ids, text in (([4528], " London"), ([1315, 2863], " New York"), ([216, 253], "  a")):
        detokenizer = Detokenizer(smollm2)
        assert "".join(deltas(detokenizer, ids)) + detokenizer.flush() == text


@pytest.mark.parametrize(
    ("prompt", "ids", "text"),
    [
        ([], [4, 5, 6], "Hello world a"),
        ([], [3, 4, 6], " Hello a"),
        ([], [3, 3, 6], "  a"),
        ([], [3, 4], " Hello"),
        ([], [1, 3, 2, 4], " Hello"),
        ([1], [4, 5], "Hello world"),
        ([1, 4], [5, 6], " world a"),
        ([1, 4, 2], [5, 6], " world a"),
        ([1, 3], [6], " a"),
    ],
)
def test_a_blank_at_the_start_of_the_whole_text(prompt: list[int], ids: list[int], text: str) -> None:
    tokenizer = sentencepiece()
    whole = tokenizer.backend.decode([*prompt, *ids])
    assert whole.endswith(text)
    assert whole == tokenizer.backend.decode(prompt) + text
    for size in (1, 2, 9):
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt)
        assert "".join(deltas(detokenizer, ids, size)) + detokenizer.flush() == text


@given(st.lists(st.integers(0, 263), max_size=12), st.integers(1, 4))
def test_byte_fallback_in_steps(ids: list[int], size: int) -> None:
    tokenizer = sentencepiece()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(deltas(detokenizer, ids, size)) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_character_in_byte_tokens_is_out_with_its_last() -> None:
    fire = [8 + byte for byte in "🔥".encode()]
    assert deltas(Detokenizer(sentencepiece()), [*fire, 7, *fire]) == ["", "", "", "🔥", "!", "", "", "", "🔥"]


def test_special_tokens_are_skipped_unless_asked_for(smollm2: Tokenizer) -> None:
    assert deltas(Detokenizer(smollm2), [1, 4093, 2]) == ["", "user", ""]
    shown = Detokenizer(smollm2, ["<|im_end|>"], skip_special_tokens=False)
    assert deltas(shown, [1, 4093, 2]) == ["<|im_start|>", "user", ""]
    assert shown.stopped == "<|im_end|>"


def test_ids_may_be_an_array(smollm2: Tokenizer) -> None:
    assert Detokenizer(smollm2).add(np.array(FIRE, np.int32)) == "café 🔥🔥!"


# Stop strings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "stop", "matched", "kept", "included"),
    [
        (" The user", " is a", ["a", "is"], "is", " The user ", " The user is"),
        (" The user", " is a", ["is", "a"], "is", " The user ", " The user is"),
        ("hello world", ".", ["."], ".", "hello world", "hello world."),
        ("hello", "", ["x"], None, "hello", "hello"),
        ("hello", " you", [], None, "hello you", "hello you"),
        ("foo STO", "P", ["STOP"], "STOP", "foo ", "foo STOP"),
        ("foo ST", "OPPED", ["STOP"], "STOP", "foo ", "foo STOP"),
        ("aX"[:1], "bXc", ["X"], "X", "ab", "abX"),
        ("a", "ab", ["aab", "ab", "b"], "aab", "", "aab"),
        ("a", "ab", ["b", "ab", "aab"], "b", "aa", "aab"),
        ("abab", "abac", ["ababac"], "ababac", "ab", "abababac"),
        ("aaa", "b", ["aab"], "aab", "a", "aaab"),
    ],
)
def test_which_stop_string_wins_and_where_the_text_ends(
    old: str, new: str, stop: list[str], matched: str | None, kept: str, included: str, tied: bool
) -> None:
    tokenizer = words("?", *dict.fromkeys([*old, *new]), old + " ", new + " ")
    ids = [tokenizer.backend.token_to_id(character) for character in old + new]
    steps = [ids[: len(old)], ids[len(old) :]] if tied else [[each] for each in ids]
    for include, text in ((False, kept), (True, included)):
        detokenizer = Detokenizer(tokenizer, stop, include_stop_str_in_output=include)
        parts = [detokenizer.add(step) for step in steps]
        assert detokenizer.stopped == matched
        assert "".join(parts) + detokenizer.flush() == detokenizer.text == text


@pytest.mark.parametrize(
    ("tokens", "stop", "expected", "matched"),
    [
        (["ab", "cS", "TO", "Px"], ["STOP"], ["ab", "c", "", ""], "STOP"),
        (["hello", " world"], [], ["hello", " world"], None),
        (["a", "b", "c", "d"], ["cd", "b"], ["a", "", "", ""], "b"),
        (["x", "yz"], ["yz"], ["x", ""], "yz"),
        (["S", "T", "S", "TO", "x"], ["STOP"], ["", "", "ST", "", "STOx"], None),
        (["<", "<", "/x", ">"], ["</x>", "<<"], ["", "", "", ""], "<<"),
    ],
)
def test_what_may_begin_a_stop_string_waits(
    tokens: list[str], stop: list[str], expected: list[str], matched: str | None
) -> None:
    unique = list(dict.fromkeys(tokens))
    detokenizer = Detokenizer(words(*unique), stop)
    assert deltas(detokenizer, [unique.index(token) for token in tokens]) == expected
    assert detokenizer.stopped == matched


def test_a_stop_string_that_is_kept_holds_nothing_back() -> None:
    detokenizer = Detokenizer(words("ab", "cS", "TO", "Px"), ["STOP"], include_stop_str_in_output=True)
    assert deltas(detokenizer, range(4)) == ["ab", "cS", "TO", "P"]
    assert detokenizer.text == "abcSTOP"


def test_text_waits_only_while_it_can_begin_a_stop_string(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2, ["</think>", "###"])
    assert deltas(detokenizer, [81, 278, 265, 287]) == ["a", " b", " c", " d"]
    assert deltas(detokenizer, [9617, 17400, 4528]) == ["", "", "</think London"]


def test_what_waits_is_not_lost(smollm2: Tokenizer) -> None:
    """Whether the end is a length, an abort or an end token."""
    for ids in ([35542, 48124], [35542, 48124, 2]):
        detokenizer = Detokenizer(smollm2, ["STOP!"])
        assert "".join(deltas(detokenizer, ids)) == "ABC"
        assert detokenizer.flush() == "STOP"
        assert (detokenizer.text, detokenizer.stopped) == ("ABCSTOP", None)
    detokenizer = Detokenizer(smollm2, ["STOP!"])
    assert deltas(detokenizer, [10813, 238]) == ["", ""]
    assert detokenizer.flush() == smollm2.backend.decode([10813, 238]) == "\ufffd"


def test_a_stop_string_in_half_characters() -> None:
    tokenizer = of_bytes("61f09f", "94a5", "62")
    detokenizer = Detokenizer(tokenizer, ["\ud83d\udd25"])
    assert deltas(detokenizer, [0, 1, 2]) == ["", "a", ""]
    assert detokenizer.stopped == "🔥"


def test_a_stop_string_before_half_a_character() -> None:
    """It is met at once, and the half character isn't waited for, nor is it part of the text."""
    detokenizer = Detokenizer(of_bytes("61", "5354f09f"), ["ST"])
    assert deltas(detokenizer, [0, 1]) == ["a", ""]
    assert (detokenizer.stopped, detokenizer.flush(), detokenizer.text) == ("ST", "", "a")


def test_a_stop_string_that_only_the_flush_completes() -> None:
    detokenizer = Detokenizer(of_bytes("61", "c3"), ["\ufffd"])
    assert deltas(detokenizer, [0, 1]) == ["a", ""]
    assert (detokenizer.flush(), detokenizer.stopped) == ("", "\ufffd")


def test_nothing_comes_after_the_end() -> None:
    for detokenizer in (Detokenizer(words("a", "STOP"), ["STOP"]), Detokenizer(words("a", "STOP"))):
        detokenizer.add([0, 1])
        detokenizer.flush()
        assert detokenizer.add([0]) == detokenizer.flush() == ""
        assert detokenizer.num_tokens == 2


@pytest.mark.parametrize(
    ("steps", "num_tokens", "num_text_tokens", "text"),
    [
        ([[0, 1, 2, 3]], 3, 1, "a"),
        ([[0], [1], [2], [3]], 3, 1, "a"),
        ([[0, 0], [1, 2, 3]], 4, 2, "aa"),
        ([[4, 2]], 2, 1, "xS"),
        ([[0, 5, 3]], 2, 2, "ab"),
        ([[5, 3]], 1, 1, "b"),
        ([[0, 1, 3]], 3, 3, "aSTb"),
    ],
)
def test_how_many_ids_belong_to_the_text(
    steps: list[list[int]], num_tokens: int, num_text_tokens: int, text: str
) -> None:
    detokenizer = Detokenizer(words("a", "ST", "OP", "b", "xSST", "bSTOPb"), ["STOP"])
    for step in steps:
        detokenizer.add(step)
    detokenizer.flush()
    assert (detokenizer.num_tokens, detokenizer.num_text_tokens, detokenizer.text) == (
        num_tokens,
        num_text_tokens,
        text,
    )


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """The rule, spelled out: the smallest end of any stop string in the text, then the place in the list."""
    ends = [(end, n) for end in range(len(text) + 1) for n, each in enumerate(stop) if text[:end].endswith(each)]
    return (min(ends)[0], stop[min(ends)[1]]) if ends else None


STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500)
@given(st.lists(st.text("ab<", max_size=3), max_size=8), STOPS, st.lists(st.integers(0, 8), max_size=4), st.booleans())
def test_stop_strings_against_the_rule(parts: list[str], stop: list[str], cuts: list[int], include: bool) -> None:
    """Texts of three letters: nearly every example holds a beginning of a stop string, about half a whole one."""
    unique = list(dict.fromkeys(["?", *(part for part in parts if part)]))
    ids = [unique.index(part) for part in parts if part]
    text = "".join(parts)
    found = first_stop(text, stop)
    expected = text if found is None else text[: found[0]] if include else text[: found[0] - len(found[1])]
    detokenizer = Detokenizer(words(*unique), stop, include_stop_str_in_output=include)
    seen = 0
    for step in cut(ids, [min(each, len(ids)) for each in cuts]):
        detokenizer.add(step)
        seen += sum(len(unique[each]) for each in step)
        if detokenizer.stopped is None and not include:
            tails = [n for each in stop for n in range(1, len(each)) if text[:seen].endswith(each[:n])]
            assert len(detokenizer.text) == seen - max(tails, default=0)  # as little waits as may
    detokenizer.flush()
    assert detokenizer.stopped == (None if found is None else found[1])
    assert detokenizer.text == expected


@settings(max_examples=200)
@given(ids=RANDOM_IDS, start=st.integers(0, 20), length=st.integers(1, 5), size=st.integers(1, 5))
def test_stop_strings_out_of_random_text(
    smollm2: Tokenizer, ids: list[int], start: int, length: int, size: int
) -> None:
    whole = smollm2.backend.decode(ids)
    stop = [whole[start : start + length], "never in it at all"]
    if not stop[0]:
        return
    end, _ = first_stop(whole, stop) or (0, "")
    detokenizer = Detokenizer(smollm2, stop)
    text = "".join(deltas(detokenizer, ids, size)) + detokenizer.flush()
    assert detokenizer.stopped == stop[0]
    assert text == whole[: end - len(stop[0])]
    assert smollm2.backend.decode(ids[: detokenizer.num_text_tokens]).startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("stop", [[], ["</think>", "###"], ["a" * 500]])
def test_the_price_of_a_token_doesnt_grow(smollm2: Tokenizer, stop: list[str]) -> None:
    """Ten times the tokens cost at most thirty times as much; a decoder that starts anew would need a hundred times."""
    ids = (FIRE + WATER + [35542, 238]) * 50

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            detokenizer, began = Detokenizer(smollm2, stop), time.perf_counter()
            for token_id in itertools.islice(itertools.cycle(ids), count):
                detokenizer.add([token_id])
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(20_000) < 30 * seconds(2_000)


def test_its_repr_is_short(smollm2: Tokenizer) -> None:
    assert len(repr(smollm2)) < 200
    assert len(json.dumps(repr(Detokenizer(smollm2)))) < 200
