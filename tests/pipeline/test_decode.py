"""The stages that decode: order, look-ahead, errors at their turn, threads that come and go, states, forks."""

from __future__ import annotations

import gc
import io
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.decoding.handlers import handle_extension
from shardset.decoding.sample_decoder import SampleDecoder
from shardset.errors import DecodeError, MissingExtraError
from shardset.pipeline.ahead import AHEAD
from shardset.pipeline.decode import XDECODERS, decode, decode_stage, find_decoder, xdecode
from shardset.pipeline.run import Run, Step
from shardset.policy import Policy

THREADS = [0, 1, 2, 5]


def samples(count, **fields):
    return [
        {"__key__": f"{number:03d}", "__url__": "s.tar", "cls": b"%d" % number, **fields} for number in range(count)
    ]


def classes(decoded):
    return [sample["cls"] for sample in decoded]


def threads_of_ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardset-decode")]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    gc.collect()
    wait_until(lambda: not threads_of_ours())


def slowly(data):
    time.sleep(random.Random(int(data)).random() / 200)
    return int(data)


# --- what comes out ---


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 60])
def test_samples_come_decoded_and_in_order(threads, count):
    assert classes(decode(samples(count), threads=threads)) == list(range(count))


@pytest.mark.parametrize("threads", THREADS)
def test_the_order_stays_where_some_fields_take_longer(threads):
    slow = handle_extension("cls", slowly)
    assert classes(decode(samples(80), slow, threads=threads)) == list(range(80))


@pytest.mark.parametrize("threads", [0, 2])
def test_all_arguments_mean_what_they_do_for_a_decoder(threads):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 3)).save(buffer, "PNG")
    given_ = samples(5, png=buffer.getvalue(), json=b"[1]", txt="was decoded")
    stage = decode_stage("rgb8", only="png json txt", post=[], partial=True, threads=threads)
    for number, sample in enumerate(stage(given_)):
        assert sample.pop("png").shape == (3, 4, 3)
        assert (sample["cls"], sample["json"], sample["txt"]) == (b"%d" % number, b"[1]", "was decoded")


@pytest.mark.parametrize("threads", [0, 2])
def test_one_decoder_may_stand_for_all_handlers(threads):
    decoder = SampleDecoder(only=["cls"])
    assert classes(decode(samples(9), decoder, threads=threads)) == list(range(9))


# --- when the stage is made ---


def test_wrong_arguments_are_refused_when_the_stage_is_made():
    with pytest.raises(ValueError, match=r"unknown image spec 'PIL'.*did you mean 'pil'"):
        decode_stage("PIL")
    with pytest.raises(TypeError, match="no handler"):
        decode_stage(3)
    with pytest.raises(ValueError, match="threads=-1"):
        decode_stage(threads=-1)


def test_a_stage_pickles_and_starts_no_thread():
    stage = pickle.loads(pickle.dumps(decode_stage("rgb8", handle_extension("up", bytes.upper), threads=3)))
    iterator = stage(samples(20, up=b"a"))
    assert not threads_of_ours()
    assert classes(iterator) == list(range(20))
    assert stage.name == "decode"


def test_one_stage_serves_many_passes_at_once():
    stage = decode_stage(threads=2)
    first, second = stage(samples(30)), stage(samples(30))
    assert [pair for pair in zip(classes(first), classes(second), strict=True)] == [(n, n) for n in range(30)]  # noqa: C416
    assert classes(itertools.chain(stage(samples(3)), stage(samples(2)))) == [0, 1, 2, 0, 1]


# --- threads ---


def test_no_more_is_pulled_than_the_threads_may_hold():
    pulled = 0

    def source():
        nonlocal pulled
        for sample in samples(500):
            pulled += 1
            yield sample

    iterator = decode(source(), threads=3)
    next(iterator)
    assert pulled == 1
    for number in range(1, 100):
        assert next(iterator)["cls"] == number
        assert pulled <= number + 3 * AHEAD
    iterator.close()
    assert pulled < 120


def test_several_samples_are_decoded_at_the_same_time():
    together = threading.Barrier(3, timeout=60)

    def meet(data):
        if int(data):  # the first one is decoded by the caller's thread
            together.wait()
        return threading.current_thread().name

    names = {sample["cls"] for sample in decode(samples(7), handle_extension("cls", meet), threads=3)}
    assert len(names) == 4


def test_closing_ends_the_threads_at_once_and_leaves_waiting_samples_alone():
    begun = []
    iterator = decode(
        samples(50), handle_extension("cls", lambda data: begun.append(data) or time.sleep(0.01)), threads=2
    )
    for _ in range(3):
        next(iterator)
    assert threads_of_ours()
    iterator.close()
    assert not threads_of_ours()
    seen = len(begun)
    time.sleep(0.05)
    assert len(begun) == seen < 20


def test_forgetting_the_iterator_ends_the_threads():
    iterator = decode(samples(50), threads=2)
    for _ in range(3):
        next(iterator)
    del iterator
    gc.collect()
    wait_until(lambda: not threads_of_ours())


