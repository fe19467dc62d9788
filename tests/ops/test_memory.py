"""What a long run costs in memory: nothing that grows with the number of steps."""

import json
import resource
import subprocess
import sys

import numpy as np

from fstep import ops
from fstep.state import BatchState, KVGroup, NewRequest, Plan, Sampled, SamplingParams, SchedLimits, SchedState

ROWS, BLOCKS, STEPS = 1000, 100_000, 1000


def run():
    """The most memory that the process ever had, every hundred steps; `ru_maxrss` in whatever unit it has here.

    Requests come and go all the time, many of them with the same beginning; the pool fills up and forgets.
    """
    rng = np.random.default_rng(0)
    plan = Plan(1000, 512, (KVGroup(BLOCKS, 16),))
    state, sched = BatchState.empty(plan), SchedState.empty(plan, SchedLimits(ROWS, 8 * ROWS))
    stem = rng.integers(0, 1000, 160)
    names, used = iter(range(10**9)), []
    token_ids, ones, zeros = rng.integers(0, 1000, (ROWS, 1)).astype(np.int32), np.ones(ROWS, np.int32), np.zeros(ROWS)
    for step in range(STEPS):
        for _ in range(ROWS - len(sched.running) - len(sched.waiting)):
            prompt = np.concatenate((stem[: rng.integers(0, 160)], rng.integers(0, 1000, rng.integers(1, 160))))
            params = SamplingParams(temperature=0, max_tokens=int(rng.integers(1, 120)))
            sched = ops.add(sched, state, NewRequest(str(next(names)), prompt, params))
        todo, sched = ops.schedule(sched, state)
        state = ops.build_meta(ops.pad(ops.prepare(state, todo)))
        size = len(todo.request_ids)
        state, _ = ops.commit(state, Sampled(token_ids[:size], ones[:size], zeros[:size].astype(np.int32)))
        if step % 100 == 99:
            used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert next(names) > 10 * ROWS
    assert len(sched.pools[0].hashes) > BLOCKS // 2  # the cache is full, and what it holds is replaced
    print(json.dumps(used))  # noqa: T201


def test_a_thousand_steps_of_a_thousand_rows_grow_no_memory():
    """In a process of its own, since this one has had more memory already."""
    command = [sys.executable, "-c", "from tests.ops.test_memory import run; run()"]
    used = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert used[-1] < 1.05 * used[5]
