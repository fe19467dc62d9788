"""The option of `make oracle`, and what became of the peers' vectors, which is printed at the end."""

import pytest
from attrs import Factory, define

SECTION = "what the vectors of peers contained"


@define
class VectorFigures:
    agree: set[str] = Factory(set)
    differ: set[str] = Factory(set)
    not_built: dict[str, str] = Factory(dict)  # vector: what it asks for
    uncovered: dict[str, tuple[int, str]] = Factory(dict)  # rule: its vectors, and what it waits for

    def lines(self):
        vectors = sum(count for count, _ in self.uncovered.values())
        yield f"{len(self.agree)} agree, {len(self.differ)} differ on purpose (docs/differences.md)"
        yield f"{len(self.not_built)} not covered within covered rules, {vectors} in {len(self.uncovered)} more rules:"
        yield from (f"  not covered: {name}: {why}" for name, why in sorted(self.not_built.items()))
        yield from (f"  not covered: {rule} ({count}): {why}" for rule, (count, why) in sorted(self.uncovered.items()))


FIGURES = pytest.StashKey[VectorFigures]()


def pytest_addoption(parser):
    parser.addoption("--whole-grid", action="store_true", help="every batch size with every chunk size and all prompts")


@pytest.fixture(scope="session")
def vector_figures(request):
    return request.config.stash.setdefault(FIGURES, VectorFigures())


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash.get(FIGURES, None)
    if figures is not None:
        terminalreporter.section(SECTION)
        for line in figures.lines():
            terminalreporter.write_line(line)
