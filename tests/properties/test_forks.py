"""Requests that branch and grow: I19 for rows forked inside one state, I1 for the tokens of all of them."""

from collections import Counter

from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.shell import SavedRequest, load_request, save_request
from fstep.state import (
    BatchState,
    FinishReason,
    KVGroup,
    RequestError,
    RowPhase,
    SamplingParams,
    SchedLimits,
    SchedState,
)
from fstep.testing import HashModel, RollingModel, checked_step, reference_tokens
from fstep.testing.strategies import scripts


@define
class Branch:
    """A request as it should be: what it began with, and the reference's way on from there."""

    prompt: list[int]
    params: SamplingParams
    sample_index: int
    shared: list[int] = field(factory=list)  #: output that it has from the request that it is a copy of
    got: list[int] = field(factory=list)
    reason: FinishReason | None = None

    def expected(self, model, plan):
        asked = self.params.max_tokens
        left = None if asked is None else asked - len(self.shared)
        return reference_tokens(
            lambda known: model.reference_logits(list(known)),
            self.prompt + self.shared,
            evolve(self.params, max_tokens=left),
            plan.eos_token_ids,
            plan.max_model_len,
            self.sample_index,
        )


class Tree:
    """All branches of a run, by request."""

    def __init__(self, model, script, env, kv):
        self.model, self.plan, self.env, self.kv = model, script.plan, env, kv
        self.state = BatchState.empty(script.plan, kv.line, kv.epoch, rows=1)
        self.sched = SchedState.empty(script.plan, script.limits)
        self.branches, self.counts = {}, Counter()
        for _, request in script.arrivals:
            self.sched = ops.add(self.sched, self.state, request)
            self.branches[request.request_id] = Branch(
                request.prompt_token_ids.tolist(), request.sampling, request.sample_index
            )

    def fork(self, name, n):
        branch, row = self.branches[name], self.state.rows.request_ids.row_of[name]
        first = int(self.state.rows.num_samples[row])
        self.state, self.sched = ops.fork(self.state, self.sched, name, n)
        self.counts["copies"] += n
        self.counts["copies_of_blocks"] += sum(map(len, self.sched.copies))
        for k in range(n):
            copy = Branch(branch.prompt, branch.params, first + k, branch.shared + branch.got)
            self.branches[f"{name}#{first + k}"] = copy

    def extend(self, name, ids):
        branch = self.branches[name]
        try:
            self.state, self.sched = ops.extend(self.state, self.sched, name, ids)
        except RequestError:  # no room for more: tests/ops/test_forks.py looks at these
            return
        self.counts["extensions"] += 1
        self.branches[f"before {name} {len(branch.prompt)}"] = evolve(branch, reason=FinishReason.ABORT)
        prompt = branch.prompt + branch.shared + branch.got + ids
        self.branches[name] = Branch(prompt, branch.params, branch.sample_index)

    def clone(self):
        """The run goes on with a copy of its cache."""
        self.kv = self.kv.clone()
        self.state = ops.adopt(self.state, self.kv)
        self.counts["clones"] += 1

    def move(self, name, plan, start, path):
        """A request goes on in another engine too, of other block sizes, by way of a file."""
        save_request(self.state, self.sched, self.kv, name).write(path)
        env, kv = start(self.model, plan)
        state, sched = BatchState.empty(plan, kv.line, kv.epoch), SchedState.empty(plan, SchedLimits())
        state, sched, kv = load_request(state, sched, kv, SavedRequest.read(path), "moved")
        self.counts["moved_with_kv"] += bool(sched.running)
        got = list(self.branches[name].got)
        while ops.has_work(sched, state):
            moment = checked_step(state, sched, env, kv, guard=False)
            state, sched, kv = moment.after, moment.sched, moment.kv
            got += [token for event in moment.events for token in event.token_ids]
        assert tuple(got) == self.branches[name].expected(self.model, self.plan)[0]

    def step(self):
        moment = checked_step(self.state, self.sched, self.env, self.kv, guard=False)
        self.state, self.sched, self.kv = moment.after, moment.sched, moment.kv
        self.counts["preemptions"] += len(moment.schedule.preempted)
        for event in moment.events:
            branch = self.branches[event.request_id]
            branch.got += event.token_ids
            branch.reason = event.finish_reason

    def check(self):
        for branch in self.branches.values():
            tokens, reason = branch.expected(self.model, self.plan)
            if branch.reason is FinishReason.ABORT:
                assert tuple(branch.got) == tokens[: len(branch.got)]
            else:
                assert (tuple(branch.got), branch.reason) == (tokens, reason)
        assert all(pool.num_free == pool.num_blocks - 1 for pool in self.sched.pools)


@define
class Turn:
    """Something that a user does after some steps."""

    steps: int
    verb: str
    which: int
    n: int
    token_ids: list[int]


def turns(vocab_size):
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=2)
    verbs = st.sampled_from(("fork", "extend", "extend", "clone", "move"))
    return st.lists(st.builds(Turn, st.integers(0, 3), verbs, st.integers(0, 7), st.integers(1, 3), ids), max_size=6)


def test_branches_go_their_own_ways(start, examples, tally, tmp_path):
    @examples(120)
    @given(st.booleans(), st.data())
    def holds(recurrent, data):
        script = data.draw(scripts(recurrent=recurrent))
        model = (RollingModel if recurrent else HashModel)(script.plan.vocab_size, script.plan.max_model_len)
        tree = Tree(model, script, *start(model, script.plan))
        for turn in data.draw(turns(script.plan.vocab_size)):
            for _ in range(turn.steps):
                tree.step()
            rows = tree.state.rows
            alive = (RowPhase.RUNNING, RowPhase.PREEMPTED)
            names = [name for name, phase in zip(rows.request_ids, rows.phase, strict=True) if phase in alive]
            if turn.verb == "extend":
                names = [name for name in rows.request_ids if name is not None]
            name = names[turn.which % len(names)] if names else None
            if turn.verb == "clone":
                tree.clone()
            elif name and turn.verb == "fork":
                tree.fork(name, turn.n)
            elif name and turn.verb == "extend":
                tree.extend(name, turn.token_ids)
            elif name:
                groups = (KVGroup(11, 1 + turn.n, (0,), recurrent),)
                tree.move(name, evolve(script.plan, groups=groups), start, tmp_path / "request")
        for _ in range(2000):
            if ops.has_work(tree.sched, tree.state):
                tree.step()
        tree.check()
        tally.update(tree.counts)

    holds()
    wanted = ("copies", "copies_of_blocks", "extensions", "preemptions", "clones", "moved_with_kv")
    assert {what for what in wanted if tally[what] < 5} == set()
