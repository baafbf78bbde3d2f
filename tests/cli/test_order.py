from __future__ import annotations

import numpy as np
import pytest

from cli.running import run_at_terminal
from shards import make_members, write_dataset, write_shard
from shardset.cli.order import needed_run, needed_window, ranks_of_step
from shardset.dataset.opening import discover_dataset
from shardset.loading.order import RandomOrder, Shuffle, WindowedOrder, order_of, resolve
from shardset.loading.quality import Sorted, measure_quality
from shardset.loading.steps import Step, Steps


@pytest.fixture
def many(tmp_path):
    """A folder of 4 shards with 300 samples each."""
    for number in range(4):
        members = make_members(300, fields=("txt",), start=300 * number)
        write_shard(tmp_path / "many" / f"{number}.tar", members)
    return tmp_path / "many"


def resolved(source, setting):
    dataset = discover_dataset(str(source))
    return dataset, order_of(resolve(setting, len(dataset), dataset.total_size), len(dataset), 3)


def test_what_is_listed_is_what_the_order_takes(run, many):
    dataset, order = resolved(many, Shuffle(run_bytes=8192))
    done = run("order", many, "--run", "8192", "--seed", 3, "--epoch", 2, "--start", 100, "--count", 50, "--json")
    expected = order.take(2, range(100, 150)).tolist()
    listed = done.documents
    assert [one["position"] for one in listed] == list(range(100, 150))
    assert [one["sample_index"] for one in listed] == expected
    assert [one["key"] for one in listed] == [dataset[number].key for number in expected]
    assert [one["shard"] for one in listed] == [dataset[number].shard for number in expected]
    assert "1,050 positions more" in done.err


def test_lines_for_programs_have_the_same(run, many):
    lines = run("order", many, "--batch-size", 8, "--world-size", 2, "-n", 5).lines
    listed = run("order", many, "--batch-size", 8, "--world-size", 2, "-n", 5, "--json").documents
    assert lines == [[str(value) for value in one.values()] for one in listed]


def test_each_way_to_shuffle_has_its_order(run, many):
    _, full = resolved(many, "full")
    assert isinstance(full, RandomOrder)
    numbers = {
        kind: [one["sample_index"] for one in run("order", many, kind, "--seed", 3, "-n", 0, "--json").documents]
        for kind in ("--shuffle", "--full", "--sequential")
    }
    assert numbers["--sequential"] == list(range(1200))
    assert numbers["--full"] == full.take(0, range(1200)).tolist()
    assert numbers["--shuffle"] not in (numbers["--full"], numbers["--sequential"])
    assert sorted(numbers["--shuffle"]) == list(range(1200))


@pytest.mark.parametrize(("lanes", "world_size"), [(64, 2), (64, 3), (6, 3), (1, 4)])
def test_ranks_are_those_that_a_loader_shares_positions_out_to(run, many, lanes, world_size):
    _, order = resolved(many, Shuffle(run_bytes=1024, lanes=lanes))
    assert order.lanes == lanes
    options = ("--run", 1024, "--lanes", lanes, "--batch-size", 100, "--world-size", world_size, "-n", 0, "--json")
    listed = run("order", many, *options).documents
    size = 100 * world_size
    starts = range(0, 1200 // size * size, size)
    assert [one["step"] for one in listed] == [at // size if at < starts.stop else None for at in range(1200)]
    for rank in range(world_size):
        steps = Steps(100, rank, world_size)
        expected = [at for start in starts for at in steps.share(Step(start, start + size), lanes)]
        assert [one["position"] for one in listed if one["rank"] == rank] == sorted(expected)


def test_ranks_of_a_step_are_each_given_as_many_positions():
    assert ranks_of_step(Steps(2, 0, 3), 64) == [0, 0, 1, 1, 2, 2]
    assert ranks_of_step(Steps(2, 0, 2), 64) == [0, 1, 0, 1]


def test_what_stands_behind_the_end_is_refused(run, many):
    assert run("order", many, "--start", 1199).code == 0
    done = run("order", many, "--start", 1200)
    assert done.code == 2
    assert "no position 1200 of 1,200 samples" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a SOURCE"),
        (("--explain",), "give a SOURCE"),
        (("--explain", "--samples", 5), "give a SOURCE"),
        (("--samples", 5, "--mean-bytes", 10), "nothing to list"),
        (("SOURCE", "--samples", 5, "--mean-bytes", 10, "--explain"), "give a SOURCE"),
        (("SOURCE", "--full", "--window", "1GiB"), "say nothing about --full"),
        (("SOURCE", "--sequential", "--lanes", 3), "say nothing about --sequential"),
        (("SOURCE", "--lanes", 10**6), "lanes is 1000000"),
        (("SOURCE", "--window", "much"), "is no size"),
    ],
)
def test_what_cannot_be_asked_for_is_said(run, many, arguments, said):
    done = run("order", *(many if argument == "SOURCE" else argument for argument in arguments))
    assert done.code == 2
    assert said in done.err


