"""An engine of fifty lines that knows nothing of fstep's types but the request: something to aim the kit at."""

import numpy as np

from fstep.state import KVGroup, i32
from fstep.testing import (
    BatchArrays,
    HashCache,
    HashModel,
    PoolView,
    StepOutput,
    StepReport,
    reference_token,
    reference_tokens,
)

SIZE, LONGEST = 4, 64


class TinyEngine:
    """First come, first served; a request that finds no block waits for one. No preemption, so blocks are plenty."""

    def __init__(self, num_blocks=40, budget=6):
        self.model = HashModel(16, LONGEST)
        self.cache = HashCache(self.model, (KVGroup(num_blocks, SIZE),))
        self.num_blocks, self.budget = num_blocks, budget
        self.free = list(range(1, num_blocks))
        self.requests, self.ids, self.computed, self.blocks = {}, {}, {}, {}

    def reference(self, request):
        prompt = request.prompt_token_ids.tolist()
        return reference_tokens(self.model.reference_logits, prompt, request.sampling, (), LONGEST)

    def add(self, request):
        name = request.request_id
        self.requests[name], self.ids[name] = request, request.prompt_token_ids.tolist()
        self.computed[name], self.blocks[name] = 0, []

    def abort(self, name):
        if self.requests.pop(name, None):
            self.free += self.blocks.pop(name)

    def has_unfinished(self):
        return bool(self.requests)

    def chosen(self):
        """How many tokens each request gets."""
        left, counts = self.budget, {}
        for name in self.requests:
            count = min(left, len(self.ids[name]) - self.computed[name])
            if count:
                counts[name] = count
            left -= count
        return counts

    def allocate(self, name, end):
        while len(self.blocks[name]) * SIZE < end:
            self.blocks[name].append(self.free.pop(0))

    def slots(self, name, positions):
        return [self.blocks[name][p // SIZE] * SIZE + p % SIZE for p in positions]

    def step(self):
        counts = self.chosen()
        for name, count in counts.items():
            self.allocate(name, self.computed[name] + count)
        batch = self.batch(counts)
        ids = [self.ids[name][self.computed[name] + n] for name, count in counts.items() for n in range(count)]
        logits = self.cache.forward(batch, i32(ids))
        pools = (PoolView(self.num_blocks, i32(self.free), {name: i32(each) for name, each in self.blocks.items()}),)
        outputs = [self.moved(name, counts[name], logits[b]) for b, name in enumerate(counts)]
        return StepReport(tuple(each for each in outputs if each), batch=batch, pools=pools)

    def moved(self, name, count, logits):
        """What a request gets of its logits; None while its prompt is not complete."""
        self.computed[name] += count
        if self.computed[name] < len(self.ids[name]):
            return None
        params = self.requests[name].sampling
        self.ids[name].append(reference_token(logits, params, len(self.ids[name])))
        produced = len(self.ids[name]) - len(self.requests[name].prompt_token_ids)
        ended = produced == params.max_tokens
        if ended:
            self.finish(name)
        return StepOutput(name, (self.ids[name][-1],), "length" if ended else None)

    def finish(self, name):
        del self.requests[name]
        self.free += self.blocks.pop(name)

    def batch(self, counts):
        computed = np.array([self.computed[name] for name in counts], np.int32)
        ends = np.cumsum([0, *counts.values()]).astype(np.int32)
        seq_lens = computed + np.diff(ends)
        known = np.array([len(self.ids[name]) for name in counts], np.int32)
        places = {name: range(self.computed[name], self.computed[name] + count) for name, count in counts.items()}
        width = max((len(self.blocks[name]) for name in counts), default=0)
        tables = [self.blocks[name] + [0] * (width - len(self.blocks[name])) for name in counts]
        return BatchArrays(
            row_of_token=i32(np.repeat(np.arange(len(counts)), np.diff(ends))),
            positions=i32([p for each in places.values() for p in each]),
            query_start_loc=ends,
            seq_lens=seq_lens,
            logits_indices=ends[1:] - 1,
            slot_mapping=(i32([slot for name, each in places.items() for slot in self.slots(name, each)]),),
            block_tables=(np.array(tables, np.int32).reshape(len(counts), width),),
            block_sizes=(SIZE,),
            num_computed_tokens=computed,
            discard=seq_lens < known,
            num_known_tokens=known,
            request_ids=tuple(counts),
        )
