"""Pipelines, mixes and `wids` in torch's DataLoader, and in torchdata's StatefulDataLoader.

Run by ``make test-torch``, in an environment of its own: torch is large, and all other tests show that nothing else
needs it.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardset
from shardset.errors import DecodeError, FormatError, NoSamplesError
from shardset.pipeline.mixing import RandomMix, RoundRobin
from shardset.webdataset.wids import ChunkedSampler, DistributedChunkedSampler, ShardListDataset, ShardListSampler

# What torch itself warns of: forks of a process with threads, calls of its own that it has deprecated, few processors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SHARDS, SAMPLES = 8, 10
ALL = [f"{shard:02d}{sample:02d}" for shard in range(SHARDS) for sample in range(SAMPLES)]
METHODS = ("fork", "spawn", "forkserver")
WORKERS = [(0, None)] + [(count, method) for count in (1, 4) for method in METHODS]


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return path


def members_of(shard, samples=SAMPLES):
    for sample in range(samples):
        key = f"{shard:02d}{sample:02d}"
        yield f"{key}.txt", key.encode()
        yield f"{key}.cls", str(sample).encode()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path):
    for shard in range(SHARDS):
        write_tar(tmp_path / f"s-{shard:02d}.tar", members_of(shard))
    return tmp_path


def urls(folder):
    return str(folder / f"s-{{00..{SHARDS - 1:02d}}}.tar")


def keys_of(folder, **options):
    """Make a pipeline of 1-tuples of keys, with nothing in it that a process started afresh could not import."""
    return shardset.WebDataset(urls(folder), **options).to_tuple("__key__")


def load(dataset, workers=0, method=None, kind=DataLoader, **options):
    context = {"multiprocessing_context": method} if workers else {}
    return kind(dataset, batch_size=None, num_workers=workers, **context, **options)


def keys(loader):
    return [key for (key,) in loader]


# In a DataLoader


def test_a_pipeline_is_an_iterable_dataset_of_torch_without_loading_it(folder):
    assert isinstance(keys_of(folder), IterableDataset)
    assert isinstance(RoundRobin([[1]]), IterableDataset)
    code = (
        "import sys, shardset; shardset.WebDataset('x.tar').shuffle(9).decode('pil'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("workers", "method"), WORKERS)
def test_each_sample_comes_once_and_epochs_differ(folder, workers, method):
    loader = load(keys_of(folder, shardshuffle=True).shuffle(15), workers, method)
    orders = [keys(loader) for _ in range(2)]
    assert [sorted(order) for order in orders] == [ALL, ALL]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("workers", "method"), [(0, None), (3, "fork"), (3, "spawn")])
def test_without_shuffling_epochs_are_alike(folder, workers, method):
    loader = load(keys_of(folder), workers, method)
    assert keys(loader) == keys(loader)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_an_epoch_that_is_set_comes_again_as_it_was(folder, method, is_persistent):
    dataset = keys_of(folder, shardshuffle=True).shuffle(15)
    loader = load(dataset, 2, method, persistent_workers=is_persistent)
    orders = [keys(loader) for _ in range(3)]
    assert [sorted(order) for order in orders] == [ALL] * 3
    assert len({tuple(order) for order in orders}) == 3
    dataset.set_epoch(1)
    assert [keys(loader) for _ in range(2)] == orders[1:]


def test_workers_share_the_one_order_of_all_shards(folder):
    alone = [key[:2] for key in keys(load(keys_of(folder, shardshuffle=True)))][::SAMPLES]
    shared = [key[:2] for key in keys(load(keys_of(folder, shardshuffle=True), 4, "fork"))]
    # Worker w has the shards w and w + 4 of that order, and the loader takes from the workers in turn.
    assert shared[:4] == alone[:4]
    assert shared[-4:] == alone[4:]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lengths_and_epochs_that_are_stated_reach_the_workers(folder, method):
    dataset = keys_of(folder).with_length(40, silent=True).with_epoch(10)
    loader = load(dataset, 4, method)
    assert len(loader) == 40
    assert len(keys(loader)) == 40


def test_samples_are_batched_and_collated_by_the_loader(folder):
    dataset = shardset.WebDataset(urls(folder)).decode().to_tuple("txt", "cls")
    batches = list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert sorted(text for texts, _ in batches for text in texts) == ALL
    assert all(isinstance(labels, torch.Tensor) and len(labels) == 4 for _, labels in batches)


def test_images_are_decoded_to_tensors_and_batches_stacked(tmp_path):
    from PIL import Image

    def image(number):
        buffer = io.BytesIO()
        Image.new("RGB", (6, 4), (number, 2 * number, 255)).save(buffer, "PNG")
        return buffer.getvalue()

    path = write_tar(
        tmp_path / "i.tar",
        [
            member
            for number in range(8)
            for member in ((f"{number}.png", image(number)), (f"{number}.cls", b"%d" % number))
        ],
    )
    kinds = {
        "torch": ((3, 4, 6), torch.float32),
        "torchrgb8": ((3, 4, 6), torch.uint8),
        "torchl": ((4, 6), torch.float32),
    }
    for kind, (shape, dtype) in kinds.items():
        dataset = shardset.WebDataset(str(path)).decode(kind).to_tuple("png", "cls").batched(4)
        pictures, labels = next(iter(load(dataset, 1, "fork")))
        assert pictures.shape[0] == 4
        assert pictures.dtype == dtype, kind
        assert tuple(pictures.shape[1:])[-2:] == shape[-2:]
        assert labels.tolist() == [0, 1, 2, 3]
        if kind == "torchrgb8":
            assert pictures[3, :, 0, 0].tolist() == [3, 6, 255]
    picture, _ = next(iter(shardset.WebDataset(str(path)).decode("torch").to_tuple("png", "cls")))
    assert picture.max() == 1.0


# Errors


def test_an_error_in_a_worker_arrives_as_what_it_is_with_its_place(folder):
    shard = folder / "s-03.tar"
    shard.write_bytes(shard.read_bytes()[:2562])  # in a payload
    with pytest.raises(FormatError, match=r"s-03\.tar"):
        keys(load(keys_of(folder), 2, "fork"))
    write_tar(shard, [("k.cls", b"seven")])
    with pytest.raises(DecodeError, match=r"s-03\.tar|'k'|cls"):
        list(load(shardset.WebDataset(urls(folder)).decode().to_tuple("cls"), 2, "fork"))


def test_fewer_shards_than_workers_without_an_index_is_an_error_with_the_numbers(folder):
    dataset = shardset.WebDataset(str(folder / "s-{00..02}.tar")).to_tuple("__key__")
    with pytest.raises(NoSamplesError, match=r"3 shards .* 4 processes"):
        keys(load(dataset, 4, "fork"))


@pytest.mark.parametrize("workers", [4, 7])
def test_fewer_shards_than_workers_are_shared_by_samples_where_there_is_an_index(folder, workers):
    shardset.index_dataset(folder)
    dataset = shardset.WebDataset(str(folder / "s-{00..02}.tar")).to_tuple("__key__")
    loader = load(dataset, workers, "fork")
    for _ in range(2):
        assert sorted(keys(loader)) == ALL[: 3 * SAMPLES]


# WebLoader


def test_what_a_loader_gives_goes_through_more_stages(folder):
    dataset = shardset.WebDataset(urls(folder)).decode().to_tuple("txt", "cls").batched(5)
    loader = shardset.WebLoader(dataset, batch_size=None, num_workers=2).unbatched().shuffle(30).batched(7)
    batches = list(loader)
    assert [len(texts) for texts, _ in batches] == [7] * 11 + [3]
    texts = [text for texts, _ in batches for text in texts]
    assert sorted(texts) == ALL
    assert texts != [text for texts, _ in loader for text in texts]


def test_an_epoch_of_a_loader_counts_what_all_workers_give(folder):
    loader = shardset.WebLoader(keys_of(folder), batch_size=None, num_workers=4).with_epoch(100)
    assert len(keys(loader)) == 100
    counted = Counter(keys(loader))
    assert counted.total() == 100
    assert set(counted) == set(ALL)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_epochs_of_a_loader_differ_even_if_some_are_given_up(folder, workers, method, is_persistent):
    dataset = keys_of(folder, shardshuffle=True).shuffle(15)
    loader = load(dataset, workers, method, shardset.WebLoader, persistent_workers=is_persistent and workers > 0)
    orders = []
    for _ in range(3):
        orders.append(keys(loader))
        next(iter(loader))
        gc.collect()
    assert [sorted(order) for order in orders] == [ALL] * 3
    assert len({tuple(order) for order in orders}) == 3
    loader.set_epoch(2)
    assert keys(loader) == orders[1]
    dataset.set_epoch(4)
    assert keys(loader) == orders[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_its_state_was_taken(folder, workers):
    def make():
        dataset = keys_of(folder, shardshuffle=True).shuffle(15)
        return load(dataset, workers, "fork", shardset.WebLoader).shuffle(20).listed(3)

    loader = make()
    whole, then = list(loader), list(loader)
    loader = make()
    samples = iter(loader)
    head = list(islice(samples, 9))
    state = json.loads(json.dumps(loader.state_dict()))
    del samples
    fresh = make()
    fresh.load_state_dict(state)
    assert head + list(fresh) == whole
    assert list(fresh) == then


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_what_workers_leave_out_is_in_the_report_of_the_loader(folder, method, is_persistent):
    for shard in range(SHARDS):
        write_tar(folder / f"s-{shard:02d}.tar", [*members_of(shard), ("._x.txt", b"hidden"), ("README", b"none")])
    loader = load(keys_of(folder), 3, method, shardset.WebLoader, persistent_workers=is_persistent)
    assert not loader.report()
    for _ in range(2):
        keys(loader)
        assert loader.report().counts == {"hidden_member": SHARDS, "no_suffix": SHARDS}
    assert "s-0" in str(loader.report())


def test_a_report_of_workers_that_were_stopped_early_is_there_too(folder):
    for shard in range(SHARDS):
        write_tar(folder / f"s-{shard:02d}.tar", [("._x.txt", b"hidden"), *members_of(shard)])
    loader = load(keys_of(folder), 2, "fork", shardset.WebLoader).with_epoch(50)
    keys(loader)
    gc.collect()
    assert loader.report().counts["hidden_member"] >= 4  # both workers are through two shards at least


def test_the_loader_takes_torchs_arguments_and_gives_its_loader(folder):
    loader = shardset.WebLoader(keys_of(folder), num_workers=1, prefetch_factor=3)
    assert loader.loader.prefetch_factor == 3
    assert loader.loader.batch_size == 1
    assert isinstance(loader.dataset, shardset.WebDataset)


# Ranks

RANK = """
import json, os, sys
import shardset, torch
from torch.utils.data import DataLoader
urls, workers, init, rank, world = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
if init == "environment":
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
else:
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
dataset = shardset.WebDataset(urls, shardshuffle=True).shuffle(20).to_tuple("__key__")
make = shardset.WebLoader if rank % 2 else DataLoader
loader = make(dataset, batch_size=None, num_workers=workers, multiprocessing_context=sys.argv[6] if workers else None)
print(json.dumps([[key for (key,) in loader] for _ in range(2)]))
if init != "environment":
    torch.distributed.destroy_process_group()
