from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import killing
from shards import private_cache, read_members, read_samples  # noqa: F401 - a fixture of all tests here
from shardset.errors import DuplicateFieldError, EncodeError, StorageError
from shardset.index.sidecar import parse_sidecar
from shardset.storage import MemoryStore
from shardset.tasks import index_dataset
from shardset.writing import shard_index
from shardset.writing.shard_writer import ShardWriter
from shardset.writing.tar_writer import TarWriter

TWO = "out-%03d.tar"


def make_samples(count, *, size=10, start=0):
    return [
        {"__key__": f"{number:05d}", "jpg": bytes([number % 256]) * size, "json": {"caption": f"number {number}"}}
        for number in range(start, start + count)
    ]


def write(pattern, samples, **settings):
    with ShardWriter(pattern, verbose=0, **settings) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def write_all(writer, samples):
    for sample in samples:
        writer.write(sample)


def break_off(writer, samples):
    with writer:
        write_all(writer, samples)
        raise KeyError


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def keys_in(folder):
    return {path.name: [sample.key for sample in read_samples(path)] for path in sorted(Path(folder).glob("*.tar"))}


def write_for_killing(folder):
    """Write where a killed run may have left files, all of which must be whole and fit their indexes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_whole(folder)
    write(folder / TWO, make_samples(5, size=400), maxcount=2)


def check_whole(folder):
    for path in Path(folder).glob("out-*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) in {2, 4}
        index = path.with_suffix(".json")
        if index.exists():
            parse_sidecar(index.read_bytes(), path=str(index), shard_size=path.stat().st_size)


# ---- when a shard ends


def test_shards_are_numbered_and_hold_maxcount_samples_each(tmp_path):
    writer = write(tmp_path / TWO, make_samples(5), maxcount=2)
    assert keys_in(tmp_path) == {
        "out-000.tar": ["00000", "00001"],
        "out-001.tar": ["00002", "00003"],
        "out-002.tar": ["00004"],
    }
    assert writer.urls == [str(tmp_path / f"out-{number:03d}.tar") for number in range(3)]


def test_a_shard_is_what_a_tar_writer_writes(tmp_path):
    write(tmp_path / TWO, make_samples(5))
    file = io.BytesIO()
    with TarWriter(file) as writer:
        for sample in make_samples(5):
            writer.write(sample)
    assert (tmp_path / "out-000.tar").read_bytes() == file.getvalue()


@given(st.lists(st.integers(0, 30_000), max_size=30), st.integers(5, 80).map(lambda kilobytes: 1024 * kilobytes))
def test_no_file_is_larger_than_maxsize_unless_it_is_one_sample(sizes, maxsize):
    store = MemoryStore()
    samples = [{"__key__": str(number), "bin": bytes(size)} for number, size in enumerate(sizes)]
    writer = write("memory://b/" + TWO, samples, maxsize=maxsize, store=store)
    counts = []
    for url in writer.urls:
        content = store.read(url, 0, store.info(url).size)
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            counts.append(len(tar.getnames()))
        assert counts[-1] > 0
        assert len(content) <= maxsize or counts[-1] == 1
    assert sum(counts) == len(sizes)


def test_a_shard_is_filled_up_to_maxsize(tmp_path):
    samples = [{"__key__": str(number), "bin": bytes(3 * 512)} for number in range(20)]  # 2048 bytes each
    write(tmp_path / TWO, samples, maxsize=20480, index=False)
    assert [path.stat().st_size for path in sorted(tmp_path.iterdir())] == [20480, 20480, 10240]
    assert [len(keys) for keys in keys_in(tmp_path).values()] == [9, 9, 2]


def test_without_a_sample_nothing_is_made(tmp_path):
    writer = write(tmp_path / "deep" / TWO, [])
    assert not (tmp_path / "deep").exists()
    assert writer.urls == []


def test_the_next_stream_can_be_asked_for_and_is_never_empty(tmp_path):
    with ShardWriter(tmp_path / TWO, verbose=0, index=False) as writer:
        writer.next_stream()
        for sample in make_samples(2):
            writer.write(sample)
            writer.next_stream()
            writer.next_stream()
    assert keys_in(tmp_path) == {"out-000.tar": ["00000"], "out-001.tar": ["00001"]}


def test_numbers_begin_where_they_are_told_to(tmp_path):
    assert write(tmp_path / TWO, make_samples(1), start_shard=7).urls == [str(tmp_path / "out-007.tar")]


def test_what_users_look_at_says_where_the_writer_stands(tmp_path):
    writer = ShardWriter(tmp_path / TWO, maxcount=2, verbose=0)
    assert (writer.shard, writer.count, writer.total, writer.size, writer.fname, writer.tarstream) == (
        *(0, 0, 0, 0),
        *(None, None),
    )
    sizes = []
    for sample in make_samples(3):
        writer.write(sample)
        sizes.append(writer.size)
        assert writer.tarstream is not None
    caption = len(b'{"caption": "number 0"}')
    assert sizes == [10 + caption, 20 + 2 * caption, 10 + caption]
    assert (writer.shard, writer.count, writer.total) == (2, 1, 3)
    assert writer.fname == str(tmp_path / "out-001.tar")
    writer.close()
    assert (writer.shard, writer.count, writer.total, writer.tarstream) == (2, 0, 3, None)
    writer.close()
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(make_samples(1)[0])


def test_post_is_called_with_each_shard_when_it_and_its_index_stand_there(tmp_path):
    seen = []

    def post(name):
        seen.append((name, names_in(tmp_path)))

    write(tmp_path / TWO, make_samples(3), maxcount=2, post=post)
    assert seen == [
        (str(tmp_path / "out-000.tar"), ["out-000.json", "out-000.tar"]),
        (str(tmp_path / "out-001.tar"), ["out-000.json", "out-000.tar", "out-001.json", "out-001.tar"]),
    ]


def test_each_shard_is_told_on_standard_error_unless_verbose_is_0(tmp_path, capsys):
    with ShardWriter(tmp_path / TWO, maxcount=2) as writer:
        for sample in make_samples(3):
            writer.write(sample)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"# wrote {tmp_path}/out-000.tar: 2 samples, 0.00 GB; 2 in all",
        f"# wrote {tmp_path}/out-001.tar: 1 samples, 0.00 GB; 3 in all",
    ]
    write(tmp_path / TWO, make_samples(3))
    assert capsys.readouterr().err == ""


def test_a_key_comes_once_in_a_shard_and_may_come_again_in_the_next(tmp_path):
    with ShardWriter(tmp_path / TWO, maxcount=2, verbose=0) as writer:
        first, second = make_samples(2)
        writer.write(first)
        with pytest.raises(DuplicateFieldError, match="'00000' was written into this shard before"):
            writer.write(first)
        writer.write(second)
        writer.write(first)
    assert keys_in(tmp_path) == {"out-000.tar": ["00000", "00001"], "out-001.tar": ["00000"]}


def test_a_sample_that_cannot_be_written_leaves_the_writer_as_it_was(tmp_path):
    with ShardWriter(tmp_path / TWO, verbose=0) as writer:
        for sample in (make_samples(1)[0], {"__key__": "a.b", "txt": "x"}, {"__key__": "2", "txt": "x"}):
            with suppress(EncodeError):
                writer.write(sample)
    assert keys_in(tmp_path) == {"out-000.tar": ["00000", "2"]}
    assert writer.total == 2


# ---- arguments


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("out.tar", r"is no pattern .*out-%06d\.tar"),
        ("out-{000000..000099}.tar", r"write 'out-%06d\.tar', to number them as they come"),
        ("out-%d-%d.tar", r"is no pattern"),
        ("out-%z.tar", r"is no pattern"),
        ("out-%%.tar", r"is no pattern"),
        ("out-%.0s.tar", r"is one name for all shards"),
    ],
)
def test_a_pattern_that_does_not_give_each_shard_a_name_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        ShardWriter(pattern)


@pytest.mark.parametrize("settings", [{"maxcount": 0}, {"maxsize": -1}, {"mode": -1}, {"compress": "rar"}], ids=str)
def test_an_argument_that_cannot_be_is_refused_before_anything_is_written(tmp_path, settings):
    with pytest.raises(ValueError, match="="):
        ShardWriter(tmp_path / TWO, **settings)
    with pytest.raises(TypeError, match="shuffle"):
        ShardWriter(tmp_path / TWO, shuffle=True)


def test_an_opener_opens_shards_which_are_closed_and_have_no_index(tmp_path):
    opened = []

    def opener(name):
        file = (tmp_path / Path(name).name).open("wb")
        opened.append(file)
        return file

    write("elsewhere/out-%d.tar.gz", make_samples(3), maxcount=2, opener=opener)
    assert [file.closed for file in opened] == [True, True]
    assert names_in(tmp_path) == ["out-0.tar.gz", "out-1.tar.gz"]
    assert sorted(read_members(tmp_path / "out-1.tar.gz")) == ["00002.jpg", "00002.json"]
    assert (tmp_path / "out-0.tar.gz").read_bytes()[:5] == b"00000"  # compressing is up to the opener


def test_compressed_shards_and_those_of_commands_have_no_index(tmp_path):
    write(tmp_path / "out-%d.tar.gz", make_samples(1))
    write(f"pipe:cat > {tmp_path}/piped-%d.tar", make_samples(1))
    assert names_in(tmp_path) == ["out-0.tar.gz", "piped-0.tar"]
    assert (tmp_path / "out-0.tar.gz").read_bytes()[:2] == b"\x1f\x8b"


# ---- the index


INDEXED = {
    "photographs": make_samples(20),
    "captions as text": [{"__key__": f"{n}", "jpg": b"x", "txt": f"text {n} é"} for n in range(12)],
    "a mask beside each": [
        {"__key__": f"{n:03d}", "seg.png": b"x", "png": b"y", "json": {"caption": n, "w": [1, {}]}} for n in range(5)
    ],
    "text alone": [{"__key__": f"{n:03d}", "txt": "x", "json": {"source": n}} for n in range(5)],
    "text that is paired by key alone": [{"__key__": f"u{n}", "seg.png": b"x", "txt": "said"} for n in range(5)],
    "one field": [{"__key__": f"{n:03d}", "json": {"n": n}} for n in range(5)],
    "no captions": [{"__key__": f"d/{n}", "jpg": b"x" * n, "cls": n} for n in range(30)],
    "names beyond ascii": [{"__key__": f"é/{n}", "jpg": b"x", "json": '{"caption": "ü"}'} for n in range(5)],
    "names that are no utf-8": [{"__key__": f"caf\udce9{n}", "jpg": b"x", "txt": b"hm"} for n in range(5)],
    "names that need an extension": [{"__key__": "n" * 150 + str(n), "jpg": b"x", "txt": b"hm"} for n in range(5)],
    "several json members": [
        {"__key__": f"{n}", "jpg": b"x", "json": {"caption": "a"}, "meta.json": {"b": 1}, "long.txt": "c"}
        for n in range(5)
    ],
}


@pytest.mark.parametrize("samples", INDEXED.values(), ids=INDEXED)
def test_the_index_is_the_one_that_shardset_index_would_write(tmp_path, samples):
    write(tmp_path / "new" / TWO, samples, maxcount=8)
    shutil.copytree(tmp_path / "new", tmp_path / "indexed", ignore=shutil.ignore_patterns("*.json"))
    index_dataset(tmp_path / "indexed", workers=0)
    shards = sorted((tmp_path / "new").glob("*.tar"))
    assert len(shards) == -(-len(samples) // 8)
    for shard in shards:
        ours, theirs = (tmp_path / folder / shard.with_suffix(".json").name for folder in ("new", "indexed"))
        assert ours.read_bytes() == theirs.read_bytes()


@given(
    st.dictionaries(
        st.text("abé_", min_size=1, max_size=4).filter(lambda key: not key.startswith("_")),
        st.dictionaries(
            st.sampled_from(["jpg", "json", "txt", "seg.png", "meta.json", "cls", "x.txt"]),
            st.sampled_from(
                [b"", b"3", b'{"caption": "one", "k": [1]}', b'["a", "b"]', b"text", b"{", b"\xff", b"null"]
            ),
            min_size=1,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_index_of_any_shard_is_the_one_that_shardset_index_would_write(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("shards")
    write(folder / TWO, [{"__key__": key, **fields} for key, fields in samples.items()])
    ours = (folder / "out-000.json").read_bytes()
    (folder / "out-000.json").unlink()
    index_dataset(folder, workers=0)
    assert ours == (folder / "out-000.json").read_bytes()


def test_a_json_member_that_is_no_json_is_told(tmp_path, caplog):
    write(tmp_path / TWO, [{"__key__": "1", "jpg": b"x", "json": b"{"}])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("out-000.tar: bad_json_sidecar, 1 times; the first: out-000.tar#1.json at byte 1536")


def test_captions_of_too_many_bytes_are_told_and_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shard_index, "_MOST_KEPT", 100)
    write(tmp_path / TWO, make_samples(20))
    assert "its captions, 0 MiB, are not in its index" in caplog.text
    index = json.loads((tmp_path / "out-000.json").read_bytes())
    assert len(index["files"]) == 40
    assert not any("captions" in entry for entry in index["files"].values())
    index_dataset(tmp_path, workers=0, force=True)
    index = json.loads((tmp_path / "out-000.json").read_bytes())
    assert sum("captions" in entry for entry in index["files"].values()) == 20


def test_indexes_go_beside_shards_of_any_store():
    store = MemoryStore()
    writer = write("memory://b/d/" + TWO, make_samples(3), maxcount=2, store=store)
    assert [info.url for info in store.list("memory://b/d")] == [
        f"memory://b/d/out-{number:03d}.{suffix}" for number in range(2) for suffix in ("json", "tar")
    ]
    assert writer.urls == ["memory://b/d/out-000.tar", "memory://b/d/out-001.tar"]


def test_without_index_none_is_written_and_that_of_the_shard_before_goes(tmp_path):
    write(tmp_path / TWO, make_samples(3))
    write(tmp_path / TWO, make_samples(3), index=False)
    assert names_in(tmp_path) == ["out-000.tar"]


@pytest.mark.parametrize("index", [True, False])
def test_a_json_file_that_is_no_index_is_left_alone(tmp_path, caplog, index):
    (tmp_path / "out-000.json").write_text('{"mine": 1}')
    write(tmp_path / TWO, make_samples(3), index=index)
    assert (tmp_path / "out-000.json").read_text() == '{"mine": 1}'
    assert ("a file that is no index stands there, so none is written" in caplog.text) == index
    assert keys_in(tmp_path) == {"out-000.tar": ["00000", "00001", "00002"]}


# ---- when it fails


def test_an_error_in_the_block_keeps_whole_shards_and_says_what_was_given_up(tmp_path, caplog):
    writer = ShardWriter(tmp_path / TWO, maxcount=2, verbose=0)
    with pytest.raises(KeyError):
        break_off(writer, make_samples(5))
    assert keys_in(tmp_path) == {"out-000.tar": ["00000", "00001"], "out-001.tar": ["00002", "00003"]}
    assert names_in(tmp_path) == ["out-000.json", "out-000.tar", "out-001.json", "out-001.tar"]
    assert caplog.messages == [f"{tmp_path}/out-002.tar was given up with the 1 samples in it"]
    assert writer.total == 4


def test_shards_of_another_run_that_go_on_behind_the_last_are_told(tmp_path, caplog):
    write(tmp_path / TWO, make_samples(6), maxcount=2)
    assert caplog.messages == []
    write(tmp_path / TWO, make_samples(4), maxcount=2)
    assert caplog.messages == [
        f"{tmp_path}/out-002.tar is there, from another run: readers of the whole folder read it too"
    ]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk of its own")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported_and_leaves_the_shards_before_it(small_disk):
    writer = ShardWriter(small_disk / TWO, maxcount=2, verbose=0)
    writer.write(make_samples(1, size=300_000)[0])
    with pytest.raises(StorageError, match=r"no space left on device, at .*/out-001\.tar.*free some space") as caught:
        write_all(writer, make_samples(8, size=300_000, start=1))
    assert caught.value.errno == errno.ENOSPC
    for call in (lambda: writer.write(make_samples(1)[0]), writer.close):
        with pytest.raises(StorageError, match="the writer failed before"):
            call()
    assert names_in(small_disk) == ["out-000.json", "out-000.tar"]
    assert keys_in(small_disk) == {"out-000.tar": ["00000", "00001"]}
    assert writer.total == 2


def test_a_shard_that_cannot_get_its_name_is_an_error(tmp_path):
    (tmp_path / "out-000.tar").mkdir()
    writer = ShardWriter(tmp_path / TWO, verbose=0)
    writer.write(make_samples(1)[0])
    with pytest.raises(StorageError, match=r"out-000\.tar"):
        writer.close()
    assert names_in(tmp_path) == ["out-000.tar"]


@pytest.mark.slow
def test_a_writer_killed_at_any_step_leaves_whole_shards_and_the_next_run_clears_up(tmp_path):
    killed = killing.kill_at_every_step(
        "writing.test_shard_writer:write_for_killing", {}, tmp_path / "folders", sizes=[700, 5000]
    )
    assert killed >= 10
    for folder in (tmp_path / "folders").iterdir():
        assert names_in(folder) == [f"out-{n:03d}.{suffix}" for n in range(3) for suffix in ("json", "tar")]
        check_whole(folder)
        assert sum(map(len, keys_in(folder).values())) == 5


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    program = (
        "import os, signal, sys; from shardset.writing.shard_writer import ShardWriter\n"
        "w = ShardWriter(sys.argv[1], maxcount=2)\n"
        "for n in range(3): w.write({'__key__': str(n), 'bin': bytes(3 << 20)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / TWO)], capture_output=True, check=False)
    left = names_in(tmp_path)
    assert left[-2:] == ["out-000.json", "out-000.tar"]
    assert len(left) == 3
    assert left[0].startswith(".")
    write(tmp_path / TWO, make_samples(1))
    assert names_in(tmp_path) == ["out-000.json", "out-000.tar"]


def test_a_writer_that_nobody_closes_says_how_many_samples_are_lost(tmp_path, caplog):
    writer = ShardWriter(tmp_path / TWO, maxcount=2, verbose=0)
    for sample in make_samples(3):
        writer.write(sample)
    writers = [writer]
    del writer
    with pytest.warns(ResourceWarning, match="was not closed, so the last 1 samples were not written"):
        writers.clear()
    assert keys_in(tmp_path) == {"out-000.tar": ["00000", "00001"]}
    assert caplog.record_tuples == [
        ("shardset.writing", logging.WARNING, f"{tmp_path}/out-001.tar was given up with the 1 samples in it")
    ]


def test_a_writer_is_not_pickled(tmp_path):
    with pytest.raises(TypeError, match="start_shard of its own"):
        pickle.dumps(ShardWriter(tmp_path / TWO))
