"""The exact `Loader` in torch's DataLoader and torchdata's StatefulDataLoader, in processes that torch connects.

Run by ``make test-torch``, in an environment of its own.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import shardset
from shards import write_dataset, write_shard
from shardset.decoding.options import Decode
from shardset.errors import DecodeError, NoSamplesError, ShardsetError, StateError
from shardset.integrations.torch import IterableDataset, MapDataset
from shardset.loading.loader import Loader
from shardset.policy import Policy

# What torch itself warns of: forks of a process with threads, calls of its own that it has deprecated, few processors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning"),
]

SHARDS, SAMPLES = 4, 13
COUNT = SHARDS * SAMPLES


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "shards", shards=SHARDS, samples=SAMPLES)
    return tmp_path / "shards"


@pytest.fixture
def dataset(folder):
    return shardset.discover_dataset(folder)


def indices(batches):
    return [index for batch in batches for index in batch["__index__"].tolist()]


def steps(batches):
    """What each step gives, and where it ends."""
    return [(int(batch["__epoch__"]), int(batch["__position__"]), batch["__index__"].tolist()) for batch in batches]


def make(dataset, batch_size=5, *, workers=0, method="fork", kind=DataLoader, persistent=False, more=(), **settings):
    settings = {"shuffle": True, "seed": 3, **settings}
    source = IterableDataset(Loader(dataset, batch_size, **settings))
    options = {"multiprocessing_context": method, "persistent_workers": persistent} if workers else {}
    return source, kind(source, batch_size=None, num_workers=workers, **options, **dict(more))


def orders(dataset, epochs=3, **settings):
    """The order of each epoch, as one rank with batches of one sees it."""
    loader = Loader(dataset, 1, **{"shuffle": True, "seed": 3, **settings})
    return [indices(loader) for _ in range(epochs)]


# The stream


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("tail", ["drop", "wrap", "exact"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_stream_is_the_same_whatever_the_number_of_workers(dataset, tail, world_size, persistent):
    for rank in range(world_size):
        settings = {"tail": tail, "rank": rank, "world_size": world_size}
        alone = Loader(dataset, 5, shuffle=True, seed=3, **settings)
        want = [steps(alone) for _ in range(3)]
        assert want[0] != want[1]
        for workers in (0, 1, 2, 3, 4):
            _, loader = make(dataset, workers=workers, persistent=persistent and workers > 0, **settings)
            assert [steps(loader) for _ in range(3)] == want, workers
            assert len(loader) == len(want[0])


@pytest.mark.slow
@pytest.mark.parametrize(("method", "persistent"), [("spawn", True), ("forkserver", False)])
def test_the_stream_is_the_same_however_workers_start(dataset, method, persistent):
    want = orders(dataset, 2, tail="exact")
    source, loader = make(dataset, workers=2, method=method, persistent=persistent, tail="exact")
    assert [indices(loader) for _ in range(2)] == want
    source.set_epoch(1)
    assert indices(loader) == want[1]


def test_more_workers_than_steps_are_no_trouble_and_an_epoch_without_a_step_is_an_error(dataset):
    _, loader = make(dataset, 25, workers=4)
    assert [indices(loader) for _ in range(2)] == [order[:50] for order in orders(dataset, 2)]
    assert len(loader) == 2
    _, loader = make(dataset, 60, workers=4)
    with pytest.raises(NoSamplesError, match="an epoch has no step"):
        list(loader)


def test_buckets_and_packs_and_mixtures_go_through_workers(dataset):
    from shardset.dataset.views import Pack
    from shardset.loading.mixing import mix

    packed = dataset.packed(Pack(length="bytes", size=400))
    mixed = mix({"a": dataset, "b": dataset}, weights={"a": 3, "b": 1})
    for view in (packed, mixed):
        alone = Loader(view, 2, shuffle=True)
        want = [[(batch["__epoch__"], batch["__position__"]) for batch in alone] for _ in range(2)]
        loader = DataLoader(IterableDataset(Loader(view, 2, shuffle=True)), batch_size=None, num_workers=3)
        for epoch in range(2):
            assert len(loader) == len(want[epoch])
            assert [(batch["__epoch__"], batch["__position__"]) for batch in loader] == want[epoch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_given_up_is_followed_by_the_next_epoch(dataset, workers, persistent):
    want = orders(dataset, 5)
    _, loader = make(dataset, workers=workers, persistent=persistent and workers > 0)
    for epoch in range(4):
        assert indices(islice(loader, 1 + epoch)) == want[epoch][: 5 * (1 + epoch)]
        gc.collect()
    assert indices(loader) == want[4][:50]


def test_two_passes_at_once_are_of_two_epochs(dataset):
    want = orders(dataset, 2)
    _, loader = make(dataset, workers=2)
    pairs = list(zip(loader, loader, strict=True))
    assert [indices(batches) for batches in zip(*pairs, strict=True)] == [order[:50] for order in want]


def test_passes_that_are_seeded_alike_are_of_different_epochs(dataset):
    want = orders(dataset, 3)
    for persistent in (False, True):
        _, loader = make(dataset, workers=2, persistent=persistent)
        for order in want:
            torch.manual_seed(0)
            assert indices(loader) == order[:50]


def test_whoever_counts_the_steps_of_a_loader_gets_to_the_next_epoch(dataset):
    want = orders(dataset, 2)
    loader = Loader(dataset, 5, shuffle=True, seed=3)
    for order in want:
        running = iter(loader)
        assert indices(next(running) for _ in range(len(loader))) == order[:50]
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (2, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_can_be_set_also_in_workers_that_run(dataset, workers):
    want = orders(dataset, 6)
    source, loader = make(dataset, workers=workers, persistent=workers > 0)
    for epoch in (3, 1, 1, 5):
        source.set_epoch(epoch)
        assert source.epoch == epoch
        assert indices(loader) == want[epoch][:50]
    assert source.epoch == 6
    with pytest.raises(ValueError, match="epochs count from 0"):
        source.set_epoch(-1)


def test_a_loader_that_is_moved_behind_the_back_of_its_dataset_is_an_error(dataset):
    loader = Loader(dataset, 5, shuffle=True)
    loader.set_epoch(2)
    source = IterableDataset(loader)
    assert source.epoch == 2
    state = loader.state_dict()
    loader.set_epoch(4)
    for workers in (0, 2):
        with pytest.raises(StateError, match="behind its back"):
            next(iter(DataLoader(source, batch_size=None, num_workers=workers)))
    loader = Loader(dataset, 5, shuffle=True)
    source = IterableDataset(loader)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="behind its back"):
        next(iter(source))


def test_what_no_worker_can_do_is_an_error_that_says_so(dataset):
    for loader, message in [
        (Loader(dataset, 5, decode=True).map(add_length, processes=2), "cannot start the processes"),
        (Loader(dataset, 5).views(), "views of memory cannot be handed over"),
    ]:
        source = IterableDataset(loader)
        with pytest.raises(ValueError, match=message):
            next(iter(DataLoader(source, batch_size=None, num_workers=1)))


def test_a_copy_of_a_dataset_counts_its_own_passes(dataset):
    want = orders(dataset, 3)
    source, loader = make(dataset, workers=2)
    assert indices(loader) == want[0][:50]
    batch = next(iter(source))
    other = copy.deepcopy(source)
    assert other.epoch == source.epoch == 2
    other.load_state_dict(source.state_dict(batch))
    another = pickle.loads(pickle.dumps(other))
    assert indices(other) == want[1][5:50]
    assert indices(another) == want[1][5:50]
    assert indices(source) == want[2][:50]


@pytest.mark.slow
def test_samples_and_functions_that_pickle_go_to_workers(dataset):
    loader = Loader(dataset, 5, shuffle=True, fields=["json"], decode=True).map(add_length)
    again = pickle.loads(pickle.dumps(loader))
    want = [batch["length"].tolist() for batch in loader]
    assert [batch["length"].tolist() for batch in again] == want
    for method in ("fork", "spawn"):
        loader = Loader(dataset, 5, shuffle=True, fields=["json"], decode=True).map(add_length)
        batches = list(
            DataLoader(IterableDataset(loader), batch_size=None, num_workers=2, multiprocessing_context=method)
        )
        assert [batch["length"].tolist() for batch in batches] == want
        assert isinstance(batches[0]["length"], torch.Tensor)


def add_length(sample):
    return {"length": len(str(sample["json"])), "seed": sample["__seed__"]}


# States


@pytest.mark.parametrize(("workers", "others"), [(0, 2), (2, 0), (3, 2)])
def test_the_state_of_a_batch_goes_on_with_any_number_of_workers(dataset, workers, others):
    want = orders(dataset, 3)
    _, loader = make(dataset, workers=workers)
    indices(loader)
    source = loader.dataset
    running = iter(loader)
    batch = [next(running) for _ in range(4)][-1]
    state = json.loads(json.dumps(source.state_dict(batch)))
    assert (state["epoch"], state["position"]) == (1, 20)
    again, loader = make(dataset, 4, workers=others)
    again.load_state_dict(state)
    assert (again.epoch, len(loader)) == (1, 13)
    again.set_epoch(1)  # as training loops do; it is there already
    assert indices(loader) == want[1][20:]
    assert indices(loader) == want[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_state_can_be_loaded_again_and_again(dataset, workers, is_kept):
    want = orders(dataset, 3)
    source, loader = make(dataset, workers=workers, persistent=is_kept and workers > 0)
    batch = next(iter(loader))
    for _ in range(3):
        source.load_state_dict(source.loader.state_dict(batch))
        assert indices(loader) == want[0][5:50]
        assert indices(loader) == want[1][:50]


def test_a_state_that_the_loader_had_before_holds_for_the_dataset(dataset):
    want = orders(dataset, 2)
    loader = Loader(dataset, 5, shuffle=True, seed=3)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    fresh = Loader(dataset, 5, shuffle=True)
    fresh.load_state_dict(state)
    loader = DataLoader(IterableDataset(fresh), batch_size=None, num_workers=2)
    assert indices(loader) == want[0][5:50]
    assert indices(loader) == want[1][:50]


def test_a_batch_that_torch_collated_has_the_state_too(dataset):
    source = IterableDataset(Loader(dataset, 5, fields="json", decode=True).map(add_length))
    loader = DataLoader(source, batch_size=None, num_workers=2, collate_fn=tensors)
    batch = next(iter(loader))
    assert isinstance(batch["__position__"], torch.Tensor)
    assert source.state_dict(batch)["position"] == 5
    source = IterableDataset(Loader(dataset, 5, fields="json").map(as_it_is))
    batch = next(iter(DataLoader(source, batch_size=1, collate_fn=default_collate)))  # a batch of one batch
    assert source.state_dict(batch)["position"] == 5


def tensors(batch):
    return {name: torch.as_tensor(value) for name, value in batch.items() if isinstance(value, int | np.ndarray)}


def as_it_is(sample):
    return {"index": sample["__index__"]}


def test_without_a_batch_a_state_is_of_the_batch_that_the_trainer_has_seen(dataset):
    for workers in (0, 2):
        source, loader = make(dataset, workers=workers)
        assert source.state_dict()["position"] == 0
        for number, batch in enumerate(loader):
            source.seen(batch)
            last = source.state_dict()
            assert (last["epoch"], last["position"]) == ((0, 5 * number + 5) if number < 9 else (1, 0))
        running = iter(loader)
        next(running)
        source.load_state_dict(last)
        assert source.state_dict()["epoch"] == 1
        del running
    source, loader = make(dataset, workers=2)
    next(iter(loader))
    with pytest.raises(StateError, match="which one it has had last is unknown"):
        source.state_dict()
    source.set_epoch(4)
    assert (source.state_dict()["epoch"], source.state_dict()["position"]) == (4, 0)


def test_a_loaded_state_is_not_dropped_by_setting_another_epoch(dataset):
    source, loader = make(dataset)
    next(iter(loader))
    state = source.state_dict()
    source.load_state_dict({**state, "epoch": 7})
    with pytest.raises(StateError, match=r"a state of epoch 7 was loaded, and set_epoch\(0\) would drop it"):
        source.set_epoch(0)
    assert indices(loader) == orders(dataset, 8)[7][5:50]
    source.set_epoch(0)
    with pytest.raises(StateError, match="no state of a Loader"):
        source.load_state_dict({})


def stateful(dataset, **settings):
    return make(dataset, kind=StatefulDataLoader, **settings)[1]


@pytest.mark.parametrize("tail", ["drop", "exact"])
@pytest.mark.parametrize(
    ("workers", "at"),
    [(workers, at) for workers in (0, 1, 2, 3) for at in (0, 1, 4, 8, 9, 10)],
)
def test_a_stateful_loader_goes_on_exactly_in_mid_epoch(dataset, workers, at, tail):
    loader = stateful(dataset, workers=workers, tail=tail)
    first = steps(loader)
    running = iter(loader)
    head = steps(islice(running, at))
    state = json.loads(json.dumps(loader.state_dict()))
    rest, later = steps(running), steps(loader)
    assert indices(iter_of(head + rest)) == orders(dataset, 2)[1][: 52 if tail == "exact" else 50]
    assert first[0][0] == 0
    fresh = stateful(dataset, workers=workers, tail=tail)
    fresh.load_state_dict(state)
    if rest or workers:  # without workers, it is known that nothing of the epoch is left
        assert steps(fresh) == rest
    assert steps(fresh) == later


@pytest.mark.slow
def test_a_stateful_loader_goes_on_with_workers_that_start_afresh(dataset):
    loader = stateful(dataset, workers=2, method="spawn")
    running = iter(loader)
    head = steps(islice(running, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = steps(running)
    assert indices(iter_of(head + rest)) == orders(dataset, 1)[0][:50]
    fresh = stateful(dataset, workers=2, method="spawn")
    fresh.load_state_dict(state)
    assert steps(fresh) == rest


def iter_of(found):
    return ({"__index__": np.array(numbers)} for _, _, numbers in found)


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_of_a_finished_epoch_goes_on_with_the_next(dataset, workers, persistent):
    persistent = persistent and workers > 0
    loader = stateful(dataset, workers=workers, persistent=persistent)
    epochs = [steps(loader) for _ in range(4)]
    again = stateful(dataset, workers=workers, persistent=persistent)
    assert steps(again) == epochs[0]
    assert steps(again) == epochs[1]
    fresh = stateful(dataset, workers=workers, persistent=persistent)
    fresh.load_state_dict(again.state_dict())
    assert steps(fresh) == epochs[2]
    assert steps(fresh) == epochs[3]


def test_the_state_of_a_worker_is_small_and_for_a_stateful_loader_alone(dataset):
    loader = stateful(dataset, workers=2)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    own = state["_snapshot"]["_worker_snapshots"]["worker_0"]["fetcher_state"]
    assert own is not None
    found = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    assert len(json.dumps(found)) <= 512
    with pytest.raises(StateError, match="the state of one worker"):
        make(dataset)[0].load_state_dict(found)


# Faults


def test_an_error_in_a_worker_names_the_sample(tmp_path):
    write_shard(tmp_path / "n.tar", [(f"{n:02d}.cls", b"x" if n == 7 else b"%d" % n) for n in range(20)])
    source = IterableDataset(Loader(shardset.discover_dataset(tmp_path), 4, decode=True))
    with pytest.raises(DecodeError, match=r"'cls' of sample '07'"):
        list(DataLoader(source, batch_size=None, num_workers=2))


@pytest.mark.parametrize(
    ("workers", "method", "persistent"),
    [(0, "fork", False), (3, "fork", False), (3, "fork", True), (2, "spawn", True)],
)
def test_what_workers_skip_is_in_the_report(tmp_path, workers, method, persistent):
    write_shard(tmp_path / "n.tar", [(f"{n:02d}.cls", b"x" if n in {3, 9} else b"%d" % n) for n in range(20)])
    loader = Loader(shardset.discover_dataset(tmp_path), 4, decode=True, policy=Policy("skip"))
    source = IterableDataset(loader)
    options = {"multiprocessing_context": method, "persistent_workers": persistent} if workers else {}
    loader = DataLoader(source, batch_size=None, num_workers=workers, **options)
    assert not source.report
    for epoch in range(2):
        assert len(indices(loader)) == 20
        counted = source.report.counts
        assert counted["substituted"] == 2 * (1 if workers else epoch + 1)
        assert counted["decode_failed"] >= 2
    assert "#03" in str(source.report)


# Ranks

RANK = """
import json, os, sys
import shardset, torch
from shardset.integrations.torch import IterableDataset
from shardset.loading.loader import Loader
from torch.utils.data import DataLoader

