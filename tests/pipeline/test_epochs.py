from __future__ import annotations

import multiprocessing
import pickle

import pytest

from shardset.pipeline.epochs import Board
from shardset.policy import Place, Report


def take(board, worker, times, queue):
    queue.put([board.take(worker) for _ in range(times)])
    report = Report()
    report.add("lost", Place("a.tar", 5, "k\udcff", "why"), 3)
    board.leave(worker, report)


def run_worker(board, method, worker, times=1):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=take, args=(board, worker, times, queue))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    return found


def test_a_process_counts_its_epochs_from_where_they_were_set():
    board = Board(5)
    assert [board.take(None) for _ in range(3)] == [5, 6, 7]
    assert board.peek() == 8
    board.set_next(2)
    assert [board.take(None), board.take(None)] == [2, 3]
    assert board.reports() == []


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_made_anew_for_each_epoch_count_on_and_leave_their_reports(method):
    board = Board()
    assert run_worker(board, method, 0, 2) == [0, 1]
    assert run_worker(board, method, 0) == [2]
    assert run_worker(board, method, 1) == [0]
    assert len(board.reports()) == 1  # the other worker's is of an earlier epoch
    board.set_next(7)
    assert [run_worker(board, method, worker) for worker in (0, 1)] == [[7], [7]]
    reports = board.reports()
    assert [report.counts for report in reports] == [{"lost": 3}, {"lost": 3}]
    assert reports[0].places("lost") == [Place("a.tar", 5, "k?", "why")]


def test_a_copy_has_the_same_next_epoch_and_goes_its_own_way():
    board = Board()
    board.take(None)
    copy = pickle.loads(pickle.dumps(board))
    assert [copy.take(None), copy.take(None)] == [1, 2]
    assert board.take(None) == 1


def test_a_report_too_large_for_its_place_keeps_its_counts():
    board, report = Board(), Report()
    for code in range(40):
        for number in range(8):
            report.add(f"code-{code}", Place("x" * 400, number, "k" * 400, "m" * 400))
    board.take(3)
    board.leave(3, report)
    (left,) = board.reports()
    assert left.counts == report.counts
    for code in range(3000):
        report.add(f"another-code-{code}")
    board.leave(3, report)
    assert board.reports()[0].counts == {"many_codes": len(report)}
