"""What a step costs on the host: schedule, prepare, pad, build_meta and commit, by number of decodes.

Successive steps of one run with prompts of random lengths, so that block boundaries are crossed at random; default
checks on; the tokens come from a trivial model that isn't counted. Beside it the same run with a `max_model_len` 64
times as long, as a ratio: a step must not know how long a request might get.

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
from pathlib import Path

import numpy as np

from fstep import ops
from fstep.state import BatchState, KVGroup, NewRequest, Plan, Sampled, SamplingParams, SchedLimits, SchedState

PHASES = ("schedule", "prepare", "pad", "build_meta", "commit")
BLOCK_SIZE = 16
LONG, SHORT = 131_072, 2_048


def run(decodes: int, steps: int, max_model_len: int, seed: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each phase, of `prepare` to `build_meta` together, and of the whole step, step by step."""
    rng = np.random.default_rng(seed)
    longest = 512 + steps + 1
    plan = Plan(1000, max_model_len, (KVGroup(decodes * (longest // BLOCK_SIZE + 1) + 1, BLOCK_SIZE),))
    state = BatchState.empty(plan)
    sched = SchedState.empty(plan, SchedLimits(max_num_seqs=decodes, max_num_batched_tokens=decodes * 512))
    for index in range(decodes):
        prompt = rng.integers(0, 1000, int(rng.integers(1, 512)))
        params = SamplingParams(temperature=0, max_tokens=steps + 2)
        sched = ops.add(sched, state, NewRequest(f"request-{index}", prompt, params))
    times: dict[str, list[float]] = defaultdict(list)
    tokens = rng.integers(0, 1000, (steps + 1, decodes, 1)).astype(np.int32)
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
        got = Sampled(tokens[step], np.ones(decodes, np.int32), np.zeros(decodes, np.int32))
        resumed = time.perf_counter()
        state, _ = ops.commit(state, got)
        committed = time.perf_counter() - resumed
        if step:  # the first one prefills
            spent = [*np.diff(marks), committed]
            for name, seconds in zip(PHASES, spent, strict=True):
                times[name].append(1e3 * seconds)
            times["prepare_pad_build_meta"].append(1e3 * sum(spent[1:4]))
            times["step"].append(1e3 * sum(spent))
    return times


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=300, help="successive steps of a run (300)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each size, interleaved (3)")
    parser.add_argument("--quick", action="store_true", help="one round of 100 steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    rounds, steps = (1, 100) if options.quick else (options.rounds, options.steps)

    figures: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for decodes in options.decodes:
            for max_model_len in (SHORT, LONG):
                for name, values in run(decodes, steps, max_model_len).items():
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
    if options.json:
        options.json.write_text(json.dumps(_as_json(figures, names), indent=1) + "\n")
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
