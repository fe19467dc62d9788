"""Fault: the first token of a block is written into the block before.

Seen in slot computations that take the block from the length before the token was added, and the offset from that
after.
"""

from __future__ import annotations

import numpy as np

from tests.testing.planted.sound import Job, Sound


class SlotPastBoundary(Sound):
    def _slots(self, each: Job, positions: np.ndarray) -> np.ndarray:
        blocks = np.array(each.blocks)
        return blocks[np.maximum(positions - 1, 0) // self.block_size] * self.block_size + positions % self.block_size
