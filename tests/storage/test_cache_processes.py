"""One cache, many processes: each object is downloaded once, the limit holds, and nothing is lost to those killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardset.storage import cache_folder
from shardset.storage.cache import CachedStore
from shardset.storage.cache_upkeep import list_entries, verify
from storage.caching import MadeStore, bytes_on_disk, content, files_of, read_all, read_and_send, watch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")

SIZE = 200_000
ROOM = SIZE + 1000
URLS = [f"made://host/{number}/000.tar" for number in range(12)]
fork = multiprocessing.get_context("fork")
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def made(tmp_path):
    return MadeStore(tmp_path / "log", size=SIZE)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def start(target, *args, context=fork):
    process = context.Process(target=target, args=args)
    process.start()
    return process


def finish(processes):
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 30_000])
@pytest.mark.parametrize("context", [fork, spawn], ids=["fork", "spawn"])
def test_eight_processes_that_want_the_same_object_download_it_once(made, folder, block, context):
    made.delay = 0.01
    store = CachedStore(made, folder, limit=20 * ROOM, block=block)
    receiver, sender = context.Pipe(duplex=False)
    finish([start(read_and_send, sender, store, URLS[:1], context=context) for _ in range(8)])
    stats = [receiver.recv() for _ in range(8)]
    assert made.bytes_fetched() == SIZE
    assert sum(one.bytes_downloaded for one in stats) == SIZE
    assert sum(one.misses for one in stats) == (1 if block is None else 7)
    assert sum(one.read_throughs for one in stats) == 0


class Watcher:
    """Looks again and again at how many bytes there are, from a process of its own."""

    def __init__(self, folder, limit):
        self._limit = limit
        self._receiver, sender = spawn.Pipe(duplex=False)
        self._stop = spawn.Event()
        self._process = start(watch, folder, sender, self._stop, context=spawn)
        sender.close()
        assert self._receiver.recv() == "ready"

    def end(self):
        self._stop.set()
        looks, most = self._receiver.recv()
        finish([self._process])
        assert looks > 20
        assert self._limit // 2 < most <= self._limit


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 30_000])
def test_the_limit_holds_while_four_processes_download_three_times_as_much(made, folder, block):
    made.delay = 0.001
    limit = 4 * ROOM
    watcher = Watcher(folder, limit)
    store = CachedStore(made, folder, limit=limit, block=block)
    finish([start(read_all, store, URLS, seed) for seed in range(4)])
    watcher.end()
    assert files_of(folder, ".part") == files_of(folder, ".lock") == []
    assert verify(folder).damaged == ()
    assert store.stats().bytes_used == bytes_on_disk(folder) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 30_000])
def test_a_kill_at_any_moment_loses_nothing_and_the_limit_holds(made, folder, block):
    made.delay = 0.002
    limit = 4 * ROOM
    store = CachedStore(made, folder, limit=limit, block=block)
    watcher = Watcher(folder, limit)
    moments = random.Random(7)
    left_behind = 0
    for round_ in range(100):
        if round_ >= 25 and left_behind > 5:  # a busy machine may not have begun when it is killed
            break
        processes = [start(read_all, store, URLS, 10 * round_ + one) for one in range(2)]
        time.sleep(moments.uniform(0.01, 0.15))
        for process in processes:
            process.kill()
            process.join(30)
        left_behind += len(files_of(folder, ".part"))
    watcher.end()
    assert left_behind > 5
    fresh = CachedStore(made, folder, limit=limit, block=block)
    read_all(fresh, URLS)
    fresh.close()
    assert files_of(folder, ".part") == files_of(folder, ".lock") == []
    assert verify(folder).damaged == ()
    assert fresh.stats().bytes_used == bytes_on_disk(folder) <= limit
    assert fresh.stats().read_throughs == 0
    state = int((folder / "state").read_text().replace("?", "0") or 0)
    assert state in (0, bytes_on_disk(folder))


@pytest.mark.slow
def test_another_takes_over_from_a_downloader_that_is_killed(made, folder):
    made.delay = 0.15
    store = CachedStore(made, folder, limit=20 * ROOM)
    first = start(read_all, store, URLS[:1])
    until = time.monotonic() + 20
    while not made.fetches() and time.monotonic() < until:
        time.sleep(0.005)
    others = [start(read_all, store, URLS[:1]) for _ in range(3)]
    time.sleep(0.1)
    assert store.is_downloading(URLS[0])
    first.kill()
    first.join(30)
    finish(others)
    assert SIZE < made.bytes_fetched() < 2 * SIZE
    assert files_of(folder, ".part") == files_of(folder, ".lock") == []


@pytest.mark.slow
def test_a_forked_child_keeps_no_download_of_its_parent_locked(made, folder):
    """The child lives on after its parent was killed in the middle of a download."""
    made.delay = 0.02
    store = CachedStore(made, folder, limit=20 * ROOM)
    receiver, sender = fork.Pipe(duplex=False)
    parent = os.fork()
    if not parent:
        threading.Thread(target=store.read, args=(URLS[0], 0, 1), daemon=True).start()
        while not made.fetches():
            time.sleep(0.001)
        child = os.fork()
        if child:
            sender.send(child)
        time.sleep(30)
        os._exit(0)
    child = receiver.recv()
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        began = time.monotonic()
        read_all(store, URLS[:1])
        assert time.monotonic() - began < 20
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_progress_is_seen_by_other_processes(made, folder):
    made.size = 4 << 20
    made.delay = 0.005
    store = CachedStore(made, folder, limit=8 << 20)
    assert store.progress(URLS[0]) is None
    process = start(store.read, URLS[0], 0, 1)
    seen = set()
    while process.is_alive():
        seen.add(store.progress(URLS[0]))
        time.sleep(0.005)
    finish([process])
    assert store.progress(URLS[0]) == 4 << 20
    assert any(count is not None and 0 < count < 4 << 20 for count in seen)


def test_a_view_keeps_its_entry_after_a_fork_until_both_sides_let_go(made, folder, monkeypatch):
    monkeypatch.setattr(cache_folder, "_REST", 0.0)
    store = CachedStore(made, folder, limit=ROOM)
    held = [store.open(URLS[0]).view(0, SIZE)]
    ours, theirs = fork.Pipe()

    def hold():
        theirs.recv()
        assert held[0] == content(URLS[0], SIZE)
        theirs.send("read")

    child = start(hold)
    held.clear()
    store.close()
    assert store.read(URLS[1], 0, SIZE) == content(URLS[1], SIZE)
    [entry] = list_entries(folder)
    assert (entry.info.url, entry.is_in_use) == (URLS[0], True)
    ours.send("go")
    assert ours.recv() == "read"
    finish([child])
    store.read(URLS[1], 0, SIZE)
    assert [entry.info.url for entry in list_entries(folder)] == [URLS[1]]


def test_a_forked_child_begins_with_nothing_of_its_parents(made, folder):
    store = CachedStore(made, folder, limit=20 * ROOM, parallel_downloads=1)
    made.delay = 0.01
    store.read(URLS[0], 0, 1)
    for url in URLS[1:4]:
        store.prepare(url)
    receiver, sender = fork.Pipe(duplex=False)
    finish([start(read_and_send, sender, store, URLS[:4])])
    stats = receiver.recv()
    assert stats.hits + stats.misses + stats.waits >= 4
    assert stats.queued == 0
    assert made.bytes_fetched() <= 4 * SIZE


@pytest.mark.slow
def test_a_process_that_ends_leaves_no_half_download(folder, tmp_path):
    code = f"""
