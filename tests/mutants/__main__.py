"""`python -m tests.mutants`: which faults in `fstep.ops` the tests would not notice."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.mutants.hunt import Hunt, Verdict, mutants_of, one_of_each, shuffled

PACKAGE = "fstep.ops"
TESTS = ("ops", "cases", "state", "interop", "peers/test_vectors.py", "testing", "properties", "shell")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
MOST = 0.02  #: of the mutants that are not equivalent may live


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    everything = list(mutants_of(PACKAGE))
    reasons: dict[str, str] = tomllib.loads(EQUIVALENT.read_text())
    strange = reasons.keys() - {each.name for each in everything}
    chosen = everything if options.every else one_of_each(everything, options.seed)
    chosen = [each for each in chosen if options.only in each.name]
    if options.sample:
        chosen = shuffled((each for each in chosen if each.name not in reasons), options.seed)[: options.sample]
    if options.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    start = time.monotonic()
    hunt = Hunt(chosen, said(options.quiet), options.jobs, options.seconds)
    root = Path(__file__).parents[1]
    tests = options.tests or [str(root / each) for each in TESTS]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = pytest.main(["--hypothesis-profile=mutants", *tests], plugins=[hunt])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(shown.getvalue())
        return 2
    if hunt.failed:
        print("These tests fail without a mutant:", *hunt.failed, sep="\n  ")
        return 2
    print(report(hunt.verdicts, reasons, time.monotonic() - start))
    if strange:
        print(f"{EQUIVALENT.name} names mutants that no longer are:", *sorted(strange), sep="\n  ")
    return 0 if few_live(hunt.verdicts, reasons) and not strange else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants",
        description=f"Makes mutants of {PACKAGE}, runs the tests against each, and lists those that live.",
    )
    parser.add_argument("tests", nargs="*", help="folders and files of tests (default: all that bear on it)")
    parser.add_argument(
        "--every", action="store_true", help="all mutants (default: one for each operator and function)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which of an operator's mutants in a function (default: 0)")
    parser.add_argument("--sample", type=int, help="so many of them, drawn by the seed")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: one a core)")
    parser.add_argument("--seconds", type=float, default=20, help="of tests against one mutant (default: 20)")
    parser.add_argument("--list", action="store_true", help="print their names and run nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser.parse_args(arguments)


def said(quiet: bool) -> Callable[[str], None]:
    """Shows one line of progress, in place of the one before on a terminal; now and then a line elsewhere."""
    terminal, last = sys.stderr.isatty(), 0.0

    def say(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if not quiet and now - last > (0.2 if terminal else 30):
            last = now
            sys.stderr.write(f"\r\x1b[K{line}\r" if terminal else f"{line}\n")

    return say


def equivalent(verdicts: Sequence[Verdict], reasons: dict[str, str]) -> list[Verdict]:
    return [each for each in verdicts if each.mutant.name in reasons]


def survivors(verdicts: Sequence[Verdict], reasons: dict[str, str]) -> list[Verdict]:
    return [each for each in verdicts if each.lives and each.mutant.name not in reasons]


def few_live(verdicts: Sequence[Verdict], reasons: dict[str, str]) -> bool:
    """Whether there were mutants, and at most `MOST` of those that are not equivalent live."""
    different = len(verdicts) - len(equivalent(verdicts, reasons))
    return bool(verdicts) and len(survivors(verdicts, reasons)) <= MOST * different


def report(verdicts: Sequence[Verdict], reasons: dict[str, str], seconds: float) -> str:
    """A table by operator, the mutants that live, and those called equivalent that a test kills."""
    alive, same = survivors(verdicts, reasons), equivalent(verdicts, reasons)
    made, dead = Counter(each.mutant.operator for each in verdicts), [each for each in verdicts if not each.lives]
    lines = [f"{'operator':<14} {'mutants':>8} {'killed':>8} {'equivalent':>11} {'alive':>6}"]
    for operator in (*sorted(made), None):
        counts = [
            sum(operator in (None, each.mutant.operator) for each in group) for group in (verdicts, dead, same, alive)
        ]
        lines.append(f"{operator or 'in all':<14} {counts[0]:>8} {counts[1]:>8} {counts[2]:>11} {counts[3]:>6}")
    functions = {(each.mutant.module, each.mutant.function) for each in verdicts}
    by_time = sum(each.killer == "time" for each in dead)
    lines.append(f"in {len(functions)} functions; {by_time} killed by the time limit; {seconds:.0f} s")
    share = len(alive) / max(len(verdicts) - len(same), 1)
    lines.append(f"alive: {share:.1%}, of those that are not equivalent")
    lines += [
        f"  {each.mutant.operator}, {each.num_met} of {each.num_calling} tests: {each.mutant.name}" for each in alive
    ]
    wrong = [each for each in same if not each.lives]
    lines += [f"  called equivalent, killed by {each.killer}: {each.mutant.name}" for each in wrong]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
