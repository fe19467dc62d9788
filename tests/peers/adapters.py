"""Vectors to our values and back: one function a rule, from a vector's `input` to what we answer.

An adapter returns the fields of `expected`. It raises `NotBuiltError` for an input that asks for something that has no
code here yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fstep import ops
from fstep.models.tokenizer import Tokenizer
from fstep.ops import _sample, prefix
from fstep.ops._pad import descriptor_for
from fstep.shell import CpuDevice
from fstep.shell.detokenizer import Detokenizer, StopMatcher
from fstep.state import (
    BatchDescriptor,
    BatchState,
    BlockPool,
    CacheKey,
    Env,
    Item,
    KVGroup,
    NewRequest,
    Output,
    Plan,
    Ragged,
    RequestError,
    RowEvent,
    Sampled,
    SamplingParams,
    SchedLimits,
    SchedState,
    Schedule,
    i32,
)
from tests.peers.group_adapters import GROUP_ADAPTERS

Given = Mapping[str, Any]
BLOCK = 16
LONG = 1 << 20  # a model length that is never reached


class NotBuiltError(Exception):
    """The vector asks for something that has no code here yet; the message names it."""


# Batches by hand ----------------------------------------------------------------------------------------------------


def plan_of(num_blocks: int, block_size: int = BLOCK, vocab_size: int = 1000, **more: Any) -> Plan:
    return Plan(vocab_size, more.pop("max_model_len", LONG), (KVGroup(num_blocks, block_size),), **more)


def drawn(token_ids: Sequence[int]) -> Sampled:
    """One token for each request; -1 for one that draws none."""
    column = np.array(token_ids, np.int32).reshape(-1, 1)
    return Sampled(column, (column[:, 0] >= 0).astype(np.int32), np.zeros(len(column), np.int32))


def running(
    num_computed: Sequence[int], num_tokens: Sequence[int], tables: Sequence[Sequence[int]], plan: Plan
) -> BatchState:
    """Requests "0", "1", … with so many tokens, of which so many are computed, and these blocks."""
    new = tuple(
        NewRequest(str(n), [1] * length, SamplingParams(temperature=0, max_tokens=None))
        for n, length in enumerate(num_tokens)
    )
    started = [n for n, computed in enumerate(num_computed) if computed]
    todo = Schedule(
        new=new,
        request_ids=tuple(str(n) for n in started),
        num_scheduled_tokens=i32(num_computed[n] for n in started),
        new_blocks=(Ragged.of([tables[n] for n in started]),),
    )
    return ops.commit(ops.prepare(BatchState.empty(plan), todo), drawn([-1] * len(started)))[0]


def next_step(
    num_computed: Sequence[int],
    counts: Sequence[int],
    num_tokens: Sequence[int],
    tables: Sequence[Sequence[int]],
    plan: Plan,
) -> BatchState:
    """Requests that have got so far, with so many tokens scheduled of each."""
    state = running(num_computed, num_tokens, tables, plan)
    todo = Schedule(
        request_ids=tuple(str(n) for n in range(len(counts))),
        num_scheduled_tokens=i32(counts),
        new_blocks=(Ragged.of([() if num_computed[n] else tables[n] for n in range(len(counts))]),),
    )
    return ops.prepare(state, todo)


def own_blocks(lengths: Sequence[int], block_size: int = BLOCK) -> list[list[int]]:
    """Blocks 1, 2, … dealt out, enough for each length."""
    ends = np.cumsum([-(-length // block_size) for length in lengths], dtype=int).tolist()
    return [list(range(start + 1, end + 1)) for start, end in zip([0, *ends], ends, strict=False)]


def step_inputs(given: Given) -> dict[str, Any]:
    computed, counts, known = given["num_computed_tokens"], given["num_scheduled_tokens"], given["num_tokens"]
    tables = own_blocks(known)
    inputs = next_step(computed, counts, known, tables, plan_of(1 + sum(map(len, tables)))).step.inputs
    return {
        "req_indices": np.repeat(inputs.rows, inputs.num_scheduled_tokens).tolist(),
        "positions": inputs.positions.tolist(),
        "query_start_loc": inputs.query_start_loc.tolist(),
        "seq_lens": inputs.seq_lens.tolist(),
        "logits_indices": inputs.logits_indices.tolist(),
        "discard": inputs.discard.tolist(),
    }


def slot_mapping(given: Given) -> dict[str, Any]:
    """Tokens of a row need not be neighbours, nor start at 0, so each is asked for in a batch of its own.

    A vector's blocks may be 0, which we never hand out: all of its blocks are named one higher, and its slots lie one
    block lower.
    """
    if given["cp_size"] > 1:
        raise NotBuiltError("slots under context parallelism")
    size, starts, positions = given["block_size"], given["query_start_loc"], given["positions"]
    slots = [-1] * given["num_tokens_padded"]
    for row, start, end in zip(given["rows"], starts, starts[1:], strict=False):
        for token in range(start, end) if row >= 0 else ():
            slots[token] = _slot(given["block_table"][row], positions[token], size) - size
    return {"slot_mapping": slots}


def _slot(table: Sequence[int], position: int, size: int) -> int:
    blocks = [block + 1 for block in table[: position // size + 1]]
    plan = plan_of(max(blocks) + 1, size)
    state = next_step([position], [1], [position + 1], [blocks], plan)
    return int(ops.pad(state).step.padding.slot_mapping[0][0])


def pad_tail(given: Given) -> dict[str, Any]:
    starts, lengths, slots = given["query_start_loc"], given["seq_lens"], given["slot_mapping"]
    counts = np.diff(starts).tolist()
    to = BatchDescriptor(given["num_tokens_padded"], given["num_reqs_padded"])
    tables = own_blocks(lengths)
    plan = plan_of(1 + sum(map(len, tables)), capture=(to,))
    computed = [length - count for length, count in zip(lengths, counts, strict=True)]
    state = next_step(computed, counts, lengths, tables, plan)
    inputs = evolve(state.step.inputs, slot_mapping=(i32(slots),))
    padding = ops.pad(state.with_step(evolve(state.step, inputs=inputs))).step.padding
    return {
        "query_start_loc": padding.query_start_loc.tolist(),
        "seq_lens": padding.seq_lens.tolist(),
        "slot_mapping": padding.slot_mapping[0].tolist(),
    }


def graph_pad_size(given: Given) -> dict[str, Any]:
    capture = tuple(BatchDescriptor(size, size) for size in given["capture_sizes"])
    plan = plan_of(2, capture=capture)
    return {"num_tokens_padded": [descriptor_for(plan, count, 1).num_tokens for count in given["num_tokens"]]}


# Sampling -----------------------------------------------------------------------------------------------------------


def scores(logits: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> torch.Tensor:
    """What `sample` draws from: the logits of each row after its filters, -inf where an id is dropped."""
    matrix = torch.tensor(logits, dtype=torch.float32)
    seen: list[torch.Tensor] = []

    def without_noise(made: torch.Tensor, columns: object) -> torch.Tensor:  # noqa: ARG001
        seen.append(made.clone())
        return made

    plan = plan_of(1 + len(params), vocab_size=matrix.shape[1])
    new = tuple(NewRequest(str(n), [0], evolve(each, seed=0)) for n, each in enumerate(params))
    blocks = (Ragged.of([[n + 1] for n in range(len(params))]),)
    todo = Schedule(
        new=new,
        request_ids=tuple(each.request_id for each in new),
        num_scheduled_tokens=i32([1] * len(params)),
        new_blocks=blocks,
    )
    state = ops.prepare(BatchState.empty(plan), todo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sample, "_with_noise", without_noise)
        ops.sample(state.with_step(evolve(state.step, output=Output(matrix))), Env(None, {}, CpuDevice()))
    hot = [n for n, each in enumerate(params) if not each.greedy]
    best = torch.nn.functional.one_hot(_sample._best(matrix)[1], matrix.shape[1]).log()  # what a greedy row draws from
    return best.index_copy(0, torch.tensor(hot, dtype=torch.int64), seen[0]) if hot else best


def kept(logits: Sequence[Sequence[float]], params: Sequence[SamplingParams]) -> dict[str, Any]:
    return {"kept_token_ids": [row.isfinite().nonzero()[:, 0].tolist() for row in scores(logits, params)]}


def temperature(given: Given) -> dict[str, Any]:
    row = scores([given["logits"]], [SamplingParams(temperature=given["temperature"])])[0]
    return {"probs": row.double().softmax(-1).tolist()}


def top_k(given: Given) -> dict[str, Any]:
    return kept(given["logits"], [SamplingParams(top_k=k or 0) for k in given["top_k"]])


def top_p(given: Given) -> dict[str, Any]:
    return kept(given["logits"], [SamplingParams(top_p=p or 1) for p in given["top_p"]])


def top_k_top_p(given: Given) -> dict[str, Any]:
    pairs = zip(given["top_k"], given["top_p"], strict=True)
    return kept(given["logits"], [SamplingParams(top_k=k or 0, top_p=p or 1) for k, p in pairs])


def min_p(given: Given) -> dict[str, Any]:
    return kept(given["logits"], [SamplingParams(min_p=given["min_p"])] * len(given["logits"]))


ABSENT = MappingProxyType(
    {
        "logit_bias": "logit bias",
        "masked_stop_ids": "min_tokens",
        "allowed_token_ids": "allowed token ids",
        "bad_words_token_ids": "bad words",
        "repetition_penalty": "penalties",
        "frequency_penalty": "penalties",
        "presence_penalty": "penalties",
    }
)


def sampling_chain(given: Given) -> dict[str, Any]:
    for name, what in ABSENT.items():
        if given[name] not in (None, 0.0, 1.0 if name == "repetition_penalty" else None):
            raise NotBuiltError(what)
    params = SamplingParams(
        temperature=given["temperature"],
        top_k=given["top_k"] or 0,
        top_p=given["top_p"] or 1,
        min_p=given["min_p"] or 0,
    )
    probs = scores([given["logits"]], [params])[0].double().softmax(-1).tolist()
    best = _sample._best(torch.tensor([given["logits"]]))[1]
    return {"greedy_token_id": int(best[0]), "probs": probs}


# Stop rules ---------------------------------------------------------------------------------------------------------


def stop_check(given: Given) -> dict[str, Any]:
    """The tokens at once, as after accepted drafts, and one at a time: both must give the same."""
    if given["repetition"]:
        raise NotBuiltError("the stop at a repeated tail")
    output = given["output_token_ids"]
    at_once = _kept_of(given, [output])
    one_by_one = _kept_of(given, [[token] for token in output])
    assert at_once == one_by_one
    return at_once


def _kept_of(given: Given, steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    eos = given["eos_token_id"]
    ends = () if eos is None else (eos,)
    plan = plan_of(64, max_model_len=given["max_model_len"], eos_token_ids=ends)
    params = SamplingParams(temperature=0, max_tokens=given["max_tokens"], stop_token_ids=given["stop_token_ids"])
    request = NewRequest("r", [1] * given["prompt_len"], params)
    blocks = (Ragged.of([range(1, 4)]),)
    todo = Schedule(
        new=(request,), request_ids=("r",), num_scheduled_tokens=i32([given["prompt_len"]]), new_blocks=blocks
    )
    state, tokens, reason = BatchState.empty(plan), [], None
    for step in steps:
        got = Sampled(np.array([step], np.int32), i32([len(step)]), i32([0]))
        state, (event,) = ops.commit(ops.prepare(state, todo), got)
        tokens += event.token_ids
        reason = event.finish_reason
        if reason:
            break
        todo = Schedule(request_ids=("r",), num_scheduled_tokens=i32([len(step)]))
    stopped_at = tokens[-1] if reason == "stop" and tokens[-1] != eos else None
    return {"num_kept": len(tokens), "finish_reason": reason and reason.value, "stop_token_id": stopped_at}


def stop_string(given: Given) -> dict[str, Any]:
    """The old characters have been searched before, without a match that counts."""
    text, new = given["text"], given["num_new_chars"]
    old = text[: len(text) - new]
    matcher = StopMatcher(given["stop"])
    matcher.feed(old)
    found = matcher.feed(text[len(old) :])
    if found is None:
        return {"matched": None, "truncate_to": None, "output": text}
    end, matched = len(old) + found[0], found[1]
    end -= 0 if given["include_stop_in_output"] else len(matched)
    return {"matched": matched, "truncate_to": end, "output": text[:end]}


def words(tokens: Sequence[str]) -> Tokenizer:
    """Token `n` stands for `tokens[n]`, written as it is."""
    backend = Backend(models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def of_bytes(tokens: Sequence[bytes]) -> Tokenizer:
    """Token `n` stands for the bytes `tokens[n]`."""
    alphabet = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    alphabet |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in alphabet)}
    spelled = ["".join(alphabet[byte] for byte in token) for token in tokens]
    backend = Backend(models.WordLevel({token: id_ for id_, token in enumerate(spelled)}, unk_token=spelled[0]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def stop_string_stream(given: Given) -> dict[str, Any]:
    distinct = list(dict.fromkeys(given["deltas"]))
    include = given["include_stop_in_output"]
    detokenizer = Detokenizer(words(distinct), given["stop"], include_stop_str_in_output=include)
    chunks: list[str] = []
    for delta in given["deltas"]:
        chunks.append(detokenizer.add([distinct.index(delta)]))
        if detokenizer.stopped is not None:
            break
    chunks[-1] += detokenizer.flush()
    return {"chunks": chunks, "matched": detokenizer.stopped, "text": detokenizer.text}


def incremental_detokenize(given: Given) -> dict[str, Any]:
    distinct = list(dict.fromkeys(given["token_bytes_hex"]))
    detokenizer = Detokenizer(of_bytes([bytes.fromhex(each) for each in distinct]))
    deltas = [detokenizer.add([distinct.index(each)]) for each in given["token_bytes_hex"]]
    detokenizer.flush()
    return {"deltas": deltas, "text": detokenizer.text}


# Schedules ----------------------------------------------------------------------------------------------------------


def prompt_of(spec: Any) -> list[int]:
    match spec:
        case {"fill": token, "n": count}:
            return [token] * count
        case {"range": [start, stop]}:
            return list(range(start, stop))
        case {"range": int(start), "n": count}:
            return list(range(start, start + count))
        case {"range": int(count)}:
            return list(range(count))
        case list():
            return spec
    raise NotBuiltError(f"a prompt written as {spec}")


def schedule_trace(given: Given) -> dict[str, Any]:
    """Steps without a model: every request whose prompt is complete draws 1000, 1001, … in turn."""
    if not given["chunked_prefill"]:
        raise NotBuiltError("prompts that are never cut")
    limits = SchedLimits(
        max_num_seqs=given["max_num_reqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        long_prefill_token_threshold=given["long_prefill_token_threshold"],
    )
    sizes = given["num_blocks"] + 1, given["block_size"]
    plan = plan_of(*sizes, 1 << 12, max_model_len=1 << 14, prefix_caching=given["prefix_caching"])
    state, sched = BatchState.empty(plan), SchedState.empty(plan, limits)
    steps = []
    for number in range(given["num_steps"]):
        for each in given["requests"]:
            if each["arrive_step"] == number:
                params = SamplingParams(temperature=0, max_tokens=each["max_tokens"], ignore_eos=True)
                sched = ops.add(sched, state, NewRequest(each["id"], prompt_of(each["prompt"]), params))
        todo, sched = ops.schedule(sched, state)
        state = ops.prepare(state, todo)
        inputs = state.step.inputs
        computed = (inputs.seq_lens - inputs.num_scheduled_tokens).tolist()
        output = inputs.sample_positions - state.rows.prompt_len[inputs.rows]
        state, events = ops.commit(state, drawn(np.where(inputs.discard, -1, 1000 + output)))
        steps.append(_traced(todo, computed, events))
    return {"steps": steps}


def _traced(todo: Schedule, computed: Sequence[int], events: Sequence[RowEvent]) -> dict[str, Any]:
    return {
        "num_scheduled_tokens": dict(zip(todo.request_ids, todo.num_scheduled_tokens.tolist(), strict=True)),
        "num_computed_tokens": dict(zip(todo.request_ids, computed, strict=True)),
        "preempted": list(todo.preempted),
        "finished": [event.request_id for event in events if event.finish_reason],
    }


# The prefix cache ---------------------------------------------------------------------------------------------------


def block_hash_chain(given: Given) -> dict[str, Any]:
    """With extra keys of any kind, so by the hash of one block; without, the whole chain must give the same."""
    ids, size, parent = given["token_ids"], given["block_size"], bytes.fromhex(given["root_hash_hex"])
    starts = range(0, len(ids) - size + 1, size)
    extras = given["extra_keys"] or [None] * len(starts)
    hashes: list[bytes] = []
    for start, extra in zip(starts, extras, strict=True):
        hashes.append(prefix.block_hash(hashes[-1] if hashes else parent, ids[start : start + size], extra or ()))
    if given["extra_keys"] is None:
        assert hashes == list(prefix.hashes_of(i32(ids), size, CacheKey(), parent=parent))
    return {"block_hashes_hex": [each.hex() for each in hashes]}


def block_hash_extra_keys(given: Given) -> dict[str, Any]:
    items = tuple(Item(each["hash"], each["offset"], each["length"]) for each in given["items"])
    key = CacheKey(salt=given["salt"], lora_name=given["lora"], items=items)
    return {"extra_keys": [list(each) for each in prefix.extra_keys(*given["block_range"], key)]}


def prefix_hit_length(given: Given) -> dict[str, Any]:
    size = given["block_size"]
    cache = _Cache(64, size)
    cache.allocate(given["cached_prompt"], given["cached_salt"])
    cached, asked = (
        list(prefix.hashes_of(i32(given[name]), size, CacheKey(salt=given[salt])))
        for name, salt in (("cached_prompt", "cached_salt"), ("prompt", "salt"))
    )
    equal = sum(a == b for a, b in zip(cached, asked, strict=False))
    return {"num_equal_blocks": equal, "hit_tokens": cache.allocate(given["prompt"], given["salt"])["hit_tokens"]}


class _Cache:
    """A pool of blocks whose requests come in through `schedule`, are never stepped, and go."""

    def __init__(self, num_blocks: int, block_size: int):
        self.plan = plan_of(num_blocks + 1, block_size)
        self.sched = SchedState.empty(self.plan, SchedLimits(max_num_batched_tokens=LONG))

    @property
    def pool(self) -> BlockPool:
        return self.sched.pools[0]

    def allocate(self, prompt: Sequence[int], salt: str | None = None) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=1)
        request = NewRequest("r", prompt, params, CacheKey(salt=salt))
        state = BatchState.empty(self.plan)
        hashes = prefix.all_hashes(self.plan, request.prompt_token_ids, request.cache_key)
        hit = prefix.hit_length((self.pool,), self.plan.groups, hashes, len(prompt))
        try:
            todo, sched = ops.schedule(ops.add(self.sched, state, request), state)
        except RequestError:  # it would never fit
            return {"hit_tokens": hit, "block_ids": None}
        if not todo.new:
            return {"hit_tokens": hit, "block_ids": None}
        self.sched = evolve(sched, running=())
        return {"hit_tokens": todo.new[0].num_computed_tokens, "block_ids": todo.new_blocks[0][0].tolist()}

    def free(self, blocks: Sequence[int]) -> dict[str, Any]:
        self.sched = evolve(self.sched, pools=(self.pool.give(i32(blocks)),))
        return {"free_queue": self.pool.free.tolist()}

    def reset(self) -> dict[str, Any]:
        try:
            self.sched = evolve(self.sched, pools=(self.pool.forgotten(),))
        except ValueError:
            return {"ok": False}
        return {"ok": True}


def block_pool_trace(given: Given) -> dict[str, Any]:
    cache = _Cache(given["num_blocks"], given["block_size"])
    held: dict[str, list[int]] = {}
    results: list[dict[str, Any]] = []
    for each in given["ops"]:
        match each:
            case {"op": "allocate", "id": name, "prompt": prompt}:
                results.append(cache.allocate(prompt_of(prompt), each.get("salt")))
                held[name] = results[-1]["block_ids"] or []
            case {"op": "free", "id": name}:
                results.append(cache.free(held.pop(name)))
            case {"op": "reset_prefix_cache"}:
                results.append(cache.reset())
            case _:
                raise NotBuiltError(f"the operation {each['op']}")
    return {"results": results}


def free_queue(given: Given) -> dict[str, Any]:
    """Ids are named one higher here: block 0 is never in the queue. Blocks go to its tail if they are known."""
    used = [*given["initial"], *(id_ for _, ids in given["ops"] if isinstance(ids, list) for id_ in ids)]
    pool = BlockPool.full(max(used, default=0) + 2)
    pool = pool.take(pool.num_free)[1]
    pool = _appended(pool, given["initial"])
    results: list[dict[str, Any]] = []
    for name, argument in given["ops"]:
        try:
            returned, pool = _queued(pool, name, argument)
        except ValueError:
            results.append({"error": "the queue was empty"})
            continue
        results.append({"returned": returned, "queue": (pool.free - 1).tolist()})
    return {"results": results}


def _queued(pool: BlockPool, name: str, argument: Any) -> tuple[list[int] | None, BlockPool]:
    match name:
        case "popleft" | "popleft_n":
            taken, pool = pool.take(1 if argument is None else argument)
            return (taken - 1).tolist(), pool
        case "append":
            return None, _appended(pool, argument)
        case "prepend":
            return None, pool.give(i32(argument) + 1, forget=True)
        case "remove":
            return None, pool.share([argument + 1])
    raise NotBuiltError(f"the operation {name}")


def _appended(pool: BlockPool, ids: Sequence[int]) -> BlockPool:
    blocks = [id_ + 1 for id_ in ids]
    return pool.cache(blocks, [bytes([block]) for block in blocks]).give(i32(blocks[::-1]))


ADAPTERS: Mapping[str, Callable[[Given], dict[str, Any]]] = MappingProxyType(
    {
        "block_hash_chain": block_hash_chain,
        "block_hash_extra_keys": block_hash_extra_keys,
        "prefix_hit_length": prefix_hit_length,
        "block_pool_trace": block_pool_trace,
        "free_queue": free_queue,
        "chunked_prefill_schedule": schedule_trace,
        "graph_pad_size": graph_pad_size,
        "incremental_detokenize": incremental_detokenize,
        "min_p": min_p,
        "pad_tail": pad_tail,
        "preemption": schedule_trace,
        "prefix_cache_schedule": schedule_trace,
        "sampling_chain": sampling_chain,
        "slot_mapping": slot_mapping,
        "step_inputs": step_inputs,
        "stop_check": stop_check,
        "stop_string": stop_string,
        "stop_string_stream": stop_string_stream,
        "temperature": temperature,
        "top_k": top_k,
        "top_k_top_p": top_k_top_p,
        "top_p": top_p,
        **GROUP_ADAPTERS,
    }
)


def same(ours: Any, theirs: Any) -> bool:
    """Equal, floats to 1e-4 relative (1e-5 absolute: probabilities are given with five digits)."""
    if isinstance(theirs, Mapping):
        return (
            isinstance(ours, Mapping) and ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
        )
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float):
        return isinstance(ours, int | float) and math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)
    if theirs == "-inf":
        return ours == -math.inf
    return type(ours) is type(theirs) and ours == theirs