def test_what_is_not_there_is_told_as_ever(run, tmp_path):
    assert run("order", tmp_path / "none").code == 3


def test_explaining_needs_no_data(run):
    done = run("order", "--explain", "--samples", 1_000_000, "--mean-bytes", "10kB", "--world-size", 8, "--json")
    shown = done.document
    assert done.code == 0
    assert (shown["samples"], shown["size"], shown["mean_bytes"], shown["num_shards"]) == (10**6, 10**10, 10_000, None)
    assert (shown["kind"], shown["lanes"]) == ("windowed", 192)
    assert shown["run"] == {"samples": 26, "bytes": 260_000}
    order = WindowedOrder(10**6, 0, 26, 4032, 192)
    window = order.window_end(0)
    assert shown["window"] == {"samples": window, "bytes": window * 10_000, "runs": window // 26}
    assert shown["rank"]["samples"] == window // 8
    assert shown["rank"]["memory_bytes"] == 2 * window // 8 * 10_000
    assert 200_000 < shown["rank"]["read_bytes"] < 300_000
    assert 0 < shown["order_ns"] < 10_000
    quality = shown["quality"]
    expected = measure_quality(order, Sorted.of(10**6), batch=2048)
    assert (quality["batch"], quality["batches"], quality["classes"]) == (2048, 400, 1000)
    assert quality["chi_square"]["order"] == expected.chi_square
    assert quality["shards"]["order"] == expected.shards
    assert quality["chi_square"]["true_shuffle"] == pytest.approx(1, abs=0.02)


def test_explaining_knows_the_shards(run, many):
    shown = run("order", many, "--explain", "--batch-size", 32, "--json").document
    dataset = discover_dataset(str(many))
    assert (shown["samples"], shown["num_shards"], shown["size"]) == (1200, 4, dataset.total_size)
    assert shown["rank"]["reads"] == 4
    assert shown["order_ns"] is None  # of so few
    assert shown["quality"]["shards"]["chance"] == pytest.approx(4, abs=0.01)
    assert shown["advice"] == ["Nothing needs to be changed."]
    text = run("order", many, "--explain").text
    assert "1,200" in text
    assert "the whole dataset" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--window", "64MiB"), "Sorted data gives uneven batches"),
        (("--world-size", 5), "use --lanes 195"),
        (("--window", "4GiB"), "a smaller --window takes less memory"),
        (("--run", "32KiB"), "use a larger --run"),
        (("--full",), "--shuffle reads runs"),
        (("--sequential",), "Nothing is shuffled"),
        (("--mean-bytes", "1MB"), "a true shuffle with any window"),
        ((), "Nothing needs to be changed."),
    ],
)
def test_what_might_be_changed_is_said(run, arguments, said):
    data = ("--samples", 1_000_000, "--mean-bytes", "10kB")
    done = run("order", "--explain", *data, *arguments)
    assert done.code == 0
    assert said in done.text


def test_the_advice_helps():
    count = 1_000_000
    order = WindowedOrder(count, 0, 26, 512, 64)
    assert measure_quality(order, Sorted.of(count)).chi_square > 1.2
    needed = needed_window(26, 256 - 64)
    runs = -(-needed // 26 // 64) * 64
    assert measure_quality(WindowedOrder(count, 0, 26, runs, 64), Sorted.of(count)).chi_square < 1.13
    shorter = needed_run(26 * 512, 256 - 64)
    runs = 26 * 512 // shorter // 64 * 64
    assert measure_quality(WindowedOrder(count, 0, shorter, runs, 64), Sorted.of(count)).chi_square < 1.13


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_next_to_nothing_can_be_listed_and_explained(run, tmp_path, samples):
    write_shard(tmp_path / "a.tar", make_members(samples, fields=("txt",)))
    for kind in ("--shuffle", "--full", "--sequential"):
        assert len(run("order", tmp_path, kind).lines) == samples
        shown = run("order", tmp_path, kind, "--explain", "--json").document
        assert shown["samples"] == shown["rank"]["samples"] == samples
        assert (shown["quality"] is None) == (samples < 2)
        assert run("order", tmp_path, kind, "--explain").code == 0


def test_names_that_mean_harm_do_none(run, hostile):
    lines = run("order", hostile, "--sequential").lines
    assert lines[0][4] == "\\x1b[31mred"
    listed = run("order", hostile, "--sequential", "--json").documents
    assert listed[2]["key_hex"] == b"bad\xff".hex()


@pytest.mark.slow
def test_a_terminal_gets_tables(tmp_path):
    write_dataset(tmp_path)
    code, shown = run_at_terminal("order", tmp_path, "--explain", "--batch-size", 4, NO_COLOR="1")
    assert code == 0
    assert "a true shuffle" in shown
    code, shown = run_at_terminal("order", tmp_path, NO_COLOR="1")
    assert code == 0
    assert "position" in shown
    assert np.all([len(line) <= 100 for line in shown.splitlines()])
