"""Payloads as files, over a store that counts what it is asked for and gives no maps."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.dataset.payload_file import PayloadFile, open_payload
from shardset.storage import MemoryStore
from storage.counting import CountingStore

CONTENT = random.Random(5).randbytes(3_000_000)


def remote(content):
    store = MemoryStore()
    store.write("memory://b/a.tar", content)
    counting = CountingStore(store)
    return counting, counting.open("memory://b/a.tar")


def test_a_file_is_read_through_in_few_growing_pieces():
    store, reader = remote(b"x" * 512 + CONTENT + b"y" * 100)
    assert open_payload(reader, 512, len(CONTENT)).read() == CONTENT
    store.reset()
    file = open_payload(reader, 512, len(CONTENT))
    pieces = iter(lambda: file.read(30_000), b"")
    assert b"".join(pieces) == CONTENT
    assert store.calls["view"] <= 7
    assert store.bytes_read == len(CONTENT)


def test_what_was_fetched_is_not_fetched_again():
    store, reader = remote(CONTENT)
    file = open_payload(reader, 0, len(CONTENT))
    for position in (2_900_000, 0, 2_900_100, 1_500_000, 50, 2_950_000, 1_500_200) * 3:
        file.seek(position)
        assert file.read(100) == CONTENT[position : position + 100]
    assert store.calls["view"] == 3
    assert store.bytes_read < 200_000


@given(st.lists(st.tuples(st.integers(0, 3_000_100), st.integers(0, 200_000)), max_size=12), st.booleans())
def test_it_reads_as_any_other_file_does(moves, raw):
    _, reader = remote(b"head" + CONTENT)
    file = PayloadFile(reader, 4, len(CONTENT)) if raw else open_payload(reader, 4, len(CONTENT))
    expected = io.BytesIO(CONTENT)
    for position, count in moves:
        assert file.seek(position) == expected.seek(position)
        got = file.read(count)
        if raw:  # may give less, but something
            assert got == expected.read(len(got))
            assert got or not count or position >= len(CONTENT)
        else:
            assert got == expected.read(count)
        assert file.tell() == expected.tell()


@pytest.fixture(scope="module")
def video():
    """An MP4 of twelve seconds whose table stands at the end, where most encoders put it."""
    import av

    chooser = np.random.default_rng(3)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.bit_rate = 320, 240, 8_000_000
        stream.codec_context.gop_size = 25
        for _ in range(300):
            noise = chooser.integers(0, 256, (240, 320, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.slow
def test_a_video_decoder_reads_what_it_needs(video):
    import av

    assert len(video) > 5_000_000
    assert video.index(b"moov") > len(video) // 2
    store, reader = remote(bytes(512) + video + bytes(1024))
    with av.open(open_payload(reader, 512, len(video))) as container:
        stream = container.streams.video[0]
        assert stream.frames == 300
        assert next(container.decode(stream)).width == 320
        container.seek(int(8 / stream.time_base), stream=stream)
        assert abs(next(container.decode(stream)).time - 8) <= 1
    assert store.bytes_read < len(video) / 5
    assert store.calls["view"] < 20