def main():
    told = json.loads(sys.argv[1])
    init, rank, world = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    source = IterableDataset(Loader(shardset.discover_dataset(told["folder"]), told["batch"], shuffle=True, seed=3))
    if told["state"] is not None:
        source.load_state_dict(told["state"])
    options = {"multiprocessing_context": told["method"]} if told["workers"] else {}
    loader = DataLoader(source, batch_size=None, num_workers=told["workers"], **options)
    given, states = [], []
    while source.epoch < told["epochs"] and len(given) < told["steps"]:
        for batch in loader:
            given.append([batch["__epoch__"], batch["__position__"], batch["__index__"].tolist()])
            states.append(source.state_dict(batch))
            if len(given) == told["steps"]:
                break
            torch.distributed.all_reduce(torch.ones(1))  # as a step of training: it hangs where ranks are not even
    print(json.dumps({"given": given, "state": states[-1], "length": len(loader)}))
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def run_ranks(tmp_path, world, **told):
    """Run a training of some ranks, and return the steps of all ranks together, and the state that they agree on."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    init = (tmp_path / f"meeting-{time.monotonic_ns()}").as_uri()
    told = {"state": None, "workers": 0, "method": "fork", "steps": 1000, **told}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", program, json.dumps(told), init, str(rank), str(world)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    ranks = [json.loads(text) for text in printed]
    assert len({json.dumps(rank["state"]) for rank in ranks}) == 1
    assert len({rank["length"] for rank in ranks}) == 1
    joined = []
    for shares in zip_longest(*(rank["given"] for rank in ranks)):
        assert None not in shares, "some ranks have more steps than others"
        assert len({(epoch, position) for epoch, position, _ in shares}) == 1
        joined.append((*shares[0][:2], sorted(index for _, _, numbers in shares for index in numbers)))
    return joined, ranks[0]["state"]


def check_stream(dataset, joined, epoch=0, start=0):
    """Check that steps are those of the one order, from a place on, and return where they end."""
    want = orders(dataset, 1 + max(epoch for epoch, _, _ in joined))
    for at, stop, numbers in joined:
        if at != epoch:
            epoch, start = epoch + 1, 0
        assert at == epoch
        assert numbers == sorted(want[epoch][start:stop])
        start = stop
    return epoch, start


@pytest.mark.slow
def test_four_processes_share_one_stream_and_two_and_three_go_on_with_it(folder, tmp_path):
    dataset = shardset.discover_dataset(folder)
    told = {"folder": str(folder)}
    joined, _ = run_ranks(tmp_path, 4, batch=3, epochs=2, workers=1, **told)
    assert [epoch for epoch, _, _ in joined] == [0] * 4 + [1] * 4
    assert check_stream(dataset, joined) == (1, 48)
    joined, state = run_ranks(tmp_path, 4, batch=3, epochs=2, steps=2, **told)
    assert check_stream(dataset, joined) == (0, 24)
    joined, then = run_ranks(tmp_path, 2, batch=4, epochs=2, steps=5, state=state, workers=2, **told)
    assert check_stream(dataset, joined, 0, 24) == (1, 16)
    joined, _ = run_ranks(tmp_path, 3, batch=4, epochs=3, state=then, **told)
    assert check_stream(dataset, joined, 1, 16) == (2, 48)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_afresh_know_their_rank(folder, tmp_path, method):
    joined, _ = run_ranks(tmp_path, 2, batch=5, epochs=1, workers=2, method=method, folder=str(folder))
    assert check_stream(shardset.discover_dataset(folder), joined) == (0, 50)


# What is left behind

TRAINER = """
import json, os, sys, time
import shardset, torch
from shardset.integrations.torch import IterableDataset
from shardset.loading.loader import Loader
from torch.utils.data import DataLoader

