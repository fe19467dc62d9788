"""A hash model behind a runner, small enough to see what happens."""

import pytest
from attrs import evolve

from fstep import ops
from fstep.shell import CpuDevice, Runner
from fstep.shell.kv import new_kv
from fstep.state import Env, KVGroup, NewRequest, Plan, SamplingParams, SchedLimits, Schedule
from fstep.testing import HashModel, RollingModel, check_state, reference_tokens


class Small:
    """Requests of token ids against `model`; `num_blocks` blocks may be handed out. What each got is kept by name."""

    def __init__(
        self, num_blocks=64, block_size=4, vocab_size=50, max_model_len=64, model=HashModel, limits=None, **plan
    ):
        self.model = model(vocab_size, max_model_len)
        self.plan = Plan(
            vocab_size, max_model_len, (KVGroup(num_blocks + 1, block_size, recurrent=model is RollingModel),), **plan
        )
        env = Env(self.model, {}, CpuDevice())
        limits = SchedLimits(**(limits or {}))
        self.runner = Runner(env, self.plan, limits, new_kv(self.plan, self.model.kv_specs(), env.device))
        self.requests, self.tokens, self.ends, self.reports = {}, {}, {}, []

    @property
    def state(self):
        return self.runner.state

    @property
    def pool(self):
        return self.runner.sched.pools[0]

    def add(self, name, prompt, **params):
        prompt = list(prompt) if isinstance(prompt, range) else prompt
        request = NewRequest(name, prompt, SamplingParams(**{"temperature": 0, "ignore_eos": False, **params}))
        request = self.runner.add(request)
        self.requests[name], self.tokens[name], self.ends[name] = request, [], []
        return request

    def step(self):
        report = self.runner.step()
        check_state(self.runner.sched, self.state)
        for event in report.events:
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason:
                self.ends.setdefault(event.request_id, []).append(event.finish_reason.value)
        self.reports.append(report)
        return report

    def run(self):
        """All to their ends; nothing is left behind."""
        while self.runner.has_unfinished():
            self.step()
        assert not self.state.rows.phase.any()
        assert self.pool.num_free == self.pool.num_blocks - 1
        return self

    def alone(self, name):
        """What a request gets by itself, by the reference."""
        request = self.requests[name]
        tokens, _ = reference_tokens(
            lambda ids: self.model.reference_logits(list(ids)),
            request.prompt_token_ids.tolist(),
            request.sampling,
            self.plan.eos_token_ids,
            self.plan.max_model_len,
        )
        return list(tokens)

    def preempt(self, name):
        """Takes a running request's place, with its blocks left as they are in the pool."""
        sched, blocks = self.runner.sched, self.state.rows.blocks[0][self.state.rows.request_ids.row_of[name]]
        self.runner.sched = evolve(
            sched,
            pools=(self.pool.give(blocks),),
            running=tuple(each for each in sched.running if each != name),
            preempted=(name, *sched.preempted),
        )
        self.runner.state = ops.prepare(self.state, Schedule(preempted=(name,))).detach()

    def fork(self, name, n):
        self.runner.state, self.runner.sched = ops.fork(self.state, self.runner.sched, name, n)


@pytest.fixture
def small():
    return Small()
