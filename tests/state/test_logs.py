"""Logs against plain Python lists: whatever is appended where, no log that was handed out ever changes."""

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fstep.state import Log

ROWS = 4


def append(log: Log, lists: list[list[int]]) -> Log:
    rows = np.array([row for row, items in enumerate(lists) if items], np.intp)
    values = np.array([item for items in lists for item in items], np.int32)
    return log.append(rows, values, np.array([len(items) for items in lists if items], np.intp))


items = st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=ROWS, max_size=ROWS)
moves = st.lists(st.tuples(st.integers(0, 99), st.one_of(items, st.integers(0, ROWS - 1))), max_size=30)


@given(moves)
def test_every_log_keeps_what_it_saw(moves):
    logs = [(Log.empty(ROWS), [[] for _ in range(ROWS)])]
    for of, move in moves:
        log, model = logs[of % len(logs)]
        if isinstance(move, int):
            logs.append(
                (log.cleared(np.array([move])), [[] if row == move else seen for row, seen in enumerate(model)])
            )
        elif any(move):
            logs.append((append(log, move), [seen + more for seen, more in zip(model, move, strict=True)]))
        for log, model in logs:
            assert [log[row].tolist() for row in range(ROWS)] == model


@given(items)
def test_gather_and_table_read_the_same_items(lists):
    log = append(Log.empty(ROWS), lists) if any(lists) else Log.empty(ROWS)
    table = log.table(np.arange(ROWS), 24)
    assert table.tolist() == [items + [0] * (24 - len(items)) for items in lists]
    rows = np.repeat(np.arange(ROWS), [len(items) for items in lists])
    columns = np.concatenate([np.arange(len(items)) for items in lists]).astype(np.intp)
    assert log.gather(rows, columns).tolist() == [item for items in lists for item in items]


def test_one_append_in_place_the_other_apart():
    log = append(Log.empty(2), [[1, 2], []])
    first, second = append(log, [[3], []]), append(log, [[4], []])
    assert np.shares_memory(first[0], log[0])
    assert not np.shares_memory(second[0], log[0])
    assert (first[0].tolist(), second[0].tolist()) == ([1, 2, 3], [1, 2, 4])


def test_rows_that_come_and_go_take_no_more_memory():
    log, rows = Log.empty(8), np.arange(8)
    sizes = []
    for turn in range(400):
        log = log.cleared(rows).append(rows, np.arange(40), np.full(8, 5))
        gc.collect(0)
        if turn in (100, 399):
            sizes.append(log.arena.data.shape)
    assert sizes[0] == sizes[1]


def test_items_are_read_only():
    log = append(Log.empty(1), [[1]])
    assert not log[0].flags.writeable
    assert not log.table(np.arange(1), 2).flags.writeable
