"""Small states by hand."""

import numpy as np
import pytest

from fstep import ops
from fstep.state import BatchState, KVGroup, NewRequest, Plan, Ragged, Sampled, SamplingParams, Schedule, i32

GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Batch:
    """Steps with given tokens instead of a model's: `new` admits, `run` schedules, `got` commits."""

    def __init__(self, num_blocks=32, block_size=4, vocab_size=100, max_model_len=64, **plan):
        self.plan = Plan(vocab_size, max_model_len, (KVGroup(num_blocks, block_size),), **plan)
        self.state = BatchState.empty(self.plan, rows=2)

    def schedule(self, counts, blocks, **parts):
        return Schedule(
            request_ids=tuple(counts),
            num_scheduled_tokens=i32(counts.values()),
            new_blocks=(Ragged.of([blocks.get(name, ()) for name in counts]),),
            **parts,
        )

    def prepare(self, counts, blocks, **parts):
        self.state = ops.prepare(self.state, self.schedule(counts, blocks, **parts))
        return self.state.step.inputs

    def commit(self, tokens, error=None):
        token_ids = np.array(tokens, np.int32)[:, None]
        got = Sampled(token_ids, (token_ids[:, 0] >= 0).astype(np.int32), i32(error or [0] * len(tokens)))
        self.state, events = ops.commit(self.state, got)
        return events


def new(name, length, params=GREEDY):
    return NewRequest(name, range_of(length), params)


def range_of(length):
    return list(range(10, 10 + length))


@pytest.fixture
def batch():
    return Batch()
