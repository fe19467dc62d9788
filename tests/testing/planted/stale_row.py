"""Fault: a request without stop ids keeps those of the row's former request, and ends too early.

Seen in engines that keep sampling parameters in arrays by row and write only what differs from the default.
"""

from __future__ import annotations

from tests.testing.planted.sound import Job, Sound


class StaleRow(Sound):
    def _take_row(self, each: Job) -> None:
        each.row = self.free_rows.pop()
        self.params[each.row] = each.request.sampling
        if each.request.sampling.stop_token_ids:
            self.stop_ids[each.row] = frozenset(each.request.sampling.stop_token_ids)
