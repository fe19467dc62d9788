"""The state machine finds what is planted in an engine, shrinks it, and prints it as Python that finds it again."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep.state import NewRequest, SamplingParams
from fstep.testing import CheckError, StepOutput, StepReport
from fstep.testing.machine import check_runner
from fstep.testing.strategies import small_requests
from tests.testing.tiny_engine import SIZE, TinyEngine


class LosesABlock(TinyEngine):
    def finish(self, name):
        super().finish(name)
        if len(self.ids[name]) > SIZE:
            self.free.pop()


class KeepsItsBlocks(TinyEngine):
    """After an abort."""

    def abort(self, name):
        self.requests.pop(name, None)


class WritesPastABoundary(TinyEngine):
    """A request that fills a block goes on in whatever block comes after it."""

    def slots(self, name, positions):
        first = self.blocks[name][0] * SIZE
        return [
            first + p if p == SIZE else slot for p, slot in zip(positions, super().slots(name, positions), strict=True)
        ]


class DrawsTooEarly(TinyEngine):
    def moved(self, name, count, logits):
        output = super().moved(name, count, logits)
        return output or StepOutput(name, (int(logits.argmax()),))


class SpeaksAfterItsEnd(TinyEngine):
    said = None

    def step(self):
        report = super().step()
        outputs = (*report.outputs, *([self.said] if self.said else []))
        self.said = next((each for each in report.outputs if each.finish_reason), None)
        return StepReport(outputs, batch=report.batch)


class Stops(TinyEngine):
    """With three requests at once."""

    def chosen(self):
        return super().chosen() if len(self.requests) < 3 else {}


class Raises(TinyEngine):
    def allocate(self, name, end):
        if end > 2 * SIZE:
            raise ZeroDivisionError("a bug in the engine")
        super().allocate(name, end)


class Forgets(TinyEngine):
    """A request that came while two others ran."""

    def has_unfinished(self):
        return bool(self.requests) and list(self.requests) != ["c"]


#: What each is found by.
FAULTS = {
    LosesABlock: "I18: pool: blocks is lost",
    KeepsItsBlocks: r"I18: request '.': blocks of KV group 0 is \[|I18: pool: blocks is lost",
    WritesPastABoundary: r"I4: .*slot_mapping\[0\]|I17: .* cell of position 4 .* is not written",
    DrawsTooEarly: "I7: request '.': token_ids",
    SpeaksAfterItsEnd: "output: request '.': (phase is ended, and gets|outputs of the step is 2)",
    Stops: "progress: request '.': has_unfinished",
    Raises: "a bug in the engine",
    Forgets: "progress: request 'c': finish_reason is none, and has_unfinished",
}


def test_a_sound_engine_passes_and_says_what_was_not_seen():
    found = check_runner(TinyEngine, examples=60, random_seed=1)
    assert found.unseen == ("schedule",)
    assert found.counts["requests"] > 60
    assert found.share("block runs out at a boundary") > 0.1
    assert "not reported, so not checked: schedule" in str(found)
    assert re.search(r"aborted in prefill +not seen", str(found))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_shrunk_and_printed(fault):
    with pytest.raises((CheckError, ZeroDivisionError), match=FAULTS[fault]) as caught:
        check_runner(fault, examples=300, random_seed=1)
    (note,) = caught.value.__notes__
    script = note.split("\n\n", 1)[1]
    assert script.count("runner.add(") <= 6
    with pytest.raises(type(caught.value), match=re.escape(str(caught.value))):
        exec(script, {fault.__name__: fault})


def test_the_script_of_an_example_is_a_few_lines():
    with pytest.raises(CheckError) as caught:
        check_runner(SpeaksAfterItsEnd, examples=300, random_seed=1)
    lines = caught.value.__notes__[0].split("\n\n", 1)[1].splitlines()
    assert lines[:4] == [
        "from fstep.state import NewRequest, SamplingParams",
        "from fstep.testing import Checked",
        "",
        "runner = Checked(SpeaksAfterItsEnd())",
    ]
    assert len(lines) <= 9
    assert all(re.fullmatch(r"runner\.(add\(NewRequest\(.*\)\)|step\(\)|run\(\))", line) for line in lines[4:])


def test_an_event_that_is_too_rare_is_an_error():
    found = check_runner(TinyEngine, requests=small_requests(longest_prompt=1), examples=30, random_seed=1)
    found.check_events(least=0)
    with pytest.raises(CheckError, match=r"events: .*: examples is 0 of 3., expected at least 1%"):
        found.check_events()


def test_the_arguments_of_a_runner_are_drawn():
    budgets = set()

    def make(budget):
        budgets.add(budget)
        return TinyEngine(budget=budget)

    check_runner(make, configs={"budget": st.integers(1, 3)}, examples=40, random_seed=1)
    assert budgets == {1, 2, 3}


@given(small_requests())
def test_a_small_request_is_small(request):
    assert isinstance(request, NewRequest)
    assert 1 <= len(request.prompt_token_ids) <= 12
    assert isinstance(request.sampling, SamplingParams)
    assert 1 <= request.sampling.max_tokens <= 6