def main():
    folder, log, state, workers, method = *sys.argv[1:4], int(sys.argv[4]), sys.argv[5]
    source = IterableDataset(Loader(shardset.discover_dataset(folder), 4, shuffle=True, seed=3, tail="exact"))
    if os.path.exists(state):
        source.load_state_dict(json.load(open(state)))
    options = {"multiprocessing_context": method, "persistent_workers": True} if workers else {}
    loader = DataLoader(source, batch_size=None, num_workers=workers, **options)
    with open(log, "a") as file:
        while True:
            for batch in loader:
                time.sleep(0.02)
                with open(state + "~", "w") as new:
                    json.dump(source.state_dict(batch), new)
                os.replace(state + "~", state)
                line = [batch["__epoch__"], batch["__position__"], batch["__index__"].tolist()]
                print(json.dumps(line), file=file, flush=True)

if __name__ == "__main__":
    main()
"""


class Trainer:
    """A training in a session of its own, with a folder for temporary files of its own."""

    def __init__(self, tmp_path, folder):
        self.folder, self.log, self.state = folder, tmp_path / "log", tmp_path / "state"
        # A short name: workers of torch make sockets in it, and hang if its path is of over a hundred bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))
        self.sessions = []
        self.program = tmp_path / "trainer.py"
        self.program.write_text(TRAINER)
        self.log.touch()

    def lines(self):
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def run_until(self, more, workers, method):
        """Run until so many more steps are done."""
        wanted = len(self.lines()) + more
        arguments = [self.folder, self.log, self.state, str(workers), method]
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", self.program, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )
        self.sessions.append(process.pid)
        wait_until(lambda: process.poll() is not None or len(self.lines()) >= wanted, 200)
        assert process.poll() is None, process.communicate()[1]
        return process

    def close(self):
        for session in self.sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        shutil.rmtree(self.temporary)

    def check_gone(self, process):
        """Check that nothing is left of a session but the files of multiprocessing and torch itself."""
        wait_until(lambda: not is_running(process.pid), 60)
        left = [path.name for path in self.temporary.rglob("*") if not path.name.startswith(("pymp-", "listener-"))]
        assert not left
        caches = Path(os.environ["SHARDSET_CACHE"]).rglob("*")
        assert not [path.name for path in caches if path.name.endswith((".tmp", ".part", "~"))]

    def check_goes_on(self, dataset):
        """Check that what was logged, and what comes after the state saved last, is the one stream."""
        lines, state = self.lines(), json.loads(self.state.read_text())
        end = (state["epoch"], state["position"])
        # The state is saved first: a line may be missing.
        epoch, start = 0, 0
        want = orders(dataset, state["epoch"] + 2)
        for at, stop, numbers in lines:
            assert (at, numbers) == (epoch, want[epoch][start:stop])
            start = stop
            if stop == COUNT:
                epoch, start = epoch + 1, 0
        behind = (end[0] - epoch) * COUNT + end[1] - start
        assert behind in {0, 4}
        rest = Loader(dataset, 7, shuffle=True, seed=3, tail="exact")
        rest.load_state_dict(state)
        assert indices(rest) == want[end[0]][end[1] :]
        if behind:  # for the next life
            numbers = (want[epoch] + want[epoch + 1])[start : start + 4]
            with self.log.open("a") as log:
                print(json.dumps([epoch, start + 4, numbers]), file=log)


@pytest.fixture
def trainer(folder, tmp_path):
    with closing(Trainer(tmp_path, folder)) as trainer:
        yield trainer


def is_running(session):
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.slow
def test_trainings_killed_at_random_leave_nothing_and_go_on_exactly(trainer, dataset):
    chance = random.Random(7)
    for workers, method in [(0, "fork"), (2, "fork"), (3, "spawn"), (1, "forkserver"), (3, "fork")]:
        process = trainer.run_until(chance.randrange(1, 20), workers, method)
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.communicate(timeout=60)  # its workers have the same standard error
        trainer.check_gone(process)
        trainer.check_goes_on(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_killed_ends_the_training_and_the_state_goes_on(trainer, dataset, method):
    process = trainer.run_until(5, 2, method)
    if method == "fork":
        victim = children_of(process.pid)[0]
    else:
        victim = next(pid for pid in children_of(process.pid) if "spawn_main" in command_of(pid))
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    # torch tells of the signal, or of the connection where it was just taking a tensor from that worker. Where the
    # signal comes while the other is printed, Python gives up printing, and names the error among other words.
    told = r"killed by signal|exited unexpectedly|\b(EOFError|BrokenPipeError|Connection\w+Error|FileNotFoundError)\b"
    assert re.search(told, errors), errors
    assert process.returncode == 1
    trainer.check_gone(process)
    trainer.check_goes_on(dataset)


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupted_training_leaves_nothing_and_the_state_goes_on(trainer, dataset, method):
    process = trainer.run_until(6, 2, method)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    trainer.check_gone(process)
    trainer.check_goes_on(dataset)


# Samples by number


def test_samples_come_by_number_as_the_dataset_has_them(dataset):
    source = MapDataset(dataset)
    assert len(source) == COUNT
    for number in (0, 20, -1):
        sample = dataset[number]
        found = source[number]
        assert {name: found[name] for name in sample} == dict(sample)
        assert (found["__key__"], found["__shard__"], found["__index__"]) == (
            sample.key,
            sample.shard,
            number % COUNT,
        )
        assert set(found) == {*sample, "__key__", "__shard__", "__index__"}
    together = source.__getitems__([30, 2, 30, 51])
    assert [each["__index__"] for each in together] == [30, 2, 30, 51]
    assert source.__getitems__([]) == []
    for wrong in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            source[wrong]
    with pytest.raises(TypeError):
        MapDataset(Loader(dataset, 2))


@pytest.mark.parametrize(("workers", "method"), [(0, "fork"), (2, "fork"), (2, "spawn")])
def test_samplers_of_torch_work_on_samples_by_number(dataset, workers, method):
    import pyarrow.compute as pc

    source = MapDataset(dataset.select(pc.field("sample_index") >= 10), fields=["json"], decode=True)
    assert len(source) == COUNT - 10
    options = {"multiprocessing_context": method} if workers else {}
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(source, num_replicas=2, rank=rank, shuffle=True, seed=1)
        sampler.set_epoch(1)
        loader = DataLoader(source, batch_size=4, sampler=sampler, num_workers=workers, **options)
        for batch in loader:
            assert batch["json"]["caption"] == [f"{number:08d}.json" for number in batch["__index__"].tolist()]
            seen += batch["__index__"].tolist()
    assert sorted(seen) == list(range(10, COUNT))


def test_a_transform_gives_what_the_loader_collates(dataset):
    source = MapDataset(dataset, fields="json", decode=True, transform=pair)
    loader = DataLoader(source, batch_size=6, shuffle=True, num_workers=2)
    for epoch in range(2):
        torch.manual_seed(epoch)
        found = [(lengths, seeds) for lengths, seeds in loader]
        torch.manual_seed(epoch)
        again = [(lengths, seeds) for lengths, seeds in loader]
        assert all(torch.equal(a, b) for x, y in zip(found, again, strict=True) for a, b in zip(x, y, strict=True))
        assert len({seed for _, seeds in found for seed in seeds.tolist()}) == COUNT
    source = MapDataset(dataset, transform=len).__getitems__([1, 2])
    assert source == [7, 7]
    with pytest.raises(KeyError, match="nothing") as caught:
        MapDataset(dataset, transform=fail)[3]
    assert any("called with sample '00000003'" in note for note in caught.value.__notes__)


def pair(sample):
    return len(sample["json"]["caption"]), sample["__seed__"]


def fail(sample):
    return sample["nothing"]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_by_number_that_are_damaged_are_replaced_and_counted(tmp_path, workers):
    write_shard(tmp_path / "n.tar", [(f"{n:02d}.cls", b"x" if n in {3, 9} else b"%d" % n) for n in range(20)])
    dataset = shardset.discover_dataset(tmp_path)
    with pytest.raises(DecodeError, match="'cls' of sample '03'"):
        MapDataset(dataset, decode=True)[3]
    source = MapDataset(dataset, decode=True, policy=Policy("skip"))
    for _ in range(2):
        batches = list(DataLoader(source, batch_size=5, num_workers=workers))
        values = [value for batch in batches for value in batch["cls"].tolist()]
        assert [value for number, value in enumerate(values) if number not in {3, 9}] == [
            number for number in range(20) if number not in {3, 9}
        ]
    assert source.report.counts["substituted"] == (2 if workers else 4)
    again = pickle.loads(pickle.dumps(source))
    assert not again.report
    assert again[5]["cls"] == 5


# Tensors


@pytest.fixture
def arrays(tmp_path):
    def saved(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    members = []
    for number in range(8):
        members += [
            (f"{number}.a.npy", saved(np.full((2, 3), number, np.uint64))),
            (f"{number}.b.npy", saved(np.array([True, number > 3]))),
            (f"{number}.c.npy", saved(np.array(["text"]))),
            (f"{number}.d.npy", saved(np.arange(number + 1, dtype=">f4"))),
            (f"{number}.cls", b"%d" % number),
            (f"{number}.txt", b"some words"),
        ]
    write_shard(tmp_path / "arrays" / "a.tar", members)
    return shardset.discover_dataset(tmp_path / "arrays")


def test_arrays_come_as_tensors_over_the_same_memory(arrays):
    (batch,) = Loader(arrays, 8, decode=True).torch()
    assert batch["a.npy"].dtype == torch.uint64
    assert batch["a.npy"].shape == (8, 2, 3)
    assert batch["b.npy"].dtype == torch.bool
    assert batch["c.npy"].dtype.kind == "U"  # torch has no texts
    assert [len(each) for each in batch["d.npy"]] == list(range(1, 9))
    assert all(each.dtype == torch.float32 for each in batch["d.npy"])
    assert batch["d.npy"][3].tolist() == [0, 1, 2, 3]
    assert batch["cls"].tolist() == list(range(8))
    assert batch["txt"] == ["some words"] * 8
    assert isinstance(batch["__index__"], torch.Tensor)
    assert isinstance(batch["__position__"], int)


def test_tensors_share_the_memory_of_arrays_unless_torch_cannot():
    from shardset.loading.collation import as_tensors

    array = np.arange(6, dtype=np.uint64).reshape(2, 3)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    given = {"a": array, "view": array[:, 1:], "list": [array, array], "pair": (array, 5), "dict": {"x": array}}
    found = as_tensors({**given, "back": np.arange(3)[::-1], "frozen": frozen}, pin=False)
    assert found["a"].data_ptr() == array.ctypes.data
    assert found["view"].data_ptr() == array.ctypes.data + 8
    assert found["list"][1].data_ptr() == found["pair"][0].data_ptr() == found["dict"]["x"].data_ptr()
    assert found["pair"][1] == 5
    assert found["back"].tolist() == [2, 1, 0]
    assert found["frozen"].data_ptr() != frozen.ctypes.data
    found["frozen"][0] = 9
    assert frozen.tolist() == [0, 1, 2]


def test_images_of_one_size_are_one_tensor_without_a_copy(tmp_path):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 8, 7)).save(buffer, "JPEG")
    write_shard(tmp_path / "i.tar", [(f"{number}.jpg", buffer.getvalue()) for number in range(4)])
    dataset = shardset.discover_dataset(tmp_path)
    (batch,) = Loader(dataset, 4, decode=Decode(size=16)).torch()
    assert batch["jpg"].dtype == torch.uint8
    assert batch["jpg"].shape == (4, 16, 16, 3)
    assert batch["jpg"].is_contiguous()
    (batch,) = DataLoader(MapDataset(dataset, decode=Decode(size=16)), batch_size=4)
    assert batch["jpg"].shape == (4, 16, 16, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_pinning_without_a_gpu_is_an_error_that_says_so(arrays):
    with pytest.raises(ShardsetError, match="memory cannot be pinned") as caught:
        next(iter(Loader(arrays, 4, decode=True).torch(pin=True)))
    assert "cuda.is_available" in caught.value.hint
    loader = DataLoader(IterableDataset(Loader(arrays, 4, fields="cls", decode=True)), batch_size=None, pin_memory=True)
    assert next(iter(loader))["cls"].tolist() == [0, 1, 2, 3]
