"""Faults of text: most of them are held by `tests/shell/test_detokenizer.py` and `tests/models/test_tokenizer.py`."""

import pytest

from fstep.models.gguf_file import GGUFFile
from fstep.models.gguf_tokenizer import tokenizer_from_gguf
from fstep.models.hf_config import Fields
from fstep.shell.detokenizer import Detokenizer
from tests.models.gguf_files import default_model


@pytest.fixture(scope="module")
def smollm2():
    return tokenizer_from_gguf(Fields("default", GGUFFile.open(default_model()).metadata))


def test_c100_a_character_cut_in_tokens_waits_for_its_last(smollm2):
    ids = [83, 1939, 2756, 15107, 238, 115, 10813, 238, 115, 17]
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.add([each]) for each in ids] == ["c", "af", "é", "", "", " 🔥", "", "", "🔥", "!"]


def test_c102_nothing_is_sent_twice_wherever_the_request_ends(smollm2):
    ids = [50, 17097, 125, 129, 81, 178, 219, 121, 83]
    for end in range(len(ids) + 1):
        detokenizer = Detokenizer(smollm2)
        deltas = [detokenizer.add([each]) for each in ids[:end]] + [detokenizer.flush()]
        assert "".join(deltas) == smollm2.backend.decode(ids[:end])


def test_c104_byte_level_text_keeps_its_first_blank(smollm2):
    for ids, text in (([4528], " London"), ([1315, 2863], " New York"), ([216, 253], "  a")):
        detokenizer = Detokenizer(smollm2)
        assert "".join(detokenizer.add([each]) for each in ids) == text


@pytest.mark.parametrize(("ids", "text"), [([35542, 48124], "ABCSTOP"), ([10813, 238], "\ufffd")])
def test_c108_what_was_held_comes_out_at_the_end(smollm2, ids, text):
    detokenizer = Detokenizer(smollm2, ["STOP!"])
    deltas = [detokenizer.add([each]) for each in ids]
    assert "".join(deltas) != text
    assert "".join(deltas) + detokenizer.flush() == text == smollm2.backend.decode(ids)


def test_c109_only_what_may_begin_a_stop_string_is_held(smollm2):
    detokenizer = Detokenizer(smollm2, ["</think>", "###"])
    deltas = [detokenizer.add([each]) for each in (81, 278, 265, 287, 9617, 17400, 4528)]
    assert deltas == ["a", " b", " c", " d", "", "", "</think London"]


def test_c152_a_turn_that_is_appended_equals_the_whole_conversation(smollm2):
    """`extend` gets the ids that the template has between the turns; the newline after the end token is one of them."""
    first = [{"role": "user", "content": "hi"}]
    whole = [*first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "bye"}]
    before, after = smollm2.encode_chat(first), smollm2.encode_chat(whole)
    answer = [*smollm2.encode("ok", add_special_tokens=False), 2]  # <|im_end|>, which ends the turn
    assert after[: len(before) + len(answer)] == before + answer
    assert after[len(before) + len(answer) :][:3] == [198, 1, 4093]