def test_an_iterator_in_a_cycle_of_references_ends_its_threads_when_it_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.me, holder.iterator = holder, decode(samples(50), threads=2)
    for _ in range(3):
        next(holder.iterator)
    del holder
    gc.collect()
    wait_until(lambda: not threads_of_ours())


def test_a_slow_field_does_not_hold_up_closing_for_ever():
    release = threading.Event()
    iterator = decode(samples(9), handle_extension("cls", lambda data: int(data) and release.wait(20)), threads=1)
    next(iterator)
    puller = threading.Thread(target=next, args=(iterator,))
    puller.start()
    wait_until(threads_of_ours)
    release.set()
    puller.join()
    iterator.close()


def test_a_program_ends_while_an_iterator_is_in_the_middle():
    program = (
        "from shardset.pipeline.decode import decode\n"
        "iterator = decode(({'cls': b'1'} for _ in range(1000)), threads=2)\n"
        "print([next(iterator)['cls'] for _ in range(3)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("[1, 1, 1]\n", "", 0)


def _count_in_child(stage, queue):
    queue.put(classes(stage(samples(40))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python itself, where there are threads
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_stages_work_in_child_processes_while_the_parent_is_in_the_middle(method):
    stage = decode_stage(threads=2)
    iterator = stage(samples(40))
    first = [next(iterator)["cls"] for _ in range(5)]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_count_in_child, args=(stage, queue))
    child.start()
    assert queue.get(timeout=60) == list(range(40))
    child.join(60)
    assert child.exitcode == 0
    assert first + classes(iterator) == list(range(40))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_pass_that_is_forked_in_the_middle_goes_on_in_both_processes():
    iterator = decode(samples(40), handle_extension("cls", slowly), threads=2)
    first = [next(iterator)["cls"] for _ in range(5)]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(classes(iterator)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        rest = json.load(pipe)
    os.waitpid(child, 0)
    assert first + rest == first + classes(iterator) == list(range(40))


# --- errors ---


def broken(count, bad):
    found = samples(count)
    for number in bad:
        found[number]["cls"] = b"no number"
    return found


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_comes_at_its_samples_turn(threads):
    iterator = decode(broken(40, [20]), threads=threads)
    assert [next(iterator)["cls"] for _ in range(20)] == list(range(20))
    with pytest.raises(DecodeError, match="field 'cls' of sample '020'") as caught:
        next(iterator)
    assert (caught.value.shard, caught.value.k) == ("s.tar", "cls")
    assert not threads_of_ours()
    assert list(iterator) == []


@pytest.mark.parametrize("threads", THREADS)
def test_a_policy_skips_and_counts(threads, caplog):
    run = Run(policy=Policy(on_error="skip"))
    assert classes(decode(broken(40, [0, 3, 39]), threads=threads, step=Step(run, name="decode"))) == [
        *(1, 2),
        *range(4, 39),
    ]
    assert run.report.counts == {"bad_field": 3}
    assert [place.key for place in run.report.places("bad_field")] == ["000", "003", "039"]
    assert not caplog.records


@pytest.mark.parametrize("threads", THREADS)
def test_a_handler_decides_and_what_it_leaves_out_is_counted(threads):
    run, seen = Run(), []
    iterator = decode(
        broken(9, [2, 5]), threads=threads, handler=lambda error: seen.append(error) or True, step=Step(run)
    )
    assert classes(iterator) == [0, 1, 3, 4, 6, 7, 8]
    assert [error.key for error in seen] == ["002", "005"]
    assert run.report.counts == {"bad_field": 2}


@pytest.mark.parametrize("threads", THREADS)
def test_a_handler_that_stops_ends_the_stage(threads):
    run = Run()
    assert classes(decode(broken(40, [5]), threads=threads, handler=lambda _: False, step=Step(run))) == [*range(5)]
    assert run.report.counts == {"bad_field": 1, "stopped_by_handler": 1}
    assert not threads_of_ours()


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_of_the_source_comes_after_the_samples_before_it(threads):
    def source():
        yield from samples(11)
        raise OSError("the disk is gone")

    iterator = decode(source(), threads=threads)
    assert [next(iterator)["cls"] for _ in range(11)] == list(range(11))
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert not threads_of_ours()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_missing_package_is_raised_whatever_the_handler_says(threads, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(MissingExtraError):
        list(decode(samples(5, mp=b"\x01"), threads=threads, handler=lambda _: True))


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_no_sample_is_settled_too(threads):
    run = Run(policy=Policy(codes={"bad_field": "skip"}))
    assert classes(decode([*samples(2), (b"1", b"2"), *samples(1)], threads=threads, step=Step(run))) == [0, 1, 0]
    assert run.report.counts == {"bad_field": 1}


def test_a_stage_through_which_nothing_passes_says_so(caplog):
    run = Run(policy=Policy(on_error="skip"))
    with caplog.at_level(logging.WARNING):
        assert list(decode(broken(3, range(3)), step=Step(run, name="decode"))) == []
    assert "'decode' passed on none of 3 samples" in caplog.text
    assert "cls" in caplog.text


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 3), st.integers(0, 45))
def test_threads_give_what_one_thread_gives_however_much_is_taken(bad, threads, taken):
    given_ = broken(len(bad), [number for number, is_bad in enumerate(bad) if is_bad])
    run = Run(policy=Policy(on_error="skip"))
    iterator = decode(given_, threads=threads, step=Step(run))
    found = [sample["cls"] for sample in itertools.islice(iterator, taken)]
    iterator.close()
    assert found == [number for number, is_bad in enumerate(bad) if not is_bad][:taken]


# --- states ---


def reading(run, count, start=0):
    """A source that says where its samples come from."""
    for number, sample in enumerate(samples(count)[start:], start):
        run.origin = (0, 512 * number)
        yield sample


@pytest.mark.parametrize("threads", THREADS)
def test_each_sample_leaves_with_its_origin(threads):
    run = Run()
    for sample in decode(reading(run, 40), threads=threads, step=Step(run)):
        assert run.origin == (0, 512 * sample["cls"])


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("taken", [1, 2, 9, 30, 40])
def test_a_state_names_the_samples_that_are_inside(threads, taken):
    run = Run()
    read = []

    def source():
        for sample in reading(run, 40):
            read.append(int(sample["cls"]))
            yield sample

    iterator = decode(source(), threads=threads, step=Step(run, 3))
    left = [next(iterator)["cls"] for _ in range(taken)]
    held = json.loads(json.dumps(run.snapshots[3]()))["held"] if 3 in run.snapshots else []
    assert held == [[0, 512 * number] for number in read[len(left) :]]
    iterator.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_what_later_stages_held_is_passed_on_without_being_held_again(threads):
    run = Run(
        restored={5: {"held": [[0, 512 * number] for number in range(6)]}, 1: {"held": [[9, 9]]}, 3: {"held": []}}
    )
    pulled = []

    def source():
        for sample in reading(run, 40):
            pulled.append(sample)
            yield sample

    iterator = decode(source(), threads=threads, step=Step(run, 3))
    for number in range(6):
        assert next(iterator)["cls"] == number
        assert len(pulled) == number + 1
        assert not threads_of_ours()
    assert classes(iterator) == list(range(6, 40))


# --- xdecode ---


def test_fields_are_decoded_by_patterns_with_functions_of_streams():
    given_ = {
        "__key__": "a",
        "__url__": "u",
        "cls": b"7",
        "seg.PNG": b"x",
        "txt": "é".encode(),
        "bin": b"\0",
        "raw": b"r",
    }
    stages = xdecode(
        [given_], ("*.png", lambda stream: ("png", stream.read())), ("raw", False), cls=lambda s: int(s.read())
    )
    assert list(stages) == [
        {"__key__": "a", "__url__": "u", "cls": 7, "seg.PNG": ("png", b"x"), "txt": "é", "bin": b"\0", "raw": b"r"}
    ]


def test_later_patterns_win():
    found = xdecode([{"a.x": b"1"}], ("*.x", lambda _: 1), ("a.*", lambda _: 2), x=lambda _: 3)
    assert list(found) == [{"a.x": 3}]
    assert list(xdecode([{"a.x": b"1"}], ("*.x", lambda _: 1), ("a.*", lambda _: 2))) == [{"a.x": 2}]


def test_a_field_that_no_pattern_fits_is_an_error_unless_it_may_stay():
    with pytest.raises(ValueError, match="no pattern fits") as caught:
        list(xdecode(samples(1)))
    assert (caught.value.field, caught.value.key) == ("cls", "000")
    assert classes(xdecode(samples(2), must_decode=False)) == [b"0", b"1"]


def test_xdecode_refuses_pickles_unless_a_function_is_named():
    given_ = [{"__key__": "a", "pyd": pickle.dumps([1])}]
    with pytest.raises(DecodeError, match=r"runs any code.*xdecode\(pyd=pickle.load\)"):
        list(xdecode(given_))
    assert list(xdecode(given_, pyd=pickle.load)) == [{"__key__": "a", "pyd": [1]}]


def test_values_that_are_not_bytes_go_to_the_functions_as_they_are():
    array = np.arange(3)
    assert list(xdecode([{"npy": array}], npy=lambda value: value.sum())) == [{"npy": 3}]


def test_errors_of_xdecode_are_settled():
    run = Run(policy=Policy(on_error="skip"))
    assert classes(xdecode(broken(4, [1]), cls=lambda s: int(s.read()), step=Step(run))) == [0, 2, 3]
    assert run.report.counts == {"bad_field": 1}
    seen = []
    list(xdecode(broken(4, [1]), cls=lambda s: int(s.read()), handler=seen.append))
    (error,) = seen
    assert isinstance(error.__cause__, ValueError)
    assert error.sample["__key__"] == "001"


def test_a_decoder_is_found_by_the_last_part_of_a_path():
    read = dict(XDECODERS)
    assert find_decoder(XDECODERS, "a/b.TXT") is read["*.txt"]
    assert find_decoder(XDECODERS, "txt") is read["*.txt"]
    assert find_decoder(XDECODERS, "jpg") is None
    assert find_decoder([("__key__", int)], "__key__") is False
