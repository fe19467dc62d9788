"""FastDeploy's tasks of a step (as `insert_tasks_v1` of its model runners gets them) as a `Schedule`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen

from fstep.interop._errors import InteropError, refuse, refuse_unless, same_tokens, sampling_of
from fstep.state import (
    BatchState,
    Finished,
    FinishReason,
    NewRequest,
    Ragged,
    RequestError,
    Resumed,
    RowPhase,
    Rows,
    SamplingParams,
    Schedule,
    i32,
)

_KINDS: Final = MappingProxyType({0: "prefill", 1: "decode", 2: "preempted"})
_ABSENT: Final = MappingProxyType(
    {
        "guided_json": "grammars can't be taken",
        "guided_regex": "grammars can't be taken",
        "guided_grammar": "grammars can't be taken",
        "structural_tag": "grammars can't be taken",
        "pooling_params": "pooling can't be asked for",
        "multimodal_inputs": "multimodal inputs can't be taken",
        "draft_token_ids": "drafts can't be verified yet",
        "disaggregate_info": "prompts can't be prefilled elsewhere",
    }
)
_UNBUILT: Final = MappingProxyType(
    {
        "enable_thinking": (),
        "reasoning_max_tokens": (),
        "repetition_penalty": (1,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "min_tokens": (0, 1),
        "bad_words_token_ids": (),
        "stop_token_ids": (),
        "stop_seqs_len": (),
        "logits_processors_args": (),
        "logprobs": (),
        "prompt_logprobs": (),
    }
)
_SAMPLING: Final = MappingProxyType({"temperature": 0.95, "top_p": 0.7, "top_k": 0, "min_p": 0.0, "seed": None})


@frozen(eq=False)
class _Task:
    """One request of the step: tokens, blocks, and what becomes of it first."""

    request_id: str
    count: int
    blocks: Sequence[int]  #: that it doesn't hold yet
    new: NewRequest | None = None
    resumed: Resumed | None = None


def from_fastdeploy(tasks: Iterable[Any], state: BatchState, seed: int = 0, aborted: Iterable[str] = ()) -> Schedule:
    """The `Schedule` of FastDeploy-like tasks, for the state before the step.

    A task has `request_id`, `task_type` (its `value`: 0 prefill, 1 decode, 2 preempted) and, but for a preempted one,
    `block_tables`, the request's whole table. A prefill task computes tokens `prefill_start_index` to
    `prefill_end_index` of prompt and output: of a new request, of one that was preempted (what lies before the start is
    a prefix hit then), or the next chunk. A decode
    task brings blocks; every running request whose prompt is computed decodes a token in each step, with a task or
    without, in the order of the rows and before the prefills. Requests that ended by a rule of ours are finished
    first, and so are those in `aborted`. FastDeploy counts blocks from 0, so block `b` there is block `b + 1` here. A
    request without a seed gets one made of `seed` and its id; the other defaults are FastDeploy's.

    Raises `InteropError`, with request, field and value, for what can't be taken (grammars, pooling, multimodal inputs,
    drafts, thinking limits, penalties, bad words, stop sequences, log-probabilities, other task types),
    and for a task that doesn't fit the state.
    """
    if len(state.plan.groups) != 1:
        raise InteropError(
            None, "block_tables", len(state.plan.groups), "tasks have one table: there must be one KV group"
        )
    rows = state.rows
    finished = _finished(rows, frozenset(aborted))
    gone = {each.request_id for each in finished}
    alive = {name: row for name, row in rows.request_ids.row_of.items() if name not in gone}
    by_kind = _by_kind(tasks)
    preempted = tuple(each.request_id for each in by_kind["preempted"] if each.request_id not in gone)
    for name in preempted:
        _row(name, "preempted", alive)
    decodes = _decodes(by_kind["decode"], rows, {name: alive[name] for name in alive if name not in preempted})
    prefills = [_prefill(each, rows, alive, seed) for each in by_kind["prefill"]]
    todo = (*decodes, *prefills)
    return Schedule(
        finished=finished,
        preempted=preempted,
        resumed=tuple(each.resumed for each in prefills if each.resumed is not None),
        new=tuple(each.new for each in prefills if each.new is not None),
        request_ids=tuple(each.request_id for each in todo),
        num_scheduled_tokens=i32(each.count for each in todo),
        new_blocks=(Ragged.of([each.blocks for each in todo]),),
    )


def _by_kind(tasks: Iterable[Any]) -> Mapping[str, list[Any]]:
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS.values()}
    for task in tasks:
        value = getattr(task.task_type, "value", task.task_type)
        if value not in _KINDS:
            raise InteropError(task.request_id, "task_type", value, f"must be one of {dict(_KINDS)}")
        found[_KINDS[value]].append(task)
    return found


def _finished(rows: Rows, aborted: frozenset[str]) -> tuple[Finished, ...]:
    ended = [(name, RowPhase(rows.phase[row]).finish_reason) for name, row in rows.request_ids.row_of.items()]
    return tuple(Finished(name, reason or FinishReason.ABORT) for name, reason in ended if reason or name in aborted)


def _row(name: str, kind: str, alive: Mapping[str, int]) -> int:
    if name not in alive:
        raise InteropError(name, "task_type", kind, "the request has no row: it was never new, or has ended")
    return alive[name]


def _decodes(tasks: Sequence[Any], rows: Rows, alive: Mapping[str, int]) -> list[_Task]:
    """A token of each running request whose prompt is computed, and the blocks that the decode tasks bring."""
    tables = {task.request_id: task.block_tables for task in tasks}
    for name in tables:
        _row(name, "decode", alive)
    found: list[_Task] = []
    for name, row in alive.items():
        if rows.phase[row] == RowPhase.RUNNING and rows.num_computed_tokens[row] >= rows.prefill_len[row]:
            found.append(_Task(name, 1, _new_blocks(name, tables.pop(name, None), rows, row)))
    for name in tables:
        raise InteropError(name, "task_type", "decode", "its prompt is not computed yet, or it is preempted")
    return found


def _prefill(task: Any, rows: Rows, alive: Mapping[str, int], seed: int) -> _Task:
    name, start, end = task.request_id, task.prefill_start_index, task.prefill_end_index
    refuse(name, task, _ABSENT)
    row = alive.get(name)
    resumed = row is not None and rows.phase[row] == RowPhase.PREEMPTED
    if row is not None and not resumed and start != rows.num_computed_tokens[row]:
        limit = f"must be {rows.num_computed_tokens[row]}, the tokens that are computed"
        raise InteropError(name, "prefill_start_index", start, limit)
    output = list(getattr(task, "output_token_ids", None) or ())
    if row is None:
        if output:
            raise InteropError(name, "output_token_ids", output, "must be empty: the request has no row")
        request = evolve(_request(task, seed), num_computed_tokens=start)
        return _Task(name, end - start, _shifted(task.block_tables), request)
    if not same_tokens(rows.tokens[row], [*task.prompt_token_ids, *output]):
        raise InteropError(name, "output_token_ids", output, f"must be {rows.output(row).tolist()}, as in the state")
    back = Resumed(name, start) if resumed else None
    return _Task(name, end - start, _new_blocks(name, task.block_tables, rows, row), resumed=back)


def _shifted(table: Iterable[int]) -> list[int]:
    return [int(block) + 1 for block in table]


def _new_blocks(name: str, table: Iterable[int] | None, rows: Rows, row: int) -> list[int]:
    """What a whole table has beyond the blocks that the row holds, which must be its beginning."""
    if table is None:
        return []
    blocks, held = _shifted(table), rows.blocks[0][row].tolist()
    if blocks[: len(held)] != held:
        limit = f"must begin with the blocks that the request holds, {[block - 1 for block in held]}"
        raise InteropError(name, "block_tables", [block - 1 for block in blocks], limit)
    return blocks[len(held) :]


def _request(task: Any, seed: int) -> NewRequest:
    name = task.request_id
    for field, neutral in _UNBUILT.items():
        refuse_unless(name, _asked(task, field), field, neutral, "is not built yet")
    values = {field: _asked(task, field, default) for field, default in _SAMPLING.items()}
    ends = _asked(task, "eos_token_ids")
    if ends is not None:
        values |= {"stop_token_ids": np.ravel(ends).tolist(), "ignore_eos": True}
    try:
        return NewRequest(name, task.prompt_token_ids, _with_max_tokens(task, sampling_of(name, seed, values)))
    except RequestError as error:
        raise InteropError(name, error.field, error.value, error.limit) from None


def _with_max_tokens(task: Any, params: SamplingParams) -> SamplingParams:
    """Without a limit of its own a request may go on to the model's length."""
    return evolve(params, max_tokens=_asked(task, "max_tokens"))


def _asked(task: Any, field: str, default: Any = None) -> Any:
    """A parameter of the task itself or of its `sampling_params`."""
    for source in (task, getattr(task, "sampling_params", None)):
        value = getattr(source, field, None)
        if value is not None:
            return value
    return default
