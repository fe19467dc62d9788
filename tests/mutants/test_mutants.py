"""The operators make the faults that they are for, and a hunt tells a mutant that a test kills from one that lives."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutants.__main__ import PACKAGE, few_live, report, survivors
from tests.mutants.hunt import Known, Verdict, function_of, in_order, mutants_of, one_of_each, shuffled, within
from tests.mutants.operators import OPERATORS, mutants

ROOT = Path(__file__).parents[2]

FAULTS = {
    "off by one": ("return n + 3", "return n + 4", {"n": 1}),
    "comparison": ("return [x for x in n if x < 2]", "return [x for x in n if x <= 2]", {"n": [1, 2, 3]}),
    "mask dropped": ("return n & 6", "return n", {"n": 9}),
    "swapped": ("return divmod(n, 5)", "return divmod(5, n)", {"n": 7}),
    "term dropped": ("return n * 2", "return n", {"n": 3}),
    "copy skipped": ("return n.copy() is n", "return n is n", {"n": [1]}),
    "stale": ("m = [n]\n  m.append(1)\n  return m", "m = [n]\n  return m", {"n": 1}),
    "-1 for 0": ("return n or 0", "return n or -1", {"n": None}),
    "index shifted": ("return n[1:]", "return n[2:]", {"n": [1, 2, 3]}),
}


def result_of(body, arguments, code=None):
    there = {}
    exec(f"def f(n):\n  {body}", there)
    if code is not None:
        there["f"].__code__ = code
    return there["f"](**arguments)


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_makes_its_fault(operator):
    body, faulty, arguments = FAULTS[operator]
    expected = result_of(faulty, arguments)
    assert result_of(body, arguments) != expected
    made = [each for each in mutants(f"def f(n):\n  {body}", "m") if each.operator == operator]
    assert expected in [result_of(body, arguments, each.code) for each in made]


def test_every_function_of_ops_has_mutants_and_their_names_are_unique():
    found = list(mutants_of(PACKAGE))
    assert len({each.name for each in found}) == len(found) > 3000
    assert all(callable(function_of(each)) for each in found)
    chosen = one_of_each(found, 0)
    assert len(chosen) >= 300
    assert {(each.module, each.function, each.operator) for each in chosen} == {
        (each.module, each.function, each.operator) for each in found
    }
    assert [each.name for each in shuffled(chosen, 1)] == [each.name for each in shuffled(chosen[::-1], 1)]
    assert [each.name for each in shuffled(chosen, 1)] != [each.name for each in shuffled(chosen, 2)]


def test_the_report_counts_and_names_what_lives():
    first, second, third = list(mutants("def f(n):\n  return n + 3", "m"))[:3]
    verdicts = [Verdict(first, "a test", 4, 4), Verdict(second, None, 3, 4), Verdict(third, None, 4, 4)]
    reasons = {third.name: "the same"}
    assert [each.mutant for each in survivors(verdicts, reasons)] == [second]
    shown = report(verdicts, reasons, 1.0)
    assert "alive: 50.0%" in shown
    assert f"3 of 4 tests: {second.name}" in shown
    assert not few_live(verdicts, reasons)
    assert few_live(verdicts[:1], {})
    assert not few_live([], {})
    assert third.name not in shown


def test_a_mutant_meets_killers_first_then_the_fastest_and_one_test_at_least():
    slow, fast, killer = (
        Known(SimpleNamespace(nodeid=name), seconds, frozenset())
        for name, seconds in (("slow", 30.0), ("fast", 1.0), ("killer", 5.0))
    )
    assert in_order([slow, fast, killer], ["killer"]) == [killer, fast, slow]
    assert within(6, [killer, fast, slow]) == [killer, fast]
    assert within(6, [slow]) == [slow]
    assert within(6, []) == []


def test_what_may_be_exchanged_without_a_change_makes_no_mutant():
    made = list(mutants("def f(n):\n  return min(n, np.maximum(n, 5)) + n", "m"))
    assert [each for each in made if each.operator == "swapped"] == []


def test_a_hunt_kills_what_the_tests_see():
    """Mutants of the positions against their own tests: most die; tests that call nothing of them kill none."""
    asked = [sys.executable, "-m", "tests.mutants", "--quiet", "--only", "fstep.ops.positions."]
    ended = subprocess.run(
        [*asked, "tests/ops/test_positions.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "in all" in ended.stdout, ended.stdout + ended.stderr
    _, _, made, killed, *_ = next(line for line in ended.stdout.splitlines() if line.startswith("in all")).split()
    assert int(killed) > int(made) / 2
    ended = subprocess.run([*asked, "tests/ops/test_philox.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "alive: 100.0%" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == 1
