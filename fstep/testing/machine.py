"""A state machine that drives any `Runner`, looks for calls that break it, and prints them as a few lines of Python.

    from fstep.testing.machine import check_runner

    def test_my_scheduler():
        print(check_runner(MyRunner))

`MyRunner()` needs four methods, see `Runner`. Needs `hypothesis`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeAlias

from attrs import field, frozen
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from hypothesis.strategies import DataObject, SearchStrategy

from fstep.state import CheckError, NewRequest
from fstep.testing.checked import OPTIONAL, Checked
from fstep.testing.code import as_code, names_in
from fstep.testing.events import EVENTS
from fstep.testing.lives import LifePhase, Lives
from fstep.testing.runner import Runner
from fstep.testing.strategies import a_request, small_requests

NAMES = "abcdef"  #: the ids that requests get, again and again

Config: TypeAlias = Mapping[str, Any]  #: arguments of what makes a runner
Requests: TypeAlias = "SearchStrategy[NewRequest] | Callable[[Config], SearchStrategy[NewRequest]]"


@frozen
class Findings:
    """What the examples of a search contained in which nothing was found."""

    examples: int
    counts: Counter[str] = field(factory=Counter[str])  #: of steps, requests, tokens, …, over all examples
    events: Counter[str] = field(factory=Counter[str])  #: examples that contained each event
    unseen: tuple[str, ...] = ()  #: what the runner doesn't report

    def __add__(self, other: Findings) -> Findings:
        """What two searches of the same runner contained together."""
        counts, events = self.counts + other.counts, self.events + other.events
        return Findings(self.examples + other.examples, counts, events, self.unseen)

    def share(self, event: str) -> float:
        """The share of the examples that contained an event."""
        return self.events[event] / self.examples if self.examples else 0.0

    def check_events(self, least: float = 0.01) -> None:
        """Raises `CheckError` for the first event that can be seen in this runner, and was in fewer of the examples."""
        for event in EVENTS:
            if event.needs not in self.unseen and self.share(event.name) < least:
                share = f"{self.events[event.name]} of {self.examples}"
                raise CheckError("events", event.name, "examples", f"at least {least:.0%}", share)

    def __str__(self) -> str:
        parts = [f"{self.counts[name]} {name}" for name in ("requests", "steps", "tokens", "refused")]
        lines = [f"{self.examples} examples, nothing found: {', '.join(parts)}"]
        if self.unseen:
            lines.append(f"not reported, so not checked: {', '.join(self.unseen)}")
        for event in EVENTS:
            share = "not seen" if event.needs in self.unseen else f"{self.share(event.name):.1%}"
            lines.append(f"{event.name:<32}{share:>9}")
        return "\n".join(lines)


def check_runner(
    make_runner: Callable[..., Runner],
    *,
    configs: Mapping[str, SearchStrategy[Any]] | None = None,
    requests: Requests | None = None,
    examples: int = 200,
    steps: int = 20,
    patience: int = 4,
    random_seed: int | None = None,
) -> Findings:
    """Looks for calls that make a runner break a rule, see `Checked`; returns what the examples contained.

    `make_runner` makes a new runner, with arguments drawn from `configs` by name. `requests` draws one request, of
    the config if it is a function; a seed and a `max_tokens` keep an example the same each time and its run short. The
    id is set by the search: one of a few, each used again when its request has ended. `patience` is how many steps a
    token may take. With a `random_seed` the same examples come again; otherwise Hypothesis' profile decides.

    Raises what the runner or a check raised, from the shortest calls that were found to raise it; they are noted on the
    error, as Python. A runner that a check calls twice with the same calls must do the same.
    """
    log = _Log()
    parts = {"make": staticmethod(make_runner), "configs": configs or {}, "requests": staticmethod(_for(requests))}
    machine = type("Driven", (RunnerMachine,), {**parts, "patience": patience, "log": log})
    found = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),  # to explain takes longer than all else, and isn't shown
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        verbosity=Verbosity.quiet,
    )
    try:
        run_state_machine_as_test(machine if random_seed is None else seed(random_seed)(machine), settings=found)
    except Exception as error:
        _tell(error, log.failing)
    return Findings(log.examples, log.counts, log.events, tuple(each for each in OPTIONAL if log.unseen[each]))


def _for(requests: Requests | None) -> Callable[[Config], SearchStrategy[NewRequest]]:
    if callable(requests):
        return requests
    fixed = small_requests() if requests is None else requests
    return lambda config: a_request(config["plan"]) if requests is None and "plan" in config else fixed


def _tell(error: Exception, script: str) -> NoReturn:
    """Raises the error with the calls that lead to it, and without what Hypothesis says of its own."""
    error.__notes__ = []
    error.add_note(f"These calls lead to it:\n\n{script}\n")
    raise error


class _Log:
    """What a search has seen so far."""

    def __init__(self) -> None:
        self.examples = 0
        self.counts: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.failing = ""

    def add(self, checked: Checked) -> None:
        self.examples += 1
        self.counts += checked.counts
        self.events.update(checked.events)
        self.unseen.update(name for name in OPTIONAL if checked.counts[f"without {name}"])


class RunnerMachine(RuleBasedStateMachine):
    """Requests that come, steps and aborts, in any order, and at the end a run until nothing is left.

    Made by `check_runner`; the class variables are its arguments.
    """

    make: ClassVar[Callable[..., Any]]
    configs: ClassVar[Mapping[str, SearchStrategy[Any]]]
    requests: ClassVar[Callable[..., SearchStrategy[NewRequest]]]
    patience: ClassVar[int]
    log: ClassVar[_Log]

    def __init__(self) -> None:
        super().__init__()
        self.checked: Checked | None = None
        self.broken = False
        self._values: list[object] = []
        self._newest: list[int] = []  # prompt
        self._lines: list[Callable[[], str]] = []

    @initialize(data=st.data())
    def begin(self, data: DataObject) -> None:
        self.config: Config = {name: data.draw(strategy) for name, strategy in self.configs.items()}
        self._values += self.config.values()
        self._drawn = self.requests(self.config)
        with self._noted(self._first_line):
            self.checked = Checked(self.make(**self.config), self.patience)

    @rule(number=st.integers(0, len(NAMES) - 1), alike=st.sampled_from((0, 1, 0.5, 1)), data=st.data())
    def add(self, number: int, alike: float, data: DataObject) -> None:
        drawn: NewRequest = data.draw(self._drawn)
        free = [name for name in NAMES if name not in self._open()]
        if free:
            ids = self._begun_alike(drawn.prompt_token_ids.tolist(), alike)
            request = NewRequest(free[number % len(free)], ids, drawn.sampling)
            self._newest = ids
            self._values.append(request)
            with self._noted(partial("runner.add({})".format, _Code(request))):
                self._runner().add(request)

    def _begun_alike(self, ids: list[int], share: float) -> list[int]:
        """A prompt with some of the newest one's tokens in front, no longer than either of them."""
        begin = self._newest[: int(share * len(self._newest))]
        return (begin + ids)[: max(len(ids), len(self._newest))] if begin else ids

    @rule(count=st.sampled_from((1, 1, 2, 3)), abort_preempted=st.booleans())
    def step(self, count: int, abort_preempted: bool) -> None:
        """Some steps; few requests are preempted when an abort comes, so one may come as soon as one is."""
        for _ in range(count):
            if self._runner().has_unfinished():
                with self._noted(lambda: "runner.step()"):
                    self._runner().step()
                if abort_preempted:
                    self._abort(self._preempted(), 0)

    @rule(number=st.integers(0, len(NAMES) - 1))
    def abort(self, number: int) -> None:
        self._abort(sorted(self._open()), number)

    def _abort(self, names: list[str], number: int) -> None:
        if names:
            name = names[number % len(names)]
            with self._noted(partial("runner.abort({!r})".format, name)):
                self._runner().abort(name)

    def _preempted(self) -> list[str]:
        lives: Lives = self.checked.lives if self.checked else {}
        return sorted(name for name, life in lives.items() if life.phase is LifePhase.PREEMPTED)

    def teardown(self) -> None:
        """The run to the end. What fails here was not cut short by the search, so it counts as found."""
        if self.checked is not None and not self.broken:
            with self._noted(lambda: "runner.run()"):
                self.checked.run()
            self.log.add(self.checked)

    def _runner(self) -> Checked:
        assert self.checked is not None
        return self.checked

    def _open(self) -> set[str]:
        return {name for name, life in self._runner().lives.items() if life.open}

    def _first_line(self) -> str:
        arguments = ", ".join(f"{name}={as_code(each)}" for name, each in self.config.items())
        name = getattr(self.make, "__name__", "make_runner").replace("<lambda>", "make_runner")
        patience = "" if self.patience == 4 else f", patience={self.patience}"
        return f"runner = Checked({name}({arguments}){patience})"

    def _noted(self, line: Callable[[], str]) -> _Noted:
        self._lines.append(line)
        return _Noted(self)

    def fail(self) -> None:
        """Keeps the calls so far as Python: the last one raised."""
        self.broken = True
        names = ", ".join(sorted(names_in(self._values)))
        imports = [f"from fstep.state import {names}"] if names else []
        lines = [line() for line in self._lines]
        self.log.failing = "\n".join([*imports, "from fstep.testing import Checked", "", *lines])


@frozen
class _Code:
    """A value that is written as Python when it is shown: most examples pass, and show nothing."""

    value: object

    def __str__(self) -> str:
        return as_code(self.value)


class _Noted:
    """Within it, an exception is one of the runner or of a check, and its calls are kept."""

    def __init__(self, machine: RunnerMachine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._machine.fail()
