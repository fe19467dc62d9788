"""Fault: a prompt found whole in the prefix cache leaves no token to compute, so its first token has no logits of
its own.

Seen in prefix caches that look up all full blocks of a prompt whose length is a multiple of the block size.
"""

from __future__ import annotations

from tests.testing.planted.sound import Job, Sound


class HitBeforeLastToken(Sound):
    def _hit(self, each: Job) -> None:
        """Takes the known blocks that it begins with; its last token is left to compute."""
        each.blocks = []
        for number in range(len(each.known) // self.block_size):
            block = self.block_of.get(self._key(each, number))
            if block is None:
                break
            self.cached.pop(block, None)
            self.refs[block] += 1
            each.blocks.append(block)
        each.num_computed = len(each.blocks) * self.block_size
