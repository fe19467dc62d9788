"""Hypothesis profiles, and the figures of the property tests, which are printed at the end.

`ci`, the default, draws the same examples every time; `--hypothesis-profile=fuzz` draws new ones, twenty times as many,
and prints how to draw a failing one again.
"""

import signal
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("ci", max_examples=100, derandomize=True, database=None, deadline=None)
settings.register_profile("fuzz", max_examples=2000, print_blob=True, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "mutants",
    parent=settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("ci")

FIGURES = pytest.StashKey[dict[str, Counter]]()


FINDINGS = pytest.StashKey[dict[str, object]]()


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would `fstep`
    config.stash[FIGURES] = {}
    config.stash[FINDINGS] = {}


@pytest.fixture
def findings(request):
    """Keeps what a search of the state machine contained: `findings(found)`; its events are printed after the tests."""
    return lambda found: request.config.stash[FINDINGS].__setitem__(request.node.name, found)


@pytest.fixture
def tally(request):
    """Counts of what a property's examples contained; printed after the tests."""
    counts = Counter()
    yield counts
    request.config.stash[FIGURES][request.node.name] = counts


def pytest_terminal_summary(terminalreporter, config):
    for name, found in config.stash[FINDINGS].items():
        terminalreporter.section(f"events of {name}")
        terminalreporter.write_line(str(found))
    figures = {}
    for name, counts in config.stash[FIGURES].items():
        figures.setdefault(name.partition("[")[0], Counter()).update(counts)
    if not figures:
        return
    terminalreporter.section("what the property tests contained")
    for name, counts in figures.items():
        terminalreporter.write_line(f"{name}: {listed(counts, sorted(counts))}")
    total = sum(figures.values(), Counter())
    some = ("runs", "steps", "tokens", "preemptions", "partial_prompts", "padded_steps", "empty_steps", "forks")
    terminalreporter.write_line(f"in all: {listed(total, some)}")


def listed(counts, names):
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])
