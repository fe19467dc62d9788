"""A small engine that is right and shares no code with fstep's own step: what the planted faults are planted in.

Continuous batching under a token budget, prompts in chunks, blocks by request with reference counts, a prefix cache of
full blocks (least recently used first forgotten), preemption by recomputation, rows that are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from attrs import define, field

from fstep.state import KVGroup, NewRequest, SamplingParams
from fstep.testing import BatchArrays, HashCache, HashModel, PoolView, StepOutput, StepReport, reference_token


@define(eq=False)
class Job:
    """A request on its way: what is known of it, what is computed, where it lies."""

    request: NewRequest
    known: list[int]  #: prompt and output
    blocks: list[int] = field(factory=list)
    num_computed: int = 0
    row: int = -1

    @property
    def name(self) -> str:
        return self.request.request_id


class Sound:
    """A `Runner`. Block 0 is the null block; ids are drawn from `HashModel`'s logits, read through the block tables."""

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 2,
        max_num_seqs: int = 3,
        max_num_batched_tokens: int = 5,
        vocab_size: int = 32,
        max_model_len: int = 16,
        prefix_caching: bool = True,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.budget, self.max_model_len, self.prefix_caching = max_num_batched_tokens, max_model_len, prefix_caching
        self.model = HashModel(vocab_size, max_model_len)
        self.cache = HashCache(self.model, (KVGroup(num_blocks, block_size),))
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # in order of arrival: the last is preempted first
        self.free_rows = list(range(max_num_seqs))
        self.params = [SamplingParams()] * max_num_seqs  # by row
        self.stop_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs  # by row
        self.free = deque(range(1, num_blocks))
        self.refs = np.zeros(num_blocks, np.int32)
        self.block_of: dict[object, int] = {}  # by all tokens up to the block's end
        self.key_of: dict[int, object] = {}
        self.cached: dict[int, None] = {}  # held by nobody, the least recently used first

    # What a user calls

    def add(self, request: NewRequest) -> None:
        prompt, most = request.prompt_token_ids.tolist(), request.sampling.max_tokens
        longest = min(self.max_model_len, len(prompt) + (self.max_model_len if most is None else most))
        if any(each.name == request.request_id for each in (*self.waiting, *self.running)):
            raise ValueError(f"request {request.request_id!r} is in use")
        if not 0 < len(prompt) < self.max_model_len or not all(0 <= each < self.model.vocab_size for each in prompt):
            raise ValueError(f"request {request.request_id!r}: its prompt can't be served")
        if self._blocks_for(longest - 1) >= self.num_blocks:
            raise ValueError(f"request {request.request_id!r}: more tokens than all blocks hold")
        self.waiting.append(Job(request, prompt))

    def abort(self, request_id: str) -> None:
        for each in [each for each in (*self.waiting, *self.running) if each.name == request_id]:
            self._leave(each)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> StepReport:
        scheduled = self._schedule()
        pools = (self._pool(),)
        if not scheduled:
            return StepReport((), pools=pools)
        order = sorted(scheduled, key=lambda each: len(each.known) - each.num_computed > 1)  # decodes first
        counts = [scheduled[each] for each in order]
        batch = self._batch(order, counts)
        ids = [each.known[each.num_computed :][:count] for each, count in zip(order, counts, strict=True)]
        logits = self.cache.forward(batch, np.concatenate(ids).astype(np.int32))
        for each, count in scheduled.items():
            each.num_computed += count
            self._remember(each)
        return StepReport(self._hand_out(scheduled, order, logits), batch=batch, pools=pools)

    # The schedule

    def _schedule(self) -> dict[Job, int]:
        """Tokens by request. Running ones come first; nobody is admitted in a step that preempted."""
        scheduled: dict[Job, int] = {}
        left = self.budget
        preempted = False
        for each in list(self.running):
            if not left or each not in self.running:
                break
            count = min(left, len(each.known) - each.num_computed)
            while each in self.running and not self._grow(each, count):
                self._preempt(self.running[-1])
                preempted = True
            if each in self.running:
                scheduled[each] = count
                left -= count
        while self.waiting and self.free_rows and left and not preempted:
            each = self.waiting[0]
            self._hit(each)
            count = min(left, len(each.known) - each.num_computed)
            if not self._grow(each, count):
                self._release(each)
                break
            self.running.append(self.waiting.popleft())
            self._take_row(each)
            scheduled[each] = count
            left -= count
        return scheduled

    def _take_row(self, each: Job) -> None:
        each.row = self.free_rows.pop()
        self.params[each.row] = each.request.sampling
        self.stop_ids[each.row] = frozenset(each.request.sampling.stop_token_ids)

    def _leave(self, each: Job) -> None:
        self._release(each)
        if each in self.running:
            self.running.remove(each)
            self.free_rows.append(each.row)
        else:
            self.waiting.remove(each)

    def _preempt(self, each: Job) -> None:
        self._leave(each)
        self.waiting.appendleft(each)

    # Blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, each: Job, count: int) -> bool:
        """Blocks for `count` more tokens; False, and nothing changed, if there are too few."""
        new = self._blocks_for(each.num_computed + count) - len(each.blocks)
        if new > len(self.free) + len(self.cached):
            return False
        each.blocks.extend(self._new_block() for _ in range(new))
        return True

    def _new_block(self) -> int:
        if self.free:
            block = self.free.popleft()
        else:
            block = next(iter(self.cached))
            del self.cached[block], self.block_of[self.key_of.pop(block)]
        self.cache.forget(0, np.array([block], np.int32))
        self.refs[block] = 1
        return block

    def _release(self, each: Job) -> None:
        for block in reversed(each.blocks):
            self._drop(block)
        each.blocks = []
        each.num_computed = 0

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] > 0:
            return
        if block in self.key_of:
            self.cached[block] = None
        else:
            self.free.append(block)

    def _key(self, each: Job, number: int) -> object:
        return each.request.cache_key, tuple(each.known[: (number + 1) * self.block_size])

    def _hit(self, each: Job) -> None:
        """Takes the known blocks that it begins with; its last token is left to compute."""
        each.blocks = []
        for number in range((len(each.known) - 1) // self.block_size):
            block = self.block_of.get(self._key(each, number))
            if block is None:
                break
            self.cached.pop(block, None)
            self.refs[block] += 1
            each.blocks.append(block)
        each.num_computed = len(each.blocks) * self.block_size

    def _remember(self, each: Job) -> None:
        for number in range(each.num_computed // self.block_size if self.prefix_caching else 0):
            key, block = self._key(each, number), each.blocks[number]
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key], self.key_of[block] = block, key

    def _pool(self) -> PoolView:
        held = {each.name: np.array(each.blocks, np.int32) for each in self.running}
        free, cached = (np.array(list(each), np.int32) for each in (self.free, self.cached))
        return PoolView(self.num_blocks, free, held, cached, self.refs.copy())

    # The batch

    def _batch(self, order: Sequence[Job], counts: Sequence[int]) -> BatchArrays:
        computed = np.array([each.num_computed for each in order], np.int32)
        known = np.array([len(each.known) for each in order], np.int32)
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = [each.num_computed + np.arange(count) for each, count in zip(order, counts, strict=True)]
        slots = [self._slots(each, at) for each, at in zip(order, positions, strict=True)]
        table = np.zeros((len(order), self._blocks_for(self.max_model_len)), np.int32)
        for b, each in enumerate(order):
            table[b, : len(each.blocks)] = each.blocks
        return BatchArrays(
            row_of_token=np.repeat(np.arange(len(order)), counts).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start_loc=starts,
            seq_lens=computed + np.diff(starts),
            logits_indices=starts[1:] - 1,
            slot_mapping=(np.concatenate(slots).astype(np.int32),),
            block_tables=(table,),
            block_sizes=(self.block_size,),
            num_computed_tokens=computed,
            discard=computed + np.diff(starts) < known,
            num_known_tokens=known,
            request_ids=tuple(each.name for each in order),
        )

    def _slots(self, each: Job, positions: np.ndarray) -> np.ndarray:
        blocks = np.array(each.blocks)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    # The tokens

    def _hand_out(self, scheduled: dict[Job, int], order: Sequence[Job], logits: np.ndarray) -> list[StepOutput]:
        """A token for each request that is computed to its end; `logits` lie as the batch does, in `order`."""
        assert len(scheduled) == len(order)
        outputs: list[StepOutput] = []
        for each, row_logits in zip(order, logits, strict=True):
            if each.num_computed < len(each.known):
                continue
            token = reference_token(row_logits, self.params[each.row], len(each.known), each.request.sample_index)
            each.known.append(token)
            outputs.append(StepOutput(each.name, (token,), self._reason(each, token)))
            if outputs[-1].finish_reason:
                self._leave(each)
        return outputs

    def _reason(self, each: Job, token: int) -> str | None:
        if token in self.stop_ids[each.row]:
            return "stop"
        made = len(each.known) - len(each.request.prompt_token_ids)
        return "length" if made == self.params[each.row].max_tokens or len(each.known) == self.max_model_len else None
