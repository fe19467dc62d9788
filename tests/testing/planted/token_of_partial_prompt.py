"""Fault: a chunk of a prompt that isn't its last gives a token too.

Seen when chunked prefill came to engines that had sampled for each row of a batch, and the mask was left out on one
path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fstep.testing import StepOutput, reference_token
from tests.testing.planted.sound import Job, Sound


class TokenOfPartialPrompt(Sound):
    def _hand_out(self, scheduled: dict[Job, int], order: Sequence[Job], logits: np.ndarray) -> list[StepOutput]:
        """A token for each request that is computed to its end; `logits` lie as the batch does, in `order`."""
        assert len(scheduled) == len(order)
        outputs: list[StepOutput] = []
        for each, row_logits in zip(order, logits, strict=True):
            token = reference_token(row_logits, self.params[each.row], len(each.known), each.request.sample_index)
            each.known.append(token)
            outputs.append(StepOutput(each.name, (token,), self._reason(each, token)))
            if outputs[-1].finish_reason:
                self._leave(each)
        return outputs