"""


def run_ranks(tmp_path, code, *arguments, world=2, init="environment", tail=()):
    """Run a program once for each rank at the same time, and return what each printed."""
    if init == "gloo":
        init = (tmp_path / f"meeting-{time.monotonic_ns()}").as_uri()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments), init, str(rank), str(world), *tail],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    return [json.loads(text) for text in printed]


@pytest.mark.parametrize("init", ["environment", "gloo"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_two_ranks_with_four_workers_each_see_each_sample_once(folder, init, method):
    ranks = run_ranks(folder, RANK, urls(folder), 4, init=init, tail=[method])
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == ALL
    # Shards change hands from epoch to epoch.
    assert {key[:2] for key in ranks[0][0]} != {key[:2] for key in ranks[0][1]}


def test_ranks_share_by_samples_where_shards_are_few_and_indexed(folder):
    shardset.index_dataset(folder)
    some = str(folder / "s-{00..02}.tar")
    ranks = run_ranks(folder, RANK, some, 4, tail=["fork"])
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == ALL[: 3 * SAMPLES]


# States


def states(loader, at):
    """Take `at` items and a state, and return them with what the same loader gives after that."""
    samples = iter(loader)
    head = list(islice(samples, at))
    state = loader.state_dict()
    return head, state, list(samples), list(loader)


@pytest.mark.parametrize(
    ("workers", "method", "at"),
    [(workers, "fork", at) for workers in (0, 2) for at in (0, 1, 2, 17, 41, 79)] + [(2, "spawn", 17)],
)
def test_a_stateful_loader_goes_on_exactly_in_mid_epoch(folder, workers, method, at):
    shardset.index_dataset(folder)

    def make():
        dataset = shardset.WebDataset(urls(folder), shardshuffle=True).shuffle(25, initial=10).decode()
        return load(dataset.to_tuple("txt", "cls"), workers, method, StatefulDataLoader)

    head, state, tail, later = states(make(), at)
    assert sorted(text for text, _ in head + tail) == ALL
    fresh = make()
    fresh.load_state_dict(json.loads(json.dumps(state)))
    assert list(fresh) == tail
    assert list(fresh) == later
    assert later != head + tail


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_small_and_made_without_reading(folder, workers):
    shardset.index_dataset(folder)
    dataset = shardset.WebDataset(urls(folder), shardshuffle=True).shuffle(25).to_tuple("__key__")
    loader = load(dataset, workers, "fork", StatefulDataLoader)
    samples = iter(loader)
    for _ in range(40):
        next(samples)
    assert len(json.dumps(loader.state_dict())) < 3000 * max(1, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_the_pipeline_and_of_the_loader_go_on_exactly(folder, workers):
    def make(is_pipelines):
        dataset = shardset.WebDataset(urls(folder), shardshuffle=True).shuffle(25).decode().to_tuple("txt", "cls")
        if is_pipelines:
            return StatefulDataLoader(dataset.batched(6), batch_size=None, num_workers=workers)
        return StatefulDataLoader(dataset, batch_size=6, num_workers=workers)

    def plain(batches):
        return [(list(texts), torch.as_tensor(labels).tolist()) for texts, labels in batches]

    for is_pipelines in (True, False):
        for at in (1, 5, 8):
            head, state, tail, _ = states(make(is_pipelines), at)
            assert sorted(text for texts, _ in head + tail for text in texts) == ALL
            fresh = make(is_pipelines)
            fresh.load_state_dict(state)
            assert plain(fresh) == plain(tail)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_a_finished_epoch_goes_on_with_the_next(folder, workers):
    def make():
        return load(keys_of(folder, shardshuffle=True).shuffle(25), workers, "fork", StatefulDataLoader)

    loader = make()
    first, second = keys(loader), keys(loader)
    again = make()
    assert keys(again) == first
    fresh = make()
    fresh.load_state_dict(again.state_dict())
    assert keys(fresh) == second


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mix_goes_on_exactly(folder, workers):
    def make():
        first = shardset.WebDataset(str(folder / "s-{00..03}.tar"), shardshuffle=True).shuffle(9).to_tuple("__key__")
        second = shardset.WebDataset(str(folder / "s-{04..07}.tar"), shardshuffle=True).shuffle(9).to_tuple("__key__")
        return load(RandomMix([first, second], probs=[2, 1], longest=True), workers, "fork", StatefulDataLoader)

    head, state, tail, later = states(make(), 23)
    assert sorted(key for (key,) in head + tail) == ALL
    fresh = make()
    fresh.load_state_dict(state)
    assert list(fresh) == tail
    assert list(fresh) == later


# Mixes


@pytest.mark.parametrize("method", METHODS)
def test_mixes_work_in_workers_and_their_epochs_differ(folder, method):
    parts = [shardset.WebDataset(str(folder / f"s-0{half}.tar")).to_tuple("__key__") for half in ("{0..3}", "{4..7}")]
    loader = load(RandomMix(parts, longest=True), 2, method)
    orders = [keys(loader) for _ in range(2)]
    assert [sorted(order) for order in orders] == [ALL, ALL]
    assert orders[0] != orders[1]


def test_what_mixes_cut_off_in_workers_is_counted(folder):
    parts = [shardset.WebDataset(str(folder / f"s-0{part}.tar")).to_tuple("__key__") for part in ("{0..1}", "{2..7}")]
    loader = shardset.WebLoader(RoundRobin(parts), batch_size=None, num_workers=2)
    assert len(keys(loader)) == 2 * 2 * SAMPLES
    assert loader.report().counts["cut_off"] == 2


# What is left behind


def children():
    """Return the processes below this one, by number: those of multiprocessing's own housekeeping apart."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    ).stdout
    lines = [line.split(None, 1) for line in found.splitlines()]
    ignored = ("ps -o", "resource_tracker", "forkserver")
    return {int(pid) for pid, args in lines if not any(name in args for name in ignored)}


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [DataLoader, "WebLoader", StatefulDataLoader])
def test_iterators_that_are_given_up_leave_no_processes(folder, kind):
    kind = shardset.WebLoader if kind == "WebLoader" else kind
    before = children()
    for _ in range(2):
        samples = iter(load(keys_of(folder), 3, "fork", kind))
        next(samples)
        assert len(children() - before) == 3
        del samples
        gc.collect()
        wait_until(lambda: not children() - before)


