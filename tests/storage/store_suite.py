"""What every store must do. A store's test module subclasses these classes and gives the fixtures that they use.

- `store`: the store, new.
- `base`: the url of a folder in it, in which nothing lives yet.
- `put` (given here for stores that write): makes an object of a name and some bytes, and returns its url.

A store that cannot write takes `ReadSuite` with a `put` of its own; one that cannot be used after a fork leaves
`ForkSuite` out.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardset.errors import NotFoundError, StorageError
from shardset.storage import url_join

PAYLOAD = random.Random(7).randbytes(300_000)
LENGTH = len(PAYLOAD)
ODD_NAMES = (
    "a b.tar",
    "100%.tar",
    "%41.tar",
    "a#b.tar",
    "q?x=1&y.tar",
    "ünï/日本.tar",
    ".hidden",
    "-",
    "it's;$(x).tar",
)


def _many(reader_or_store, *url, kind=list):
    return lambda offset, length: bytes(reader_or_store.read_many(*url, kind([offset]), kind([length]))[0])


WAYS = {
    "store.read": lambda store, url: lambda offset, length: store.read(url, offset, length),
    "store.read_many": _many,
    "reader.read": lambda store, url: store.open(url).read,
    "reader.view": lambda store, url: lambda offset, length: bytes(store.open(url).view(offset, length)),
    "reader.read_many": lambda store, url: _many(store.open(url)),
    "reader.read_many of arrays": lambda store, url: _many(store.open(url), kind=np.array),
}


def random_ranges(count, size=LENGTH, seed=0):
    """Return offsets and lengths in no order: most ranges are short, some empty, some end where the object does."""
    chooser = random.Random(seed)
    offsets = [chooser.randint(0, size) for _ in range(count)]
    lengths = [min(size - offset, chooser.choice((0, 1, 100, 3_000, 20_000))) for offset in offsets]
    return offsets, lengths


def digest_of_ranges(read, seed):
    """Read random ranges and return one digest of all of them."""
    digest = hashlib.sha256()
    for offset, length in zip(*random_ranges(200, seed=seed), strict=True):
        digest.update(read(offset, length))
    return digest.hexdigest()


def expected_digest(seed):
    return digest_of_ranges(lambda offset, length: PAYLOAD[offset : offset + length], seed)


def _read_in_child(pipe, store, url, seed):
    pipe.send(digest_of_ranges(lambda offset, length: store.read(url, offset, length), seed))


def _read_inherited(pipe, reader, view, seed):
    pipe.send((digest_of_ranges(reader.read, seed), bytes(view) == PAYLOAD))


class _Suite:
    @pytest.fixture
    def put(self, store, base):
        def put(name, data):
            url = url_join(base, name)
            store.write(url, data)
            return url

        return put

    @pytest.fixture
    def url(self, put):
        return put("shards/000.tar", PAYLOAD)

    @pytest.fixture(params=WAYS)
    def read(self, request, store, url):
        return WAYS[request.param](store, url)


class ReadSuite(_Suite):
    """Looking up, reading, listing."""

    def test_the_whole_object_is_read(self, read):
        assert read(0, LENGTH) == PAYLOAD

    def test_the_first_and_the_last_byte_are_read(self, read):
        assert read(0, 1) == PAYLOAD[:1]
        assert read(LENGTH - 1, 1) == PAYLOAD[-1:]

    def test_an_empty_range_gives_no_bytes_wherever_it_lies(self, read):
        for offset in (0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 10**12):
            assert read(offset, 0) == b""

    def test_a_range_past_the_end_is_an_error_that_names_url_range_and_size(self, read, url):
        starts_inside = ((0, LENGTH + 1), (LENGTH - 1, 2), (0, 2**62))
        for offset, length in (*starts_inside, (LENGTH, 1), (LENGTH + 1, 1), (10**12, 1), (2**62, 2**62)):
            with pytest.raises(StorageError) as caught:
                read(offset, length)
            assert caught.value.url == url
            for part in (url, offset, offset + length, LENGTH):
                assert str(part) in str(caught.value)

    def test_a_negative_offset_or_length_is_a_value_error(self, read):
        for offset, length in ((-1, 1), (0, -1), (-1, 0), (LENGTH, -1), (-LENGTH, LENGTH)):
            with pytest.raises(ValueError, match="negative"):
                read(offset, length)

    def test_an_empty_object_is_read(self, store, put):
        reader = store.open(put("empty.tar", b""))
        assert reader.size == 0
        assert reader.read(0, 0) == reader.view(0, 0) == b""
        assert reader.read_many([0, 0], [0, 0]) == [b"", b""]
        assert reader.map() in (None, b"")
        with pytest.raises(StorageError):
            reader.view(0, 1)

    @pytest.mark.parametrize("kind", [list, np.array])
    def test_ten_thousand_random_ranges_are_read_at_once_in_the_order_asked(self, store, url, kind):
        offsets, lengths = random_ranges(10_000)
        answers = store.read_many(url, kind(offsets), kind(lengths))
        assert len(answers) == 10_000
        for offset, length, answer in zip(offsets, lengths, answers, strict=True):
            assert answer == PAYLOAD[offset : offset + length]

    def test_random_ranges_are_read_one_by_one(self, read):
        for offset, length in zip(*random_ranges(300, seed=1), strict=True):
            assert read(offset, length) == PAYLOAD[offset : offset + length]

    def test_no_ranges_give_no_answers(self, store, url):
        assert store.read_many(url, [], []) == []
        assert store.read_many(url, np.zeros(0, np.int64), np.zeros(0, np.int64)) == []

    def test_offsets_and_lengths_may_be_any_sequences_of_integers(self, store, url):
        offsets, lengths = (5, 250_000), [3, 50_000]
        small = np.array(offsets, np.uint32)
        for these, those in ((offsets, lengths), (small, lengths), (small, np.array(lengths, np.int64))):
            assert store.read_many(url, these, those) == [PAYLOAD[5:8], PAYLOAD[250_000:]]

    def test_one_bad_range_among_many_is_found(self, store, url):
        for bad in (LENGTH, 2**63 - 1):
            for kind in (list, np.array):
                with pytest.raises(StorageError, match=f"bytes {bad} to {bad + 2}"):
                    store.read_many(url, kind([0, bad, 5]), kind([5, 2, 5]))
        with pytest.raises(StorageError):
            store.read_many(url, np.array([2**64 - 1], np.uint64), np.array([2], np.uint64))
        with pytest.raises(ValueError, match="negative"):
            store.read_many(url, np.array([7, 8]), np.array([2, -1]))

    def test_offsets_and_lengths_must_be_as_many(self, store, url):
        with pytest.raises(ValueError, match="2 offsets and 1 lengths"):
            store.read_many(url, [1, 2], [1])

    def test_fractions_are_no_offsets(self, store, url):
        with pytest.raises(TypeError):
            store.read_many(url, np.array([1.5]), np.array([2.5]))

    def test_views_are_read_only_and_of_bytes(self, store, url):
        reader = store.open(url)
        whole = reader.map()
        views = [reader.view(10, 5), reader.view(LENGTH, 0), *reader.read_many([10, 3], [5, 0])]
        for view in views if whole is None else [*views, whole]:
            assert isinstance(view, memoryview)
            assert view.readonly
            assert (view.ndim, view.itemsize, view.format, view.contiguous) == (1, 1, "B", True)
        assert isinstance(reader.read(10, 5), bytes)

    def test_a_map_is_the_whole_object_or_is_not_given(self, store, url):
        whole = store.open(url).map()
        assert whole is None or whole == PAYLOAD

    def test_views_stay_valid_when_reader_and_store_let_go(self, store, url):
        reader = store.open(url)
        views = [reader.view(100, 1000), *reader.read_many([7, 200_000], [9, 90_000])]
        del reader
        store.close()
        assert views == [PAYLOAD[100:1100], PAYLOAD[7:16], PAYLOAD[200_000:290_000]]

    def test_a_store_can_be_used_after_it_was_closed(self, store, url):
        reader = store.open(url)
        store.close()
        assert reader.read(3, 4) == store.read(url, 3, 4) == PAYLOAD[3:7]
        store.close()
        store.close()

    def test_info_reader_and_list_agree(self, store, base, url):
        info = store.info(url)
        reader = store.open(url)
        assert (info.url, info.size) == (url, LENGTH)
        assert info.identity
        assert (reader.url, reader.size, reader.identity) == (info.url, info.size, info.identity)
        assert list(store.list(base)) == [info]

    def test_a_missing_object_is_not_found(self, store, base, url):
        for missing in (url_join(base, "no.tar"), url_join(base, "no/no.tar"), url_join(url, "no.tar"), url + "x"):
            for ask in (store.info, store.open, lambda missing: store.read(missing, 0, 1)):
                with pytest.raises(NotFoundError) as caught:
                    ask(missing)
                assert caught.value.url == missing
                assert isinstance(caught.value, FileNotFoundError)

    def test_a_folder_is_no_object(self, store, base, url):
        del url
        for ask in (store.info, store.open):
            with pytest.raises(StorageError):
                ask(url_join(base, "shards"))

    def test_objects_are_listed_at_any_depth_in_the_byte_order_of_their_names(self, store, base, put):
        names = [
            *("a/b.tar", "a-b.tar", "a0.tar", "A.tar", "a b.tar", "z/y/x/w.tar", "z/y.tar", "z/y-.tar"),
            *("é.tar", "｡", "\U0001f600"),  # the last two change places where code units of UTF-16 are compared
        ]
        random.Random(4).shuffle(names)
        urls = {name: put(name, name.encode()) for name in names}
        found = list(store.list(base))
        assert [info.url for info in found] == [urls[name] for name in sorted(names, key=str.encode)]
        for info in found:
            assert info == store.info(info.url)

    def test_a_folder_is_listed_with_and_without_its_last_slash(self, store, base, put):
        inside = put("in/a.tar", b"1")
        put("in-side.tar", b"2")
        put("inside/b.tar", b"3")
        for folder in ("in", "in/"):
            assert [info.url for info in store.list(url_join(base, folder))] == [inside]

    def test_odd_names_are_taken_as_they_are(self, store, base, put):
        urls = [put(name, name.encode()) for name in ODD_NAMES]
        assert {info.url for info in store.list(base)} == set(urls)
        for url, name in zip(urls, ODD_NAMES, strict=True):
            assert store.read(url, 0, store.info(url).size) == name.encode()

    def test_a_missing_folder_is_not_found(self, store, base, url):
        for missing in (url_join(base, "no"), url):
            with pytest.raises(NotFoundError):
                list(store.list(missing))

    def test_eight_threads_read_the_same_objects(self, store, put):
        urls = [put(f"{number}.tar", bytes([number]) + PAYLOAD) for number in range(5)]
        offsets, lengths = random_ranges(400, seed=3)

        def read_all(seed):
            chooser = random.Random(seed)
            for offset, length in zip(offsets, lengths, strict=True):
                number = chooser.randrange(5)
                reader = store.open(urls[number])
                assert reader.read(0, 1) == bytes([number])
                expected = PAYLOAD[offset : offset + length]
                assert reader.read(offset + 1, length) == expected
                assert store.read_many(urls[number], [offset + 1, 0], [length, 1]) == [expected, bytes([number])]
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read_all, range(8)))

    @pytest.mark.slow
    def test_a_spawned_child_reads(self, store, url):
        store.read(url, 0, 1)  # so that there is something open, which must not go along
        assert run_in_child("spawn", _read_in_child, store, url, 11) == expected_digest(11)

    def test_a_pickled_store_reads(self, store, url):
        store.open(url).view(0, 1)
        copy = pickle.loads(pickle.dumps(store))
        assert type(copy) is type(store)
        assert copy.read(url, 5, 100) == PAYLOAD[5:105]


class ForkSuite(_Suite):
    """Going on in a forked child with what the parent had open."""

    def test_a_forked_child_reads(self, store, url):
        store.read(url, 0, 1)
        assert run_in_child("fork", _read_in_child, store, url, 12) == expected_digest(12)

    def test_readers_and_views_opened_before_a_fork_work_on_both_sides(self, store, url):
        reader = store.open(url)
        view = reader.view(0, LENGTH)
        context = multiprocessing.get_context("fork")
        children = []
        for seed in range(3):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_read_inherited, args=(sender, reader, view, seed))
            child.start()
            children.append((seed, child, receiver))
        assert digest_of_ranges(reader.read, 9) == expected_digest(9)  # while the children read
        for seed, child, receiver in children:
            assert receiver.recv() == (expected_digest(seed), True)
            child.join()
            assert child.exitcode == 0


class WriteSuite(_Suite):
    """Writing: whole objects or nothing."""

    def test_what_is_written_is_read(self, store, base):
        url = url_join(base, "new/folder/a.bin")
        for data in (b"one", bytearray(b"two"), memoryview(b"-three-")[1:-1], np.arange(6, dtype=np.uint8), b""):
            store.write(url, data)
            info = store.info(url)
            assert store.read(url, 0, info.size) == bytes(data)

    def test_a_later_change_of_the_buffer_changes_nothing(self, store, base):
        url = url_join(base, "a.bin")
        data = bytearray(b"before")
        store.write(url, data)
        data[:] = b"after!"
        assert store.read(url, 0, 6) == b"before"

    def test_other_bytes_of_the_same_length_have_another_identity(self, store, url):
        before = store.info(url)
        store.write(url, bytes(LENGTH))
        after = store.info(url)
        assert after.size == before.size
        assert after.identity != before.identity
        assert store.open(url).identity == after.identity
        assert store.read(url, 0, 100) == bytes(100)

    def test_a_reader_keeps_to_the_version_that_it_opened(self, store, url):
        reader = store.open(url)
        view = reader.view(0, 100)
        store.write(url, b"short")
        assert store.read(url, 0, 5) == b"short"
        assert view == PAYLOAD[:100]
        assert reader.read(0, LENGTH) == PAYLOAD
        assert reader.view(LENGTH - 50, 50) == PAYLOAD[-50:]

    def test_a_write_that_fails_leaves_what_was_there(self, store, base, url):
        before = [*store.list(base)]
        with pytest.raises(TypeError):
            store.write(url, "text is not bytes")
        with pytest.raises(TypeError):
            store.write(url_join(base, "never.bin"), None)
        assert [*store.list(base)] == before
        assert store.read(url, 0, LENGTH) == PAYLOAD

    def test_somebody_who_reads_during_writes_sees_old_or_new_and_nothing_else(self, store, base):
        url = url_join(base, "a.bin")
        versions = [bytes([letter]) * size for letter, size in ((65, 400_000), (66, 900_000))]
        store.write(url, versions[0])

        def write():
            for turn in range(30):
                store.write(url, versions[turn % 2])

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            reads = 0
            while not writing.done() or reads < 10:
                reader = store.open(url)
                assert reader.read(0, reader.size) in versions
                reads += 1
            writing.result()


def run_in_child(method, target, *args):
    """Run ``target(pipe, *args)`` in a child process and return what it sends."""
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(sender, *args))
    child.start()
    sender.close()  # so that a child that dies ends the wait
    answer = receiver.recv()
    child.join()
    assert child.exitcode == 0
    return answer
