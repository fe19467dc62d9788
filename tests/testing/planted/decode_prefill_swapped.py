"""Fault: the batch lies decodes first, but its tokens are handed out in the order of the schedule: a decode gets the
token of a prefill, and the other way round.

Seen in engines that reorder rows for the attention kernel and forget one of the arrays or maps that go by row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fstep.testing import StepOutput, reference_token
from tests.testing.planted.sound import Job, Sound


class DecodePrefillSwapped(Sound):
    def _hand_out(self, scheduled: dict[Job, int], order: Sequence[Job], logits: np.ndarray) -> list[StepOutput]:
        """A token for each request that is computed to its end; `logits` lie as the batch does, in `order`."""
        assert len(scheduled) == len(order)
        outputs: list[StepOutput] = []
        for each, row_logits in zip(scheduled, logits, strict=True):
            if each.num_computed < len(each.known):
                continue
            token = reference_token(row_logits, self.params[each.row], len(each.known), each.request.sample_index)
            each.known.append(token)
            outputs.append(StepOutput(each.name, (token,), self._reason(each, token)))
            if outputs[-1].finish_reason:
                self._leave(each)
        return outputs
