"""Text out of token ids as they come: whole characters only, and nothing of a stop string.

Each id costs what its own characters cost, however long the text is: bytes that don't end a character yet are kept,
and stop strings are followed with one state each (Knuth, Morris & Pratt 1977), which also says how much of the text
may be their beginning and has to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from fstep.models.pieces import strip_start
from fstep.models.tokenizer import Tokenizer, well_formed


class StopMatcher:
    """Where in a growing text a stop string is first complete. Ties go to the one that stands first in the list."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._borders = tuple(map(_borders, self._stop))
        self._matched = [0] * len(self._stop)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may begin a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Goes on with `text`; if a stop string is complete in it, after how many of its characters, and which one."""
        if not self._stop:
            return None
        for index, character in enumerate(text, 1):
            if (found := self._next(character)) is not None:
                return index, found
        return None

    def _next(self, character: str) -> str | None:
        found: str | None = None
        for n, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[n]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            self._matched[n] = matched = matched + 1 if stop[matched] == character else 0
            if matched == len(stop):
                found = stop if found is None else found
                self._matched[n] = borders[-1]
        return found


def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of `text`, the length of the longest shorter beginning that it also ends with."""
    borders, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return tuple(borders)


class Detokenizer:
    """The text of one request's output.

    `stop` are strings before which the text ends (they stay in it with `include_stop_str_in_output`): of several
    the one that is complete first wins, and only output counts, not the prompt. `prompt_token_ids` say what the
    output continues: a tokenizer that drops the blank at the start of a text (SentencePiece) keeps it in a
    continuation. Special tokens are left out of the text, unless `skip_special_tokens` is false.

    The deltas of `add` and `flush` joined are `Tokenizer.decode` of all ids, up to the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        self.stopped: str | None = None  #: the stop string that was met
        self.num_tokens = 0  #: ids taken: up to the one that completed the stop string; later ones count for nothing
        self._tokenizer, self._skip, self._include = tokenizer, skip_special_tokens, include_stop_str_in_output
        self._stop = StopMatcher([well_formed(text) for text in stop])
        self._strip = "" if self._continues(prompt_token_ids) else tokenizer.pieces.strip
        self._bytes = b""  # the beginning of a character
        self._out: list[str] = []
        self._held = ""  # text that isn't out yet
        self._length = 0  # characters that are out
        self._settled = 0  # characters up to the last id that ended a character; what follows waits as a whole
        self._starts: deque[int] = deque()  # where the text of each id begins that isn't out yet
        self._num_out = 0  # ids whose text is out, at least its beginning
        self._ended = False

    @property
    def text(self) -> str:
        """All deltas so far."""
        self._out = ["".join(self._out)]
        return self._out[0]

    @property
    def num_text_tokens(self) -> int:
        """The first so many ids make `text`: those before the stop string, where one was met."""
        return self._num_out

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these ids add, as far as it can't change any more; "" once a stop string was met."""
        for token_id in token_ids:
            if self._ended:
                break
            self._take(token_id)
        if self._ended:
            return self._emit(len(self._held))
        return self._emit(min(len(self._held) - self._waiting(), self._settled - self._length))

    def flush(self) -> str:
        """The text that was still held back, when the request has ended: what isn't a whole character is U+FFFD."""
        if not self._ended:
            self._append(self._tokenizer.pieces.text_of(self._bytes, final=True)[0])
            self._ended, self._bytes = True, b""
        return self._emit(len(self._held))

    def _continues(self, prompt_token_ids: Sequence[int]) -> bool:
        return any(self._tokenizer.piece(token_id, self._skip) for token_id in reversed(prompt_token_ids))

    def _take(self, token_id: int) -> None:
        self.num_tokens += 1
        self._starts.append(self._length + len(self._held))
        pieces = self._bytes + self._tokenizer.piece(token_id, self._skip)
        text, self._bytes = self._tokenizer.pieces.text_of(pieces, final=False)
        self._append(text)
        if not self._bytes:
            self._settled = self._length + len(self._held)

    def _append(self, text: str) -> None:
        text, self._strip = strip_start(text, self._strip)
        found = self._stop.feed(text)
        if found is None:
            self._held += text
            return
        end, self.stopped = found
        self._held += text[:end]
        if not self._include:
            self._held = self._held.removesuffix(self.stopped)
        self._ended, self._bytes = True, b""

    def _waiting(self) -> int:
        return 0 if self._include else self._stop.held

    def _emit(self, count: int) -> str:
        delta, self._held = self._held[:count], self._held[count:]
        self._length += len(delta)
        while self._starts and self._starts[0] < self._length:
            self._starts.popleft()
            self._num_out += 1
        if delta:
            self._out.append(delta)
        return delta
