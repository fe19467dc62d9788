"""`fstep trace`: shows a recorded run, replays it, or finds where two of them part."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from fstep.shell import Difference, Engine, Trace

Load: TypeAlias = "Callable[[Path, int | None, Mapping[str, Any]], Engine]"
Line: TypeAlias = dict[str, Any]

STANDS_ON = ("fstep", "machine", "kernels", "threads", "torch", "numpy", "model", "plan", "limits", "params")

SHOW = """
examples:
  fstep trace show run.jsonl            one line for each step
  fstep trace show run.jsonl --step 7   all of a step: its schedule, and a digest of each array
"""
REPLAY = """
The steps are compared bit for bit where kind of machine, kernels, threads and versions are those of the trace, and by
schedules and tokens elsewhere. Exit code 1: a step came out otherwise.
"""
DIFF = """
First comes what the runs stood on, where that differs. Runs of the same kind of machine, kernels, threads and versions
are compared bit for bit, others by schedules and tokens. Exit code 1: the runs part.
"""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """`show`, `replay` and `diff`, below `parser`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = _command(commands, "show", "what a run did, step by step", SHOW)
    show.add_argument("trace", type=Path, metavar="FILE")
    show.add_argument("--step", type=int, metavar="N", help="all of step N, counted from 0")
    show.set_defaults(run=_show)
    replay = _command(commands, "replay", "the run once more, and the first step that comes out otherwise", REPLAY)
    replay.add_argument("trace", type=Path, metavar="FILE")
    replay.add_argument("--model", type=Path, metavar="PATH", help="where the model lies (default: as the trace says)")
    replay.set_defaults(run=_replay)
    diff = _command(commands, "diff", "the first step, phase and field in which two runs part", DIFF)
    diff.add_argument("left", type=Path, metavar="FILE")
    diff.add_argument("right", type=Path, metavar="FILE")
    diff.add_argument("--tokens", action="store_true", help="compare schedules and tokens alone")
    diff.set_defaults(run=_diff)


def _command(commands: Any, name: str, about: str, more: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=about,
        description=f"Shows {about}.",
        epilog=more,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _show(args: argparse.Namespace, load: Load) -> int:  # noqa: ARG001 - as all commands
    from fstep.shell import Trace, TraceError

    trace = Trace.read(args.trace)
    number: int | None = args.step
    if number is not None:
        if not 0 <= number < len(trace.steps):
            raise TraceError(f"step: {number}: {args.trace} has {len(trace.steps)} steps, counted from 0")
        _say(_whole_step(trace.steps[number]))
        return 0
    _say(f"{name:<8} {trace.header[name]}" for name in STANDS_ON if name in trace.header)
    _say(map(_in_one_line, trace.lines))
    _say((_summary(trace),))
    return 0


def _replay(args: argparse.Namespace, load: Load) -> int:
    from fstep.shell import Trace, TraceError, replay

    trace = Trace.read(args.trace)
    model = args.model or trace.header.get("model")
    if not model or "settings" not in trace.header:
        raise TraceError(f"{args.trace}: wasn't written by an engine; replay it with fstep.shell.replay")
    engine = load(Path(model), trace.header["threads"], trace.header["settings"])
    found = replay(trace, engine.runner, progress=_progress if sys.stderr.isatty() else None)
    if found.difference:
        _say((str(found.difference),))
        return 1
    what = "bit for bit" if found.level == "bits" else "by schedules and tokens (the trace is from another machine)"
    _say((f"{found.steps} of {len(trace.steps)} steps are the same, {what}", *_how_it_ended(trace)))
    return 0


def _diff(args: argparse.Namespace, load: Load) -> int:  # noqa: ARG001 - as all commands
    from fstep.shell import Trace, diff, header_differences
    from fstep.shell.trace import against

    left, right = Trace.read(args.left), Trace.read(args.right)
    _say(f"{name}: {against(*pair)}" for name, pair in header_differences(left, right).items())
    found: Difference | None = diff(left, right, "tokens" if args.tokens else None)
    _say((str(found) if found else f"{len(left.steps)} steps are the same",))
    return int(found is not None)


# Words ---------------------------------------------------------------------------------------------------------------


def _in_one_line(line: Line) -> str:
    match line["call"]:
        case "step":
            return f"step {line['step']:>4}  {'; '.join(_step_parts(line))}"
        case "crash":
            return f"step {line['step']:>4}  {line['phase']} raised {line['error']}"
        case "add":
            return f"           add {line['request_id']}: {len(line['prompt_token_ids'])} prompt tokens"
        case call:
            return f"           {call} {', '.join(f'{name} {line[name]}' for name in line if name != 'call')}".rstrip()


def _step_parts(line: Line) -> Iterator[str]:
    todo = line["schedule"]
    counts = zip(todo["request_ids"], todo["num_scheduled_tokens"], strict=True)
    yield f"{sum(todo['num_scheduled_tokens'])} tokens" + _listed(" of ", (f"{name} {count}" for name, count in counts))
    parts = (
        ("new", (f"{name} ({cached} cached)" if cached else name for name, cached in todo["new"])),
        ("resumed", (name for name, _ in todo["resumed"])),
        ("preempted", todo["preempted"]),
        ("gave", (f"{name} {ids}" for name, ids, _ in line["events"] if ids)),
        ("ended", (f"{name} ({reason})" for name, _, reason in line["events"] if reason)),
    )
    yield from filter(None, (_listed(f"{verb} ", names) for verb, names in parts))


def _listed(verb: str, names: Any, most: int = 8) -> str:
    """The first few of the names."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return verb + ", ".join(found[:most]) + more if found else ""


def _whole_step(line: Line) -> Iterator[str]:
    yield f"step {line['step']}"
    yield "schedule"
    yield from (f"  {name:<24} {value}" for name, value in line["schedule"].items())
    for phase, digests in line["digests"].items():
        yield phase
        yield from (f"  {name:<24} {value}" for name, value in digests.items())
    yield "events"
    yield from (f"  {name:<24} {ids}{f' {reason}' if reason else ''}" for name, ids, reason in line["events"])


def _summary(trace: Trace) -> str:
    tokens = sum(len(ids) for line in trace.steps for _, ids, _ in line["events"])
    requests = sum(line["call"] == "add" for line in trace.lines)
    return "\n".join((f"{len(trace.steps)} steps, {requests} requests, {tokens} output tokens", *_how_it_ended(trace)))


def _how_it_ended(trace: Trace) -> Sequence[str]:
    crash = trace.crash
    ended = [f"it ended in step {crash['step']}: {crash['phase']} raised {crash['error']}"] if crash else []
    return ended + ["the last line was cut off"] * trace.cut_off


def _progress(steps: int, of: int) -> None:
    sys.stderr.write(f"\r\x1b[K{steps} of {of} steps" if steps < of else "\r\x1b[K")
    sys.stderr.flush()


def _say(lines: Any) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