def test_programs_behind_shards_end_with_the_iterator(folder):
    mark = f"{os.getpid()}{time.monotonic_ns()}"[-9:]
    shard = write_tar(folder / "long.tar", [(f"{number}.bin", bytes(50_000)) for number in range(100)])
    dataset = shardset.WebDataset([f"pipe:cat {shard}; sleep 1{mark}"] * 2).to_tuple("__key__")
    samples = iter(load(dataset, 2, "fork"))
    next(samples)

    def sleeping():
        return subprocess.run(["pgrep", "-f", f"sleep 1{mark}"], capture_output=True, check=False).returncode == 0

    assert sleeping()
    del samples
    gc.collect()
    wait_until(lambda: not sleeping())


INTERRUPTED = """
import sys, shardset
from torch.utils.data import DataLoader
dataset = shardset.WebDataset(sys.argv[1]).shuffle(10).to_tuple("__key__").repeat()
loader = shardset.WebLoader(dataset, batch_size=None, num_workers=3, multiprocessing_context=sys.argv[2])
for number, _ in enumerate(loader):
    if number == 5:
        print("begun", flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_interrupted_program_leaves_no_processes(folder, method):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, urls(folder), method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0

    def is_empty():
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_empty)


# wids


def text_of(sample):
    return sample[".txt"]


def shards_of(folder):
    return [{"url": str(folder / f"s-{shard:02d}.tar"), "nsamples": SAMPLES} for shard in range(SHARDS)]


@pytest.mark.parametrize(("workers", "method"), WORKERS)
def test_samples_by_number_come_from_workers_in_the_order_of_the_sampler(folder, workers, method):
    dataset = ShardListDataset(shards_of(folder))
    sampler = ChunkedSampler(dataset, chunksize=20)
    # Collated here: torch's own way has none for the None that `__dataset__` is.
    options: dict = {"batch_size": 6, "sampler": sampler, "num_workers": workers, "collate_fn": list}
    context = {"multiprocessing_context": method} if workers else {}
    loader = DataLoader(dataset, **options, **context)
    assert len(loader) == 14
    orders = []
    for epoch in range(2):
        expected = [ALL[number] for number in ChunkedSampler(dataset, chunksize=20).in_order(epoch)]
        order = [sample[".txt"] for batch in loader for sample in batch]
        assert order == expected
        orders.append(order)
    assert orders[0] != orders[1]


def test_shard_list_samplers_work_in_a_loader(folder):
    dataset = ShardListDataset(shards_of(folder), lru_size=1).add_transform(text_of)
    loader = DataLoader(dataset, batch_size=5, sampler=ShardListSampler(dataset, shufflefirst=True))
    assert sorted(text for batch in loader for text in batch) == ALL
    assert dataset.get_stats()[1] == SHARDS


SAMPLED = """
import json, os, sys
import torch
from torch.utils.data import DataLoader
from shardset.webdataset.wids import DistributedChunkedSampler, ShardListDataset
shards, count, init = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, world = map(int, sys.argv[4:])
torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
dataset = ShardListDataset(shards)
sampler = DistributedChunkedSampler(dataset, num_samples=count, chunksize=20, shufflefirst=True)
loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=2)
epochs = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    epochs.append([sample[".txt"] for sample in loader])
print(json.dumps(epochs))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("count", [80, 79])
def test_two_ranks_share_samples_by_number_and_are_equally_long(folder, count):
    ranks = run_ranks(folder, SAMPLED, json.dumps(shards_of(folder)), count, init="gloo")
    for epoch in range(2):
        assert [len(rank[epoch]) for rank in ranks] == [40, 40]
        assert sorted({*ranks[0][epoch], *ranks[1][epoch]}) == ALL[:count]
    assert ranks[0][0] != ranks[0][1]


def test_a_sampler_of_one_process_needs_no_process_group(folder):
    dataset = ShardListDataset(shards_of(folder))
    assert sorted(DistributedChunkedSampler(dataset, num_samples=30)) == list(range(30))
