"""`BatchState`: all that the step functions pass on."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

import attrs
from attrs import field, frozen

from fstep.state.digest import digest
from fstep.state.errors import PhaseError
from fstep.state.plan import Plan
from fstep.state.rows import FinishReason, RowPhase, Rows
from fstep.state.step import Step


@frozen(repr=False)
class BatchState:
    """Three lifetimes: `plan` lives as long as the engine, `rows` as long as the requests, `step` for one step.

    `line` and `kv_epoch` say which KV cache holds the rows' keys and values, and after which of its forwards.
    Two states are equal if their rows are.
    """

    plan: Plan = field(eq=False)
    rows: Rows
    line: int = field(default=0, eq=False)
    kv_epoch: int = field(default=0, eq=False)
    step: Step | None = field(default=None, eq=False)

    @classmethod
    def empty(cls, plan: Plan, line: int = 0, kv_epoch: int = 0, rows: int = 8) -> BatchState:
        """A state without requests, for a KV cache of that line and epoch. Rows are added as they are needed."""
        return cls(plan, Rows.empty(rows, len(plan.groups)), line, kv_epoch)

    def need_step(self, phase: str) -> Step:
        """The present step; `PhaseError` if `prepare` has not begun one."""
        if self.step is None:
            raise PhaseError(phase, "prepare")
        return self.step

    def with_step(self, step: Step | None) -> BatchState:
        return BatchState(self.plan, self.rows, self.line, self.kv_epoch, step)

    def detach(self) -> BatchState:
        """The same rows without the products of the step, so that a kept state holds no device memory."""
        return self.with_step(None)

    def digest(self) -> str:
        """A hash of the rows: equal for equal states, on every machine."""
        return digest(self.rows)

    def __repr__(self) -> str:
        return f"BatchState({self.rows!r}, line {self.line}, kv_epoch {self.kv_epoch}, step: {self._made()})"

    def _made(self) -> str:
        if self.step is None:
            return "none"
        made = [each.name for each in attrs.fields(Step) if getattr(self.step, each.name) is not None]
        return f"{len(self.step.inputs.token_ids)} tokens, {' → '.join(made[1:])}"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("row", "request", "phase", "tokens", "computed", "blocks"))
        lines = [head, *(self._html_row(int(row)) for row in self.rows.live())]
        return f"<p>{escape(repr(self))}</p><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def _html_row(self, row: int) -> str:
        rows = self.rows
        cells = (
            row,
            rows.request_ids[row],
            RowPhase(rows.phase[row]).name.lower(),
            f"{rows.prompt_len[row]} + {rows.num_tokens[row] - rows.prompt_len[row]}",
            rows.num_computed_tokens[row],
            " | ".join(" ".join(map(str, blocks[row])) for blocks in rows.blocks),
        )
        return "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)


class RowEvent(NamedTuple):
    """What `commit` did to one request: the tokens it got, and why it ended, if it did.

    A named tuple, since hundreds are made in a step and an attrs value costs four times as much.
    """

    request_id: str
    row: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    weights_version: int = 0  #: that the tokens were drawn with
