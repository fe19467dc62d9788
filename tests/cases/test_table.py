"""`docs/cases.md` and the tests say the same."""

import re
from pathlib import Path

import fstep

ROOT = Path(fstep.__file__).parents[1]
ROW = re.compile(r"^\| (C\d+) \| (.+?) \| (held by|waits for) \| (.+?) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = ROW.findall((ROOT / "docs" / "cases.md").read_text(encoding="utf-8"))


def names_in(path):
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_case_is_held_or_waits():
    assert len(ROWS) == len({case for case, *_ in ROWS}) == 83
    assert all(NAMED.search(where) for _, _, how, where in ROWS if how == "held by")


def test_every_test_that_is_named_exists():
    named = {pair for *_, where in ROWS for pair in NAMED.findall(where)}
    assert [pair for pair in sorted(named) if pair[1] not in names_in(pair[0])] == []


def test_every_test_of_a_case_is_named():
    here = {
        (f"tests/cases/{path.name}", name)
        for path in Path(__file__).parent.glob("test_*.py")
        for name in names_in(f"tests/cases/{path.name}")
    }
    named = {(path, name): case for case, _, _, where in ROWS for path, name in NAMED.findall(where)}
    of_cases = {pair for pair in here if re.match(r"test_c\d+_", pair[1])}
    assert of_cases <= named.keys()
    assert all(named[pair].lower() == pair[1].split("_")[1] for pair in of_cases)
