"""What the tests of salvage share: runs it in every way it can be run, and checks what must hold for any bytes."""

from __future__ import annotations

from shardset.formats import tfrecord_resync
from shardset.formats.tfrecord_salvage import Bad, Good, Mended, Records, iter_salvaged, salvage


def strict_read(data):
    """Return a function that reads, and that no one may ask for what is not there."""
    view = memoryview(data)

    def read(offset, length):
        assert offset >= 0
        assert length >= 0
        assert offset + length <= len(view), "read past the end"
        return view[offset : offset + length]

    return read


def salvaged(data, *, window=None, **settings):
    """Return the good records, and what lies between, of bytes that are mapped, or else read in windows."""
    before = tfrecord_resync.WINDOW
    tfrecord_resync.WINDOW = window or before
    try:
        events = list(iter_salvaged(strict_read(data), len(data), is_mapped=window is None, **settings))
        check_cover(data, list(salvage(strict_read(data), len(data), is_mapped=window is None)))
    finally:
        tfrecord_resync.WINDOW = before
    return [event for event in events if isinstance(event, Good)], [event for event in events if isinstance(event, Bad)]


def check_cover(data, events):
    """Check that each byte of a file is in exactly one event."""
    at = 0
    for event in events:
        if isinstance(event, Records):
            assert event.offset == at
            for offset, length in zip(event.offsets.tolist(), event.lengths.tolist(), strict=True):
                assert offset == at + 12
                at = offset + length + 4
            assert event.end == at
        elif isinstance(event, Mended):
            assert event.offset == at + 12
            at = event.offset + event.length + 4
        else:
            assert event.offset == at
            assert event.length > 0
            at += event.length
    assert at == len(data)


def payloads(good):
    """Return the payloads of records."""
    return [bytes(record.payload) for record in good]


def kinds(bad):
    """Return codes, places and lengths of what is bad."""
    return [(one.code, one.offset, one.length) for one in bad]
