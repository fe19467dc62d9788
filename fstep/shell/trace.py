"""A run as a file: what was asked, what each step decided and made, and what came out.

A trace is lines of JSON. The first is the header: what the run stood on. Then comes a line for each call (`add`,
`abort`, `fork`, …) and each step: its schedule in full, a digest of every array that its phases made, and the tokens.
`fstep.shell.traced` writes and replays them; here they are read, and compared (I20).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
from attrs import frozen

from fstep.state import CacheKey, FstepError, Item, NewRequest, SamplingParams, Schedule

FORMAT = 1
PHASES = ("schedule", "prepare", "pad", "build_meta", "forward", "sample", "commit")
MACHINE = ("machine", "kernels", "threads", "torch", "numpy", "fstep")  #: of the header: equal, and bits are too

Line: TypeAlias = dict[str, Any]


class TraceError(FstepError, ValueError):
    """A file that is no trace, or a run that can't be replayed."""


@frozen
class Trace:
    """A trace that was read: its header, and its other lines in order."""

    header: Line
    lines: tuple[Line, ...]
    cut_off: bool = False  #: the last line was half written, and is left out

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Raises `TraceError`, naming the file and the line, for a file that is none; `OSError` if it can't be read."""
        raw = Path(path).read_bytes()
        lines = [_parsed(path, number, line) for number, line in enumerate(raw.split(b"\n")[:-1], 1)]
        if not lines or lines[0].get("fstep_trace") != FORMAT:
            found = f"format {lines[0]['fstep_trace']}" if lines and "fstep_trace" in lines[0] else "another file"
            raise TraceError(f"{path}: line 1: is no trace of format {FORMAT} ({found})")
        return cls(lines[0], tuple(lines[1:]), cut_off=not raw.endswith(b"\n"))

    @property
    def steps(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line["call"] == "step")

    @property
    def crash(self) -> Line | None:
        """The last line, if the run ended with an error in a step."""
        return self.lines[-1] if self.lines and self.lines[-1]["call"] == "crash" else None


@frozen
class Difference:
    """The first place in which two runs part."""

    step: int  #: counted from 0; of a call between two steps the one that follows
    phase: str  #: of `PHASES`, or the name of a call
    field: str
    left: object
    right: object

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}, {self.field}: {against(self.left, self.right)}"


def diff(left: Trace, right: Trace, level: str | None = None) -> Difference | None:
    """The first place in which two traces part; None if there is none. Of the headers see `header_differences`.

    `level` is what is compared: "bits", all; "tokens", schedules and tokens; None is what the two machines allow.
    """
    level, step = level or level_of(left.header, right.header), 0
    for a, b in zip(left.lines, right.lines, strict=False):
        if found := difference(a, b, step, level):
            return found
        step += a["call"] == "step"
    shorter = min(len(left.lines), len(right.lines))
    if len(left.lines) != len(right.lines):
        calls = [each.lines[shorter]["call"] if len(each.lines) > shorter else None for each in (left, right)]
        return Difference(step, str(calls[0] or calls[1]), "call", *calls)
    return None


def level_of(left: Line, right: Line) -> str:
    """What must be equal, going by two headers: "bits" on the same kind of machine, and "tokens" elsewhere."""
    return "bits" if all(left[name] == right[name] for name in MACHINE) else "tokens"


def difference(left: Line, right: Line, step: int, level: str) -> Difference | None:
    """Where two lines part, in the order of the phases."""
    return next((Difference(step, *each) for each in _differing(left, right, level)), None)


def header_differences(left: Trace, right: Trace) -> dict[str, tuple[object, object]]:
    """What two runs stood on, where it differs."""
    return {name: (a, b) for name, a, b in _unequal(left.header, right.header)}


def _differing(left: Line, right: Line, level: str) -> Iterator[tuple[str, str, object, object]]:
    """Phase, field and both values of all in which two lines differ."""
    if left["call"] != right["call"]:
        yield left["call"], "call", left["call"], right["call"]
    elif left["call"] != "step":
        yield from ((left["call"], *each) for each in _unequal(left, right))
    else:
        yield from (("schedule", *each) for each in _unequal(left["schedule"], right["schedule"]))
        for phase in PHASES[1:] if level == "bits" else ():
            yield from ((phase, *each) for each in _unequal(left["digests"][phase], right["digests"][phase]))
        mine, other = ({name: rest for name, *rest in line["events"]} for line in (left, right))
        yield from (("commit", f"events of {name!r}", a, b) for name, a, b in _unequal(mine, other))


def _unequal(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Name and both values of each difference; of a mapping in both, those inside it."""
    for name in (*left, *(name for name in right if name not in left)):
        a, b = left.get(name), right.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from ((f"{name}.{inner}", x, y) for inner, x, y in _unequal(cast(Line, a), cast(Line, b)))
        elif a != b:
            yield name, a, b


# Lines ---------------------------------------------------------------------------------------------------------------


def request_line(request: NewRequest) -> Line:
    """A request, for `request_of`."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "sampling": attrs.asdict(request.sampling),
        "cache_key": attrs.asdict(request.cache_key),
        "sample_index": request.sample_index,
        "priority": request.priority,
    }


def request_of(line: Line) -> NewRequest:
    key: Line = line["cache_key"]
    items: list[Line] = key["items"]
    key = {**key, "items": tuple(Item(**each) for each in items)}
    return NewRequest(
        line["request_id"],
        line["prompt_token_ids"],
        SamplingParams(**line["sampling"]),
        CacheKey(**key),
        sample_index=line["sample_index"],
        priority=line["priority"],
    )


def schedule_line(todo: Schedule) -> Line:
    """A schedule, every field of it."""
    return {
        "finished": [[each.request_id, str(each.reason)] for each in todo.finished],
        "preempted": list(todo.preempted),
        "resumed": [[each.request_id, each.num_computed_tokens] for each in todo.resumed],
        "new": [[each.request_id, each.num_computed_tokens] for each in todo.new],
        "request_ids": list(todo.request_ids),
        "num_scheduled_tokens": todo.num_scheduled_tokens.tolist(),
        "new_blocks": [[each[b].tolist() for b in range(len(each))] for each in todo.new_blocks],
        "copies": [each.tolist() for each in todo.copies],
    }


def _parsed(path: str | Path, number: int, raw: bytes) -> Line:
    try:
        line = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{path}: line {number}: is no line of a trace ({error})") from None
    if not isinstance(line, dict) or (number > 1 and "call" not in line):
        raise TraceError(f"{path}: line {number}: is no line of a trace")
    return cast(Line, line)


def against(left: object, right: object, width: int = 60) -> str:
    """Two values side by side; of long ones the part around the place where they part."""
    texts = repr(left), repr(right)
    same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    begin = max(same - width // 2, 0) if max(map(len, texts)) > width else 0
    return " against ".join(_cut(text, begin, width) for text in texts)


def _cut(text: str, begin: int, width: int) -> str:
    end = begin + width
    return "…" * (begin > 0) + text[begin:end] + "…" * (len(text) > end)
