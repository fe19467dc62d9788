"""What a step costs on the host: schedule, prepare, pad, build_meta and commit, by number of decodes.

Successive steps of one run with prompts of random lengths, so that block boundaries are crossed at random; default
checks on, prefixes cached; the tokens come from a trivial model that isn't counted. Beside it the same run with a
`max_model_len` 64 times as long, as a ratio: a step must not know how long a request might get. Then how the cost of a
step grows with its rows, its tokens, the pool, the history and `max_model_len`, one of them at a time; `--plot FILE`
draws that.

What was tried, for 256 decodes (microseconds, best of five):

    a gather from a log      data[rows, columns] 2.0; take on flat indices 3.1
    a block table of 32      the gather alone 4.2; with a mask past each row's end 14.7, so it is left out where
                             nobody has appended past what the state sees
    rows of 256 names        from a dictionary 9.6; nothing when the tuple of names is the one of the last step
    an event for a request   an attrs value 1.18; a named tuple 0.28
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from fstep import ops
from fstep.ops.checks import LEVELS, level
from fstep.state import BatchState, KVGroup, NewRequest, Plan, Sampled, SamplingParams, SchedLimits, SchedState

PHASES = ("schedule", "prepare", "pad", "build_meta", "check", "commit")
BLOCK_SIZE = 16
LONG, SHORT = 131_072, 2_048


@frozen
class Load:
    """What a run is made of."""

    decodes: int = 256
    history: int = 512  #: tokens of a prompt, at most
    least: float = 0.0  #: tokens of a prompt, at least, as a share of that
    max_model_len: int = SHORT
    num_blocks: int = 0  #: 0 is what the requests need
    chunk: int = 0  #: tokens of a prompt that is prefilled beside the decodes
    check: str = "cheap"  #: of `ops.checks.LEVELS`; "cheap" is an engine's default


def run(load: Load, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each phase, of `prepare` to `build_meta` together, and of the whole step, step by step."""
    rng, check = np.random.default_rng(seed), level(load.check)
    needed = load.decodes * ((load.history + steps + 1) // BLOCK_SIZE + 1) + load.chunk * (steps + 2) // BLOCK_SIZE
    plan = Plan(1000, load.max_model_len, (KVGroup(max(load.num_blocks, needed) + 2, BLOCK_SIZE),))
    state = BatchState.empty(plan)
    limits = SchedLimits(max_num_seqs=load.decodes + 1, max_num_batched_tokens=load.decodes * load.history)
    sched = SchedState.empty(plan, limits)
    for index in range(load.decodes):
        prompt = rng.integers(0, 1000, int(rng.integers(max(int(load.least * load.history), 1), load.history + 1)))
        params = SamplingParams(temperature=0, max_tokens=steps + 2)
        sched = ops.add(sched, state, NewRequest(f"request-{index}", prompt, params))
    times: dict[str, list[float]] = defaultdict(list)
    tokens = rng.integers(0, 1000, (steps + 1, load.decodes + 1, 1)).astype(np.int32)
    for step in range(steps + 1):
        marks = [time.perf_counter()]

        def mark(marks: list[float] = marks) -> None:
            marks.append(time.perf_counter())

        todo, sched = ops.schedule(sched, state)
        mark()
        state = ops.prepare(state, todo)
        mark()
        state = ops.pad(state)
        mark()
        state = ops.build_meta(state)
        mark()
        check(sched, state)
        mark()
        size = len(todo.request_ids)
        got = Sampled(tokens[step, :size], np.ones(size, np.int32), np.zeros(size, np.int32))
        resumed = time.perf_counter()
        state, _ = ops.commit(state, got)
        committed = time.perf_counter() - resumed
        if step:  # the first one prefills
            spent = [*np.diff(marks), committed]
            for name, seconds in zip(PHASES, spent, strict=True):
                times[name].append(1e3 * seconds)
            times["prepare_pad_build_meta"].append(1e3 * sum(spent[1:4]))
            times["step"].append(1e3 * sum(spent))
        elif load.chunk:
            prompt = rng.integers(0, 1000, load.chunk * (steps + 1))
            sched = ops.add(sched, state, NewRequest("long", prompt, SamplingParams(temperature=0, max_tokens=1)))
            sched = evolve(sched, limits=evolve(limits, max_num_batched_tokens=load.decodes + load.chunk))
    return times


#: What grows, from the first value on, with all else as it is.
GROWTH = {
    "rows": [Load(decodes=n) for n in (64, 256, 1024, 4096)],
    "tokens beside 256 decodes": [Load(chunk=n, max_model_len=1 << 20) for n in (64, 256, 1024, 4096)],
    "blocks of the pool": [Load(num_blocks=n) for n in (16_000, 64_000, 256_000, 1_024_000)],
    "history of each row": [Load(history=n, least=1, max_model_len=1 << 14) for n in (128, 512, 2048, 8192)],
    "max_model_len": [Load(max_model_len=n) for n in (2_048, 8_192, 131_072, 1 << 20)],
}


def grown(what: str, load: Load) -> int:
    """The number that grows."""
    return {
        "rows": load.decodes,
        "tokens beside 256 decodes": load.chunk,
        "blocks of the pool": load.num_blocks,
        "history of each row": load.history,
        "max_model_len": load.max_model_len,
    }[what]


def growth(steps: int) -> dict[str, dict[int, float]]:
    """Milliseconds of a step, the median, by what grows and how far."""
    return {
        what: {grown(what, load): statistics.median(run(load, steps)["step"]) for load in loads}
        for what, loads in GROWTH.items()
    }


def check_prices(steps: int) -> dict[str, float]:
    """Milliseconds that the check of a step takes, the median, by its level."""
    return {name: statistics.median(run(Load(check=name), steps)["check"]) for name in LEVELS}


def print_growth(steps: int, medians: dict[str, dict[int, float]]) -> None:
    print(
        f"\ngrowth of a step: {steps} steps each, 256 decodes unless rows grow; milliseconds, median (over the first)"
    )
    for what, by_size in medians.items():
        first = next(iter(by_size.values()))
        cells = [f"{size}: {spent:.3f} ({spent / first:.2f})" for size, spent in by_size.items()]
        print(f"{what:>26}" + "".join(f"{cell:>24}" for cell in cells))


def plot_growth(path: Path, medians: dict[str, dict[int, float]]) -> None:
    """A picture of the same, one panel for each thing that grows."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(medians), figsize=(4 * len(medians), 3.4), sharey=True)
    for panel, (what, by_size) in zip(panels, medians.items(), strict=True):
        panel.plot(list(by_size), list(by_size.values()), marker="o")
        panel.set(xscale="log", yscale="log", xlabel=what)
        panel.grid(visible=True, which="both", alpha=0.3)
    panels[0].set_ylabel("milliseconds of a step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=300, help="successive steps of a run (300)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size, interleaved (3)")
    parser.add_argument("--quick", action="store_true", help="one round of 100 steps, and 20 for the growth")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'fstep[plot]'")
    rounds, steps = (1, 100) if options.quick else (options.rounds, options.steps)

    figures: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for decodes in options.decodes:
            for max_model_len in (SHORT, LONG):
                for name, values in run(Load(decodes, max_model_len=max_model_len), steps).items():
                    figures[decodes, max_model_len][name] += values

    print(f"{rounds} x {steps} successive steps, max_model_len {SHORT}; milliseconds, median (99th percentile)")
    names = (*PHASES, "prepare_pad_build_meta", "step")
    heads = (*PHASES, "prepare..build_meta", "step", f"ratio at {LONG}")
    print(f"{'decodes':>8}" + "".join(f"{head:>20}" for head in heads))
    for decodes in options.decodes:
        short, long = figures[decodes, SHORT], figures[decodes, LONG]
        cells = [f"{statistics.median(short[name]):.3f} ({np.percentile(short[name], 99):.3f})" for name in names]
        ratio = statistics.median(long["prepare_pad_build_meta"]) / statistics.median(short["prepare_pad_build_meta"])
        print(f"{decodes:>8}" + "".join(f"{cell:>20}" for cell in [*cells, f"{ratio:.2f}"]))
    medians = growth(20 if options.quick else 100)
    print_growth(20 if options.quick else 100, medians)
    prices = check_prices(20 if options.quick else 100)
    listed = ", ".join(f"{name} {spent:.3f}" for name, spent in prices.items())
    print(f"\nwhat the check of a step of 256 decodes takes, by its level, milliseconds: {listed}")
    if options.plot:
        plot_growth(options.plot, medians)
    if options.json:
        made = {**_as_json(figures, names), "growth_step_ms": medians, "check_ms": prices}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    return 0


def _as_json(figures: dict[tuple[int, int], dict[str, list[float]]], names: tuple[str, ...]) -> dict[str, object]:
    """Medians and 99th percentiles by figure and number of decodes; `…_long` with the longer `max_model_len`."""
    made: dict[str, dict[str, float]] = defaultdict(dict)
    for (decodes, max_model_len), by_name in figures.items():
        for name in names:
            key = f"{name}{'_long' if max_model_len == LONG else ''}"
            made[f"{key}_ms"][str(decodes)] = statistics.median(by_name[name])
            made[f"{key}_p99_ms"][str(decodes)] = float(np.percentile(by_name[name], 99))
    return dict(made)


if __name__ == "__main__":
    sys.exit(main())
