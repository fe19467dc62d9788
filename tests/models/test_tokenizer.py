"""Tokenizers of folders, BOS around texts and chats, and text that isn't well-formed."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from fstep.models.tokenizer import Tokenizer, tokenizer_from_folder, well_formed
from fstep.state import CheckpointError

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "▁Hello": 4, "▁world": 5, "▁a": 6}


def characters(bos: bool = False) -> Backend:
    """Every ASCII character, "é", "🔥" and U+FFFD is a token; `bos` puts <s> in front."""
    tokens = ["<s>", "</s>", *map(chr, range(32, 127)), "é", "🔥", "\ufffd"]
    backend = Backend(models.BPE({token: id_ for id_, token in enumerate(tokens)}, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece() -> Backend:
    backend = Backend(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def write_folder(folder: Path, backend: Backend, **fields: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if fields:
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path) -> Tokenizer:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    return tokenizer


# Text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("ok", "ok"),
        ("\ud83d", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\ud83d\udd25", "🔥"),
        ("\udd25\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\udd25é", "\ufffd🔥é"),
        ("🔥é\x00", "🔥é\x00"),
    ],
)
def test_half_characters(text: str, repaired: str) -> None:
    assert well_formed(text) == repaired
    tokenizer = Tokenizer(characters(), chat_template=CHAT)
    assert tokenizer.decode(tokenizer.encode("<" + text + ">")) == "<" + repaired.replace("\x00", "") + ">"
    assert tokenizer.apply_chat_template([{"role": "user", "content": text}]) == f"[user]{repaired}"


@given(st.text(st.characters()))
def test_well_formed_text_stays_and_any_text_becomes_it(text: str) -> None:
    repaired = well_formed(text)
    assert repaired.encode().decode() == repaired == well_formed(repaired)
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert repaired == text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([4, 5, 6], "Hello world a"),
        ([3, 4, 6], " Hello a"),
        ([3, 3, 6], "  a"),
        ([3, 4], " Hello"),
        ([1, 4, 2], "Hello"),
        ([], ""),
        ([7, -1, 4, 2**31 - 1], "Hello"),
    ],
)
def test_sentencepiece_takes_one_blank(ids: list[int], text: str) -> None:
    assert Tokenizer(sentencepiece()).decode(ids) == text


def test_special_tokens_on_demand() -> None:
    tokenizer = Tokenizer(sentencepiece())
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([1, 4, 2], skip_special_tokens=False) == "<s> Hello</s>"


# BOS ----------------------------------------------------------------------------------------------------------------


def test_one_bos_whoever_writes_it() -> None:
    tokenizer = Tokenizer(characters(bos=True), bos_token="<s>", chat_template=CHAT)
    chat = tokenizer.encode_chat(HI)
    assert (chat[0], chat.count(0)) == (0, 1)
    assert tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special_tokens=False)]
    without = Tokenizer(characters(bos=True), bos_token="<s>", chat_template=CHAT.removeprefix("{{ bos_token }}"))
    assert without.encode_chat(HI) == chat[1:]


def test_special_tokens_that_a_text_spells_out() -> None:
    tokenizer = Tokenizer(characters(bos=True))
    assert tokenizer.encode("a</s>") == [0, 67, 1]
    split = tokenizer.encode("a</s>", split_special_tokens=True)
    assert split[0] == 0
    assert tokenizer.decode(split) == "a</s>"
    assert 1 not in split
    assert tokenizer.encode("a</s>") == [0, 67, 1]  # the other way leaves no trace


def test_a_generation_prompt_on_demand() -> None:
    template = "{% if add_generation_prompt %}yes{% else %}no{% endif %}"
    tokenizer = Tokenizer(characters(), chat_template=template)
    assert [tokenizer.apply_chat_template(HI, each) for each in (True, False)] == ["yes", "no"]


def test_without_a_chat_template() -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        Tokenizer(characters()).encode_chat(HI)


# Folders ------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None


def test_a_folder_with_everything(tmp_path: Path) -> None:
    eos = {"content": "</s>", "lstrip": False, "__type": "AddedToken"}
    folder = write_folder(tmp_path, characters(bos=True), bos_token="<s>", eos_token=eos, chat_template=CHAT)
    tokenizer = read(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size) == ("<s>", "</s>", 100)
    assert tokenizer.encode("hi") == [0, 74, 75]
    assert tokenizer.apply_chat_template(HI) == "<s>[user]hi"
    assert tokenizer.pieces.strip == ""


def test_settings_of_a_training_run_are_dropped(tmp_path: Path) -> None:
    backend = characters()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = read(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_special_tokens_of_an_older_file(tmp_path: Path) -> None:
    write_folder(tmp_path, characters())
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    assert (read(tmp_path).bos_token, read(tmp_path).eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("in_json", "asked"), [(True, True), (False, True), (True, None), (False, None), (False, False)]
)
def test_bos_of_a_folder(tmp_path: Path, in_json: bool, asked: bool | None) -> None:
    fields = {} if asked is None else {"add_bos_token": asked}
    tokenizer = read(write_folder(tmp_path, characters(bos=in_json), bos_token="<s>", **fields))
    assert tokenizer.encode("hi") == [0] * (in_json or bool(asked)) + [74, 75]


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    write_folder(tmp_path, characters(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}\n")
    assert read(tmp_path).apply_chat_template(HI) == "new hi"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert read(write_folder(tmp_path, characters(), chat_template=several)).apply_chat_template(HI) == "plain"


def test_ids_and_text_equal_transformers(transformers: Any, tmp_path: Path) -> None:
    """A byte-level tokenizer as Llama 3 has it: BOS from the post-processor, special tokens, a defined token."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    from tokenizers.trainers import BpeTrainer

    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the end"] * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT,
    }
    ours = read(write_folder(tmp_path, backend, **fields))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "the cat", " the  mat\n", "café 🔥", "<tool>x</s> y", "e\u0301"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.apply_chat_template(HI) == theirs.apply_chat_template(HI, tokenize=False)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json: isn't a tokenizer"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json: isn't a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template=3"),
        ("tokenizer_config.json", '{"bos_token": "<s>", "add_bos_token": "yes"}', "add_bos_token='yes'"),
        ("special_tokens_map.json", "no", "special_tokens_map.json"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: isn't UTF-8"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    write_folder(tmp_path, characters())
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        tokenizer_from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_decoder_that_doesnt_work_token_by_token(tmp_path: Path) -> None:
    backend = characters()
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="CTC") as caught:
        tokenizer_from_folder(write_folder(tmp_path, backend))
    assert "tokenizer.json" in str(caught.value)
