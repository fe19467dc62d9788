"""What peers answer to small inputs (see `vectors/README.md`), and what we do.

A vector is a test. A rule without an adapter has no code here yet: it stands in `WAITING`, with the feature that it
waits for, and is named at the end of the run. So is a vector of a covered rule that asks for something that isn't
built, and a rule of a foreign folder (`FSTEP_VECTORS`) that nobody knows. Where we answer otherwise on purpose,
`DIFFERENCES` says what we answer instead, and `docs/differences.md` why.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import fstep
from tests.peers.adapters import ADAPTERS, NotBuiltError, same
from tests.peers.differences import ALLOWED, ALTERNATIVES, DIFFERENCES, WAITING

OWN = Path(__file__).with_name("vectors")
DOCUMENT = Path(fstep.__file__).parents[1] / "docs" / "differences.md"


def rules_in(folder: Path) -> dict[str, list[dict]]:
    """The vectors of each rule. Raises `ValueError` for a folder that holds none: nothing would be tested."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not files:
        raise ValueError(f"{folder} holds no vectors (*.json)")
    return {each["rule"]: each["vectors"] for each in files}


RULES = rules_in(Path(os.environ.get("FSTEP_VECTORS") or OWN))
VECTORS = [vector for rule, vectors in RULES.items() if rule in ADAPTERS for vector in vectors]


def not_covered(rules: dict[str, list[dict]]) -> dict[str, tuple[int, str]]:
    """How many vectors each rule without an adapter has, and why nothing is run for them."""
    return {
        rule: (len(vectors), WAITING.get(rule, "a rule that is not known here"))
        for rule, vectors in rules.items()
        if rule not in ADAPTERS
    }


@pytest.fixture(scope="module", autouse=True)
def uncovered(vector_figures):
    vector_figures.uncovered.update(not_covered(RULES))


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["id"] for vector in VECTORS])
def test_vector(vector, vector_figures):
    rule, name, expected = vector["rule"], vector["id"], vector["expected"]
    try:
        ours = ADAPTERS[rule](vector["input"])
    except NotBuiltError as missing:
        vector_figures.not_built[name] = str(missing)
        pytest.skip(f"not covered: {missing}")
    expected = {field: value for field, value in expected.items() if field not in ALTERNATIVES.get(rule, ())}
    assert ours.keys() == expected.keys()
    if name in DIFFERENCES:
        assert same(ours, {**expected, **DIFFERENCES[name]})
        assert not same(ours, expected), f"{name} is no difference any more"
    for field in [field for field in expected if not same(ours[field], expected[field])]:
        allowed = ALLOWED.get((rule, field))
        assert allowed is not None, f"{name}: {field} is {ours[field]!r}, the peer has {expected[field]!r}"
        assert allowed(ours, expected, vector["input"])
        vector_figures.differ.add(name)
    vector_figures.agree.update({name} - vector_figures.differ)


def test_every_rule_has_an_adapter_or_waits_for_a_named_feature():
    own = rules_in(OWN)
    assert own.keys() == ADAPTERS.keys() | WAITING.keys()
    assert not ADAPTERS.keys() & WAITING.keys()


def test_the_differences_are_those_of_the_document():
    rows = re.findall(r"^\| `([a-z_]+-\d+)` \| (.*) \| (.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, *_ in rows] == sorted(DIFFERENCES)
    assert all(answer.strip() and why.strip() for _, answer, why in rows)
    assert {rule for rule, _ in ALLOWED} <= {name.rpartition("-")[0] for name in DIFFERENCES}


def test_every_difference_is_of_a_vector_that_exists():
    ids = {vector["id"] for vectors in rules_in(OWN).values() for vector in vectors}
    assert DIFFERENCES.keys() <= ids
    assert len(ids) == 455


def test_a_foreign_folder_is_read_and_what_is_unknown_in_it_is_named(tmp_path):
    for rule in ("top_k", "penalties", "levitation"):
        (tmp_path / f"{rule}.json").write_text(json.dumps({"rule": rule, "vectors": [{"id": f"{rule}-01"}]}))
    rules = rules_in(tmp_path)
    assert rules.keys() == {"top_k", "penalties", "levitation"}
    unknown = (1, "a rule that is not known here")
    assert not_covered(rules) == {"penalties": (1, WAITING["penalties"]), "levitation": unknown}


def test_a_folder_without_vectors_is_no_success(tmp_path):
    with pytest.raises(ValueError, match="holds no vectors"):
        rules_in(tmp_path)
