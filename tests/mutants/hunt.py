"""Runs the tests against each mutant, in a process forked for it from one that has all tests loaded.

First every test runs once, so that its time and the functions that it calls are known. A mutant is met by the tests
that call its function: first those that killed another mutant of it, then the fastest, as many as fit into the seconds
that one mutant may take. It is dead at the first test that fails, or when they take far longer than they should.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TextIO

import pytest
from _pytest.runner import runtestprotocol
from attrs import define, field, frozen

from tests.mutants.operators import Mutant, mutants

SLOWER = 10.0  #: times as long as its tests should take, and a mutant's tests are cut off
GRACE = 10.0  #: seconds more than that
MEMORY = 12 << 30  #: bytes that a mutant may ask for


def mutants_of(package: str) -> Iterator[Mutant]:
    """Every mutant of every module of a package."""
    found = importlib.import_module(package)
    for path in sorted(Path(str(found.__file__)).parent.glob("*.py")):
        module = package if path.stem == "__init__" else f"{package}.{path.stem}"
        yield from mutants(path.read_text(), module)


def one_of_each(all_mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """One mutant of each operator in each function, drawn by the seed: the same as long as the function stays."""
    first: dict[tuple[str, str, str], Mutant] = {}
    for each in shuffled(all_mutants, seed):
        first.setdefault((each.module, each.function, each.operator), each)
    return sorted(first.values(), key=lambda each: (each.module, each.function, each.operator))


def shuffled(all_mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """The mutants in an order that hangs on the seed and on their names, not on which others there are."""
    return sorted(all_mutants, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest())


def function_of(mutant: Mutant) -> FunctionType:
    """The function that a mutant changes, under its decorators."""
    found: Any = importlib.import_module(mutant.module)
    for name in mutant.function.split("."):
        found = vars(found)[name] if isinstance(found, type) else getattr(found, name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return getattr(found, "__wrapped__", found)


@frozen
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    killer: str | None  #: the test that failed, or what else ended it; None if it lives
    num_met: int  #: tests that it was to meet
    num_calling: int  #: tests that call its function

    @property
    def lives(self) -> bool:
        return self.killer is None


@frozen
class Known:
    """What a test took and called, when it ran against the code as it is."""

    item: pytest.Item
    seconds: float
    calls: frozenset[CodeType]


@define
class Hunt:
    """A pytest plugin that, in place of running the tests, runs them against mutants."""

    chosen: Sequence[Mutant]
    say: Callable[[str], None]
    jobs: int = 2
    seconds: float = 20.0  #: of tests, against one mutant
    verdicts: list[Verdict] = field(factory=list)
    failed: list[str] = field(factory=list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        targets = {function_of(each).__code__ for each in self.chosen}
        known = [*self._recorded(session.items, frozenset(targets))]
        if not self.failed:
            self._hunt(known)
        return True

    def _recorded(self, items: Sequence[pytest.Item], targets: frozenset[CodeType]) -> Iterator[Known]:
        for number, item in enumerate(items):
            self.say(f"the tests as they are: {number} of {len(items)}")
            calls: set[CodeType] = set()

            def note(frame: Any, event: str, _arg: object, calls: set[CodeType] = calls) -> None:
                if event == "call":
                    calls.add(frame.f_code)

            start = time.perf_counter()
            sys.setprofile(note)
            try:
                reports = runtestprotocol(item, log=False, nextitem=items[(number + 1) % len(items)])
            finally:
                sys.setprofile(None)
            self.failed += [item.nodeid for report in reports if report.failed][:1]
            yield Known(item, time.perf_counter() - start, targets & calls)

    def _hunt(self, known: Sequence[Known]) -> None:
        killers: dict[CodeType, list[str]] = {}
        running: dict[int, tuple[Mutant, int, int, TextIO]] = {}
        todo = list(self.chosen)
        while todo or running:
            while todo and len(running) < self.jobs:
                mutant = todo.pop(0)
                code = function_of(mutant).__code__
                calling = [each for each in known if code in each.calls]
                tests = within(self.seconds, in_order(calling, killers.get(code, ())))
                pid, pipe = forked(mutant, tests)
                running[pid] = mutant, len(tests), len(calling), pipe
            pid, status = os.wait()
            mutant, num_met, num_calling, pipe = running.pop(pid)
            with pipe:
                killer = pipe.read() or None
            if os.WIFSIGNALED(status):
                what = signal.Signals(os.WTERMSIG(status))
                killer = "time" if what is signal.SIGALRM else what.name
            elif killer:
                killers.setdefault(function_of(mutant).__code__, []).append(killer)
            self.verdicts.append(Verdict(mutant, killer, num_met, num_calling))
            alive = sum(each.lives for each in self.verdicts)
            self.say(f"{len(self.verdicts)} of {len(self.chosen)} mutants, {alive} alive")


def in_order(tests: Iterable[Known], killers: Sequence[str]) -> list[Known]:
    """First the tests that killed another mutant of the function, then the fastest."""
    return sorted(tests, key=lambda each: (each.item.nodeid not in killers, each.seconds))


def within(seconds: float, tests: Sequence[Known]) -> list[Known]:
    """The first tests that take no more than so many seconds together, one at least."""
    taken = itertools.accumulate(each.seconds for each in tests)
    return [each for number, (each, end) in enumerate(zip(tests, taken, strict=True)) if not number or end <= seconds]


def forked(mutant: Mutant, tests: Sequence[Known]) -> tuple[int, TextIO]:
    """Starts the tests against a mutant: the process, and where it writes the name of the test that fails."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, os.fdopen(reader)
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GRACE + SLOWER * sum(each.seconds for each in tests))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        silence()
        function_of(mutant).__code__ = mutant.code
        os.write(writer, (first_failure([each.item for each in tests]) or "").encode())
    finally:
        os._exit(0)


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def first_failure(items: Sequence[pytest.Item]) -> str | None:
    """The first test that fails, run in order."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.session._setupstate.teardown_exact(item)
        with contextlib.suppress(pytest.skip.Exception):
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following or item)):
                return item.nodeid
    return None
