"""Fault: a request keeps its list of blocks when it gives them back; aborted while it waits after a preemption, it
gives them back again, though another may hold them by then.

Seen in engines whose abort takes the same way for requests that run and for those that were preempted.
"""

from __future__ import annotations

from tests.testing.planted.sound import Job, Sound


class BlockFreedTwice(Sound):
    def _release(self, each: Job) -> None:
        for block in reversed(each.blocks):
            self._drop(block)
        each.num_computed = 0
