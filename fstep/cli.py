"""The command line: `fstep generate` answers many prompts at once; `fstep trace` looks at runs (`fstep.cli_trace`).

Torch and what reads a model are imported when the arguments are known to be good, so that a help text or a slip of
the fingers costs no time. Exit codes: 0 all prompts were answered, 1 some failed or two runs part, 2 nothing was done
(usage, a file, a setting, the checkpoint), 130 Ctrl-C, 141 the reader of standard output went away.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import enum
import io
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TextIO, TypeAlias, get_type_hints

import attrs
from attrs import frozen

from fstep import __version__, cli_trace
from fstep.models.demo import demo_model
from fstep.ops.checks import LEVELS
from fstep.state import (
    CacheConfig,
    CheckpointError,
    ConfigError,
    FinishReason,
    FstepError,
    RequestError,
    SamplingParams,
    SchedLimits,
)

if TYPE_CHECKING:
    from fstep.shell import Engine, RequestOutput

INTERRUPTED, BROKEN_PIPE = 130, 141  #: as a shell reports a program that SIGINT or SIGPIPE ended

Load: TypeAlias = "Callable[[Path, int | None, Mapping[str, Any]], Engine]"


def main(argv: Sequence[str] | None = None, load: Load | None = None) -> int:
    """Runs the command line `argv` and returns its exit code.

    `load` opens a model from its path, the CPU threads to use and the engine's settings; None is
    `Engine.from_pretrained`.
    """
    args = _parser().parse_args(argv)
    _never_raise_on(sys.stdout)
    try:
        code = args.run(args, load or _load)
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (FstepError, OSError) as error:
        sys.stderr.write(f"fstep: error: {_clean(str(error))}\n")
        code = 2
    if code in (BROKEN_PIPE, 2):
        _let_go_of(sys.stdout)
    return code


def _generate(args: argparse.Namespace, load: Load) -> int:
    """`fstep generate`."""
    entries = _entries(args)
    limits, cache = _given(args, SchedLimits), _given(args, CacheConfig)
    for cls, given in ((SchedLimits, limits), (CacheConfig, cache)):
        cls(**given)  # raises before torch and the model are loaded
    more = {name: given for name in ("check", "trace") if (given := getattr(args, name))}
    engine = load(args.model or demo_model(), args.threads, limits | cache | more)
    with _view(args, entries) as view, _interrupts() as interrupted:
        run = _Run(engine, view, entries, args.chat)
        code = run.to_its_end(interrupted)
    sys.stderr.write(f"{_figures(engine)}\n")
    return code


# The options --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fstep: error: {_clean(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fstep", description="The LLM inference step as pure functions.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fstep {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate = commands.add_parser(
        "generate", help="answer prompts, all at once", description="Answers all prompts at once.", allow_abbrev=False
    )
    _add_inputs(generate)
    _add_outputs(generate)
    _add_fields(generate.add_argument_group("sampling (a line of a .jsonl file goes before these)"), SamplingParams)
    engine = generate.add_argument_group("engine")
    _add_fields(engine, SchedLimits)
    _add_fields(engine, CacheConfig)
    about = "what is checked of each step before it runs (default: cheap)"
    engine.add_argument("--check", choices=tuple(LEVELS), help=about)
    engine.add_argument("--threads", type=_whole, metavar="N", help="CPU threads (default: torch's choice)")
    about = "write the run to a file, line by line; fstep trace shows, replays and compares it"
    engine.add_argument("--trace", type=Path, metavar="PATH", help=about)
    generate.set_defaults(run=_generate)
    about = "show, replay or compare runs that were written with --trace"
    cli_trace.add_commands(commands.add_parser("trace", help=about, description=f"{about.capitalize()}."))
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="more prompts, one a line; a line of a .jsonl file is an object with prompt or prompt_token_ids and, if "
        "wanted, request_id and sampling parameters. A bad line fails alone",
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file or a Hugging Face folder")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message to the chat template")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line, in the order of the prompts")
    parser.add_argument("--stream", action="store_true", help="show all answers as they grow, on no terminal too")
    parser.add_argument("--progress", action="store_true", help="progress on standard error, on no terminal too")


def _add_fields(group: argparse._ArgumentGroup, cls: type[attrs.AttrsInstance]) -> None:  # pyright: ignore[reportPrivateUsage]
    hints = get_type_hints(cls)
    for each in attrs.fields(cls):
        about = each.metadata["help"]
        if each.default is not None and each.default != () and each.default is not False:
            about += f" (default: {each.default})"
        kind = _kind(hints[each.name], each.default)
        group.add_argument(_flag(each.name), default=argparse.SUPPRESS, help=about, **kind)


def _kind(hint: Any, default: Any) -> dict[str, Any]:
    """How an option reads a field of that type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction if default else "store_true"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"choices": [each.value for each in hint]}
    if hint is float:
        return {"type": float, "metavar": "X"}
    if hint == tuple[str, ...]:
        return {"action": "append", "metavar": "TEXT"}
    if hint == tuple[int, ...]:
        return {"action": "append", "type": int, "metavar": "N"}
    return {"type": int, "metavar": "N"}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def _given(args: argparse.Namespace, cls: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """The fields of `cls` that the user set."""
    return {each.name: getattr(args, each.name) for each in attrs.fields(cls) if hasattr(args, each.name)}


# The model ----------------------------------------------------------------------------------------------------------


def _load(path: Path, threads: int | None, settings: Mapping[str, Any]) -> Engine:
    try:
        import torch

        from fstep.shell import Engine

        if threads is not None:
            torch.set_num_threads(threads)
        return Engine.from_pretrained(path, **settings)
    except ModuleNotFoundError as error:
        if (error.name or "fstep").startswith("fstep"):
            raise
        raise CheckpointError(f"{path}: {error.name} is needed to read it: pip install 'fstep[hf]'") from error


# The prompts --------------------------------------------------------------------------------------------------------


@frozen
class Ask:
    """A prompt as the user gave it, with its own sampling parameters."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[Any] | None  #: not checked yet
    sampling: SamplingParams


@frozen
class Answer:
    """What came of a prompt. The fields are the keys of `--json`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason = FinishReason.ERROR
    error: str | None = None


Fields: TypeAlias = dict[str, Any]
OWN_FIELDS = ("prompt", "prompt_token_ids", "request_id")


def _entries(args: argparse.Namespace) -> list[Ask | Answer]:
    """All prompts in their order; one that can't be asked is answered already, with its error."""
    found: list[Fields | RequestError] = [{"prompt": prompt} for prompt in args.prompts]
    if args.file is not None:
        found += _read_lines(args.file)
    if not found:
        nothing = "holds no prompts" if args.file else "give a prompt, or a file of prompts with --file"
        raise ConfigError("file", str(args.file), nothing) if args.file else ConfigError("prompts", [], nothing)
    sampling = SamplingParams(**_given(args, SamplingParams))
    ids = _request_ids(found)
    return [_entry(fields, request_id, sampling) for fields, request_id in zip(found, ids, strict=True)]


def _read_lines(path: Path) -> Iterator[Fields | RequestError]:
    """The fields of each line. Blank lines count, so that line n is prompt n, but not those at the end."""
    read = _read_object if path.suffix == ".jsonl" else _read_text
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            yield read(f"{path.name}:{number}", line)
        except RequestError as error:
            yield error


def _read_text(where: str, line: bytes) -> Fields:
    try:
        return {"prompt": line.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        raise RequestError(where, line, f"must be UTF-8 ({error.reason} at byte {error.start})") from error


def _read_object(where: str, line: bytes) -> Fields:
    text = _read_text(where, line)["prompt"]
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(where, text, f"must be a JSON object ({error})") from error
    if not isinstance(fields, dict):
        raise RequestError(where, text, "must be a JSON object")
    return {str(name): value for name, value in fields.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _request_ids(found: Iterable[Fields | RequestError]) -> Iterator[str]:
    """The id that each request asks for, or its number if that is nobody's id."""
    asked = [fields.get("request_id") if isinstance(fields, dict) else None for fields in found]
    taken = {each for each in asked if isinstance(each, str)}
    for number, each in enumerate(asked):
        name = each if isinstance(each, str) else str(number)
        while name in taken and name is not each:
            name += "_"
        yield name


def _entry(fields: Fields | RequestError, request_id: str, sampling: SamplingParams) -> Ask | Answer:
    if isinstance(fields, RequestError):
        return Answer(request_id, None, error=str(fields.of(request_id)))
    prompt = fields.get("prompt")
    try:
        return _ask(fields, request_id, sampling)
    except RequestError as error:
        return Answer(request_id, prompt if isinstance(prompt, str) else None, error=str(error.of(request_id)))


def _ask(fields: Fields, request_id: str, sampling: SamplingParams) -> Ask:
    _check_names(fields)
    prompt, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (prompt is None) == (token_ids is None):
        raise RequestError("prompt", prompt, "give prompt or prompt_token_ids, one of the two")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise RequestError("prompt", prompt, "must be text that is not empty")
    if token_ids is not None and not isinstance(token_ids, list):
        raise RequestError("prompt_token_ids", token_ids, "must be a list of token ids")
    own = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    return Ask(request_id, prompt, fields.get("prompt_token_ids"), attrs.evolve(sampling, **own))


def _check_names(fields: Fields) -> None:
    known = (*OWN_FIELDS, *(each.name for each in attrs.fields(SamplingParams)))
    for name, value in fields.items():
        if name not in known:
            raise RequestError(name, value, f"is no field of a request; these are: {', '.join(known)}")
    if not isinstance(fields.get("request_id"), str | None):
        raise RequestError("request_id", fields["request_id"], "must be text")


# The run ------------------------------------------------------------------------------------------------------------


class _Run:
    """Gives the prompts to the engine, and its answers to the view in the order of the prompts."""

    def __init__(self, engine: Engine, view: _View, entries: Sequence[Ask | Answer], chat: bool) -> None:
        self._engine, self._view, self._entries, self._chat = engine, view, entries, chat
        self._open: dict[str, int] = {}  # where in `entries` the requests are that have not ended
        self._latest: dict[str, RequestOutput] = {}
        self._answers: dict[int, Answer] = {}  # those that wait for one before them
        self._next = 0
        self._done = 0
        self._failed = 0

    def to_its_end(self, interrupted: Callable[[], bool]) -> int:
        """Until all is answered, or Ctrl-C. Returns the exit code."""
        try:
            self._admit(interrupted)
            while self._engine.has_unfinished():
                self._step()
                if interrupted():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._end(FinishReason.ABORT)
            return INTERRUPTED
        except OSError:  # of the view: nobody reads what else there is to say
            raise
        except Exception as error:
            self._end(FinishReason.ERROR, _clean(str(error)))
            if not isinstance(error, FstepError):
                raise
        return 1 if self._failed else 0

    def _admit(self, interrupted: Callable[[], bool]) -> None:
        for index, entry in enumerate(self._entries):
            if interrupted():
                raise KeyboardInterrupt
            if isinstance(entry, Answer):
                self._put(index, entry)
            else:
                self._add(index, entry)

    def _add(self, index: int, ask: Ask) -> None:
        try:
            prompt, special = self._prompt(ask)
            self._engine.add(prompt, ask.sampling, request_id=ask.request_id, add_special_tokens=special)
        except FstepError as error:
            self._put(index, Answer(ask.request_id, ask.prompt, error=str(error)))
        else:
            self._open[ask.request_id] = index

    def _prompt(self, ask: Ask) -> tuple[str | list[Any], bool]:
        """What the engine gets, and whether it adds BOS; a chat template has done so itself. Ids stay as they are."""
        if ask.prompt_token_ids is not None:
            return ask.prompt_token_ids, False
        prompt = ask.prompt or ""
        if not self._chat:
            return prompt, True
        if self._engine.tokenizer is None:
            raise RequestError("prompt", prompt, "the checkpoint has no tokenizer", ask.request_id)
        return self._engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]), False

    def _step(self) -> None:
        for output in self._engine.step():
            index = self._open[output.request_id]
            self._latest[output.request_id] = output
            self._view.grow(index, output.text, output.finish_reason)
            if output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason, output.error)
        self._view.progress(lambda: f"{self._done} of {len(self._entries)} done, {_rate(self._engine)}")

    def _finish(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        index = self._open.pop(request_id)
        prompt = self._entries[index].prompt
        if (output := self._latest.pop(request_id, None)) is None:
            answer = Answer(request_id, prompt, finish_reason=reason, error=error)
        else:
            ids = (output.prompt_token_ids, output.token_ids)
            answer = Answer(request_id, prompt, *ids, output.text, reason, error)
        self._put(index, answer)

    def _put(self, index: int, answer: Answer) -> None:
        self._answers[index] = answer
        self._done += 1
        self._failed += answer.error is not None
        while (ready := self._answers.pop(self._next, None)) is not None:
            self._view.answer(self._next, ready)
            self._next += 1

    def _end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends what has not ended, with what it has so far."""
        for request_id in tuple(self._open):
            with contextlib.suppress(FstepError):  # the engine may be what broke; then the last output stands
                if (output := self._engine.abort(request_id)) is not None:
                    self._latest[request_id] = output
            self._finish(request_id, reason, error)
        for index in range(self._next, len(self._entries)):  # never admitted
            entry = self._entries[index]
            unasked = Answer(entry.request_id, entry.prompt, finish_reason=reason, error=error)
            self._put(index, entry if isinstance(entry, Answer) else unasked)


@contextlib.contextmanager
def _interrupts() -> Generator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, to be asked between two steps; pressed once more it interrupts at once."""
    asked = threading.Event()

    def note(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    here = threading.current_thread() is threading.main_thread()
    ours = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _rate(engine: Engine) -> str:
    figures = engine.figures
    rate = figures.output_tokens / figures.seconds if figures.seconds > 0 else 0.0
    return f"{figures.output_tokens} output tokens, {rate:.1f} tokens/s"


def _figures(engine: Engine) -> str:
    """The closing line."""
    figures = engine.figures
    blocks = f"KV blocks {figures.peak_blocks} / {figures.num_blocks}"
    return f"{figures.prompt_tokens} prompt tokens, {_rate(engine)}, {figures.steps} steps, {blocks}"


# The views ----------------------------------------------------------------------------------------------------------


class _View(Protocol):
    """Where the answers are shown."""

    def __enter__(self) -> _View: ...
    def __exit__(self, *_: object) -> None: ...
    def grow(self, index: int, text: str, reason: FinishReason | None) -> None:
        """Prompt `index` has this text so far, and has ended if there is a reason."""
        ...

    def answer(self, index: int, answer: Answer) -> None:
        """Comes once for each prompt, in their order."""
        ...

    def progress(self, line: Callable[[], str]) -> None:
        """A step is done; `line` says where things stand."""
        ...


def _view(args: argparse.Namespace, entries: Sequence[Ask | Answer]) -> _View:
    progress = _Progress(sys.stderr, args.progress)
    if args.json:
        return _JsonView(progress)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and find_spec("rich"):
        return _LiveView(entries)
    return _StreamView(progress, entries) if args.stream else _TextView(progress)


class _Progress:
    """A line on `stream` that is written over again and again; without a terminal, a new line every two seconds."""

    def __init__(self, stream: TextIO, wanted: bool) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._every = 0.1 if self._terminal else 2.0
        self._next = time.monotonic() + self._every if self._terminal or wanted else float("inf")
        self._open = False

    def show(self, line: Callable[[], str]) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._every
            self._stream.write(f"\r\x1b[K{line()}" if self._terminal else f"{line()}\n")
            self._stream.flush()
            self._open = self._terminal

    def clear(self) -> None:
        if self._open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._open = False


class _TextView:
    """The texts alone, one after the other; errors go to standard error in their place."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def __enter__(self) -> _TextView:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.clear()

    def grow(self, index: int, text: str, reason: FinishReason | None) -> None:
        """Shows nothing yet."""

    def answer(self, index: int, answer: Answer) -> None:
        if answer.error is not None:
            self._complain(answer.error)
        elif answer.finish_reason is not FinishReason.ABORT:
            self._say(answer.text)

    def progress(self, line: Callable[[], str]) -> None:
        self._progress.show(line)

    def _say(self, text: str) -> None:
        self._progress.clear()
        sys.stdout.write(f"{_shown(text, sys.stdout)}\n")
        sys.stdout.flush()

    def _complain(self, error: str) -> None:
        self._progress.clear()
        sys.stderr.write(f"fstep: error: {_clean(error)}\n")


class _JsonView(_TextView):
    """One object a line."""

    def answer(self, index: int, answer: Answer) -> None:
        self._progress.clear()
        fields = {each.name: getattr(answer, each.name) for each in attrs.fields(Answer)}
        fields |= {name: _clean(value) for name, value in fields.items() if isinstance(value, str)}
        sys.stdout.write(json.dumps(fields, ensure_ascii=not _utf8(sys.stdout)) + "\n")
        sys.stdout.flush()


class _StreamView(_TextView):
    """All texts as they grow, in whole lines, each with the number of its prompt before it."""

    WIDTH = 88

    def __init__(self, progress: _Progress, entries: Sequence[Ask | Answer]) -> None:
        super().__init__(progress)
        self._entries = entries
        self._said = [0] * len(entries)  # characters

    def __enter__(self) -> _StreamView:
        for index, entry in enumerate(self._entries):
            self._say(f"[{index}] > {_title(entry, self.WIDTH)}")
        return self

    def grow(self, index: int, text: str, reason: FinishReason | None) -> None:
        lines, rest = _whole_lines(text[self._said[index] :], self.WIDTH)
        for line in lines:
            self._say(f"[{index}] {line}".rstrip())
        self._said[index] = len(text) - len(rest)
        if reason is not None:
            self._say(" ".join(filter(None, (f"[{index}]", rest.rstrip(), f"({reason})"))))
            self._said[index] = -1

    def answer(self, index: int, answer: Answer) -> None:
        if answer.error is not None:
            self._complain(answer.error)
        elif self._said[index] >= 0:  # it ended between two steps
            self.grow(index, answer.text, answer.finish_reason)


def _whole_lines(text: str, width: int) -> tuple[list[str], str]:
    """The lines of `text` that are complete, none wider than `width`, and the rest."""
    *lines, last = text.split("\n")
    *begun, rest = _cut(last, width)
    return [piece for line in lines for piece in _cut(line, width)] + begun, rest


def _cut(line: str, width: int) -> list[str]:
    """Pieces of `line` of at most `width` characters, cut at blanks where there are any."""
    pieces: list[str] = []
    while len(line) > width:
        blank = line.rfind(" ", 1, width + 1)
        end = blank if blank > 0 else width
        pieces.append(line[:end])
        line = line[end:].removeprefix(" ")
    return [*pieces, line]


class _LiveView:
    """A terminal: finished answers, and below them all that still grow, redrawn in place, and the progress."""

    def __init__(self, entries: Sequence[Ask | Answer]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._entries = entries
        self._growing: dict[int, str] = {}
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._next = 0.0

    def __enter__(self) -> _LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()

    def grow(self, index: int, text: str, reason: FinishReason | None) -> None:
        self._growing[index] = text

    def answer(self, index: int, answer: Answer) -> None:
        from rich.text import Text

        self._growing.pop(index, None)
        self._console.print(Text(self._title(index), "bold cyan"))
        if answer.error is not None:
            self._console.print(Text(_shown(answer.error, sys.stdout), "red"))
        else:
            self._console.print(Text(_shown(answer.text, sys.stdout).rstrip()), end="\n\n")

    def progress(self, line: Callable[[], str]) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + 0.05
            self._live.update(self._picture(line()), refresh=True)

    def _picture(self, line: str) -> Any:
        """As many growing answers as fit, each with its last lines."""
        from rich.console import Group
        from rich.text import Text

        width, height = self._console.size
        fit = max((height - 2) // 2, 1)
        shown = sorted(self._growing.items())[:fit]
        tail = max((height - 2) // max(len(shown), 1) - 1, 1)
        picture: list[Text] = []
        for index, text in shown:
            lines = Text(_shown(text, sys.stdout)).wrap(self._console, width)
            picture += (Text(self._title(index), "bold cyan"), *lines[-tail:])
        return Group(*picture, Text(line, "dim"))

    def _title(self, index: int) -> str:
        return f"[{index}] {_title(self._entries[index], max(self._console.width - 8, 16))}"


def _title(entry: Ask | Answer, width: int) -> str:
    """The prompt in one line."""
    if entry.prompt is None:
        return f"request {entry.request_id}"
    return textwrap.shorten(_shown(entry.prompt, sys.stdout), width, placeholder=" …") or repr(entry.prompt)


# Text that can be written anywhere ----------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """`text` with lone surrogates as U+FFFD and split pairs as their character, so that it can be encoded."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shown(text: str, stream: TextIO) -> str:
    """`text` for `stream`: a terminal gets no control characters from a model."""
    text = _clean(text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text) if stream.isatty() else text


def _utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def _never_raise_on(stream: TextIO) -> None:
    """What the encoding of `stream` lacks is written as a question mark."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def _let_go_of(stream: TextIO) -> None:
    """Points a stream that can't be written to any more at nothing, so that the interpreter's last flush is quiet."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