from storage.caching import MadeStore
from shardset.storage import cache_folder
from shardset.storage.cache import CachedStore
import time
made = MadeStore({str(tmp_path / "log")!r}, size={SIZE}, delay=0.05)
store = CachedStore(made, {str(folder)!r}, limit=10**7, parallel_downloads=2)
for number in range(50):
    store.prepare(f"made://host/{{number}}")
while not made.fetches():
    time.sleep(0.01)
"""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "src"])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 60
    assert files_of(folder, ".part") == files_of(folder, ".lock") == []


@pytest.mark.slow
def test_on_a_disk_as_small_as_the_limit_nothing_ever_fails(made, tmp_path):
    """A real disk, full for real: each entry takes whole pages of it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    limit = 4 * ROOM
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={limit + 16 * 4096}", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a disk of its own")
    try:
        store = CachedStore(made, disk / "cache", limit=limit)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: read_all(store, URLS, seed), range(4)))
        assert store.stats().failures == 0
        messages = []
        roomy = CachedStore(made, disk / "cache", limit=10 * limit, on_event=messages.append)
        read_all(roomy, URLS)  # whose limit is more than the disk has
        assert any("no space left" in event.message for event in messages if event.kind == "read_through")
        assert files_of(disk / "cache", ".part") == files_of(disk / "cache", ".lock") == []
        assert verify(disk / "cache").damaged == ()
        store.close()
        roomy.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
