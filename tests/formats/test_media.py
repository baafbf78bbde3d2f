"""What containers of video say, against FFmpeg."""

from __future__ import annotations

import dataclasses
import random
import struct
import time
import tracemalloc
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.media_builder import (
    change_boxes,
    change_elements,
    element,
    number,
    probe,
    probe_turn,
    split_elements,
    video,
)
from formats.picture_builder import box, split_boxes
from shardset.formats.media import Media, parse_media, read_media
from timing import least_seconds

FRONT = (("movflags", "faststart"),)
FRAGMENTED = (("movflags", "frag_keyframe+empty_moov"), ("frag_duration", "100000"))
INDEXED = (("movflags", "frag_keyframe+empty_moov+global_sidx"), ("frag_duration", "100000"))
DASH = (("movflags", "dash+frag_every_frame"),)
HYBRID = (("movflags", "frag_keyframe"), ("frag_duration", "100000"))


def with_display(payload, width, height, unit):
    """Have a Matroska video shown at another size than it is stored, where FFmpeg has said that it does not know."""
    return change_elements(
        payload,
        [0x18538067, 0x1654AE6B, 0xAE, 0xE0],
        lambda content: (
            b"".join(element(name, old) for name, old in split_elements(content) if name < 0x5000)
            + number(0x54B0, width)
            + number(0x54BA, height)
            + number(0x54B2, unit)
        ),
    )


VIDEOS = {
    "mp4": lambda: video("mp4", "libx264"),
    "mp4 with the header first": lambda: video("mp4", "libx264", options=FRONT),
    "mp4 of another codec": lambda: video("mp4", "mpeg4", (96, 40), 7, Fraction(10)),
    "mp4 at an odd rate": lambda: video("mp4", "libx264", rate=Fraction(30000, 1001)),
    "mp4 at a changing rate": lambda: video("mp4", "mpeg4", step=3),
    "mp4 with sound first": lambda: video("mp4", "libx264", sound="aac"),
    "mp4 of wide pixels": lambda: video("mp4", "libx264", aspect=Fraction(4, 3)),
    "mp4 of narrow pixels": lambda: video("mp4", "mpeg4", aspect=Fraction(8, 9)),
    "mp4 in fragments": lambda: video("mp4", "libx264", frames=40, options=FRAGMENTED),
    "mp4 in fragments with an index": lambda: video("mp4", "mpeg4", frames=40, options=INDEXED),
    "mp4 in fragments for dash": lambda: video("mp4", "mpeg4", frames=40, options=DASH),
    "mp4 half in fragments": lambda: video("mp4", "libx264", frames=40, options=HYBRID),
    "mp4 in fragments with sound": lambda: video("mp4", "libx264", frames=40, sound="aac", options=FRAGMENTED),
    "mov": lambda: video("mov", "libx264"),
    "mov with the header first": lambda: video("mov", "mjpeg", options=FRONT),
    "mov of wide pixels": lambda: video("mov", "mpeg4", aspect=Fraction(4, 3)),
    "mov in fragments": lambda: video("mov", "mpeg4", frames=40, options=FRAGMENTED),
    "webm": lambda: video("webm", "libvpx"),
    "webm at an odd rate": lambda: video("webm", "libvpx-vp9", rate=Fraction(24000, 1001)),
    "webm with sound": lambda: video("webm", "libvpx", sound="libopus"),
    "webm for live viewing": lambda: video("webm", "libvpx", options=(("live", "1"),)),
    "mkv": lambda: video("matroska", "libx264", (96, 40), 7, Fraction(10)),
    "mkv of wide pixels": lambda: with_display(video("matroska", "mjpeg"), 128, 72, 0),
    "mkv of a known ratio": lambda: with_display(video("matroska", "mjpeg"), 16, 9, 3),
    "webm of narrow pixels": lambda: with_display(video("webm", "libvpx"), 32, 48, 0),
}


@pytest.mark.parametrize("name", VIDEOS)
def test_size_duration_and_rate_are_those_that_ffmpeg_finds(name):
    payload = VIDEOS[name]()
    media = parse_media(payload)
    size, aspect, duration, rate = probe(payload)
    assert media.kind == name.split()[0]
    assert (media.width, media.height) == size
    assert media.pixel_aspect == pytest.approx(aspect, rel=0.02)
    assert media.orientation == 1
    if "live" in name:
        assert media.duration is None
    else:
        assert media.duration == pytest.approx(duration, abs=0.0011 if "fragments" not in name else 0.09)
    assert media.frame_rate == pytest.approx(rate, rel=0.001 if "changing" not in name else 0.2)


def test_a_fragmented_video_is_as_long_as_it_was_made():
    durations = {name: parse_media(make()).duration for name, make in VIDEOS.items() if "fragments" in name}
    assert len(durations) == 6
    assert durations == pytest.approx(dict.fromkeys(durations, 40 / 25))


def test_an_index_whose_parts_take_less_than_no_time_is_understood():
    payload = video("mp4", "libx264", frames=40, options=INDEXED)
    assert b"\xff\xff\xfe\0" in payload[payload.index(b"sidx") : payload.index(b"moof")]
    assert parse_media(payload).duration == pytest.approx(40 / 25, abs=0.05)
    assert probe(payload)[2] > 1000  # FFmpeg does not understand what it wrote


def test_frames_that_last_longer_count_by_how_long_they_last():
    media = parse_media(VIDEOS["mp4 at a changing rate"]())
    assert media.frame_rate == pytest.approx(12 / (7 + 5 * 3) * 25, rel=0.12)  # FFmpeg guesses how long the last lasts


@pytest.mark.parametrize("kind", ["mp4", "mov", "webm", "matroska"])
def test_sizes_are_those_that_were_encoded(kind):
    source = random.Random(8)
    codec = "libvpx" if kind == "webm" else "mpeg4"
    for _ in range(5):
        size = 2 * source.randrange(8, 200), 2 * source.randrange(8, 200)
        media = parse_media(video(kind, codec, size, 2))
        assert (media.width, media.height) == media.display_size == size


@pytest.mark.parametrize(
    ("kind", "codec", "name"), [("mp4", "aac", "mp4"), ("ipod", "aac", "m4a"), ("matroska", "aac", "mkv")]
)
def test_a_file_of_sound_alone_has_a_duration(kind, codec, name):
    payload = video(kind, None, sound=codec)
    media = parse_media(payload)
    assert media == Media(name, None, None, 1, 1.0, media.duration, None)
    assert media.display_size is None
    assert media.duration == pytest.approx(probe(payload)[2], abs=0.03)


# --- turns ---

TURNS = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}


def turned(payload, turn, path, at):
    a, b, c, d = (sign * 65536 for sign in turn)

    def change(content):
        matrix = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        return content[:at] + matrix + content[at + 36 :]

    return change_boxes(payload, path, change)


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("kind", ["mp4", "mov"])
def test_every_turn_of_a_track_is_the_one_that_ffmpeg_finds(kind, orientation):
    payload = turned(video(kind, "mpeg4"), TURNS[orientation], [b"moov", b"trak", b"tkhd"], 40)
    media = parse_media(payload)
    assert media.orientation == orientation
    assert probe_turn(payload) == TURNS[orientation]
    assert media.display_size == ((48, 64) if orientation >= 5 else (64, 48))


@pytest.mark.parametrize("orientation", TURNS)
def test_an_orientation_moves_the_corner_as_its_matrix_says(orientation):
    """x' = ax + cy, y' = bx + dy, applied to the middle of the upper left corner, against what EXIF says of it."""
    from formats.picture_builder import find_mark, marked, turn

    a, b, c, d = TURNS[orientation]
    is_right, is_low = -a - c > 0, -b - d > 0
    assert find_mark(turn(marked((40, 24)), orientation)) == (is_right, is_low)


@pytest.mark.parametrize(("movie", "track"), [(6, 1), (6, 6), (3, 8), (2, 6), (6, 2), (5, 7)])
def test_the_turn_of_a_movie_comes_on_top_of_that_of_its_track(movie, track):
    payload = turned(video("mp4", "mpeg4"), TURNS[track], [b"moov", b"trak", b"tkhd"], 40)
    payload = turned(payload, TURNS[movie], [b"moov", b"mvhd"], 36)
    assert TURNS[parse_media(payload).orientation] == probe_turn(payload)


def test_a_turn_by_other_than_quarters_counts_as_none():
    payload = turned(video("mp4", "mpeg4"), (1, 1, -1, 1), [b"moov", b"trak", b"tkhd"], 40)
    assert parse_media(payload).orientation == 1


PROJECTION, TYPE, YAW, PITCH, ROLL, VIDEO = 0x7670, 0x7671, 0x7673, 0x7674, 0x7675, 0xE0


def matroska(kind=b"matroska", info=None, tracks=None, before=b"", ends=8):
    """A file without pictures, of an Info and one Tracks."""
    info = number(0x2AD7B1, 1_000_000) + element(0x4489, struct.pack(">f", 1500.0)) if info is None else info
    tracks = track() if tracks is None else tracks
    parts = before + element(0x1549A966, info) + element(0x1654AE6B, tracks)
    return element(0x1A45DFA3, element(0x4282, kind, 1), 1) + element(0x18538067, parts, ends)


def track(*video_fields, kind=1, width=64, height=48, fields=b""):
    pixels = number(0xB0, width) + number(0xBA, height) + b"".join(video_fields)
    return element(0xAE, number(0xD7, 1) + number(0x83, kind) + fields + element(VIDEO, pixels))


def projection(roll, yaw=0.0, pitch=0.0, kind=0):
    angles = zip((YAW, PITCH, ROLL), (yaw, pitch, roll), strict=True)
    return element(
        PROJECTION, number(TYPE, kind) + b"".join(element(name, struct.pack(">d", angle)) for name, angle in angles)
    )


def with_video_fields(payload, *added):
    """Add fields to the video of a Matroska file, behind those that it has."""
    return change_elements(payload, [0x18538067, 0x1654AE6B, 0xAE, VIDEO], lambda content: content + b"".join(added))


@pytest.mark.parametrize("yaw", [0.0, 180.0, -180.0])
@pytest.mark.parametrize("roll", [0.0, 90.0, -90.0, 180.0, -180.0])
def test_every_turn_of_a_matroska_video_is_the_one_that_ffmpeg_finds(roll, yaw):
    payload = with_video_fields(video("matroska", "mpeg4"), projection(roll, yaw))
    media = parse_media(payload)
    assert TURNS[media.orientation] == probe_turn(payload)


@pytest.mark.parametrize(
    "added", [projection(45.0), projection(90.0, pitch=5.0), projection(90.0, 20.0), projection(90.0, kind=1)]
)
def test_a_projection_that_is_no_quarter_turn_counts_as_none(added):
    assert parse_media(matroska(tracks=track(added))).orientation == 1


# --- how much is read ---


class Reader:
    def __init__(self, payload):
        self.payload, self.read_bytes, self.reads = payload, 0, 0

    def __call__(self, offset, length):
        assert 0 <= offset < len(self.payload)
        assert 0 < length <= len(self.payload) - offset
        self.read_bytes += length
        self.reads += 1
        return self.payload[offset : offset + length]


@pytest.mark.parametrize("name", VIDEOS)
def test_reading_piece_by_piece_gives_the_same(name):
    payload = VIDEOS[name]()
    assert read_media(Reader(payload), len(payload)) == parse_media(payload) == parse_media(memoryview(payload))


@pytest.mark.parametrize("options", [(), FRONT], ids=len)
def test_only_the_header_of_a_large_video_is_read(options):
    payload = video("mp4", "libx264", options=options)
    at = payload.index(b"mdat") - 4
    length = int.from_bytes(payload[at : at + 4], "big")
    payload = payload[:at] + box(b"mdat", bytes(30_000_000)) + payload[at + length :]
    reader = Reader(payload)
    assert read_media(reader, len(payload)) == parse_media(VIDEOS["mp4"]())
    assert reader.read_bytes < 10_000
    assert reader.reads <= 2


def test_the_index_of_a_fragmented_video_spares_its_fragments():
    for name, most in (("mp4 in fragments with an index", 2), ("mp4 in fragments", 4)):
        payload = VIDEOS[name]()
        parts = split_boxes(payload)
        fragments = [place for place, (kind, _) in enumerate(parts) if kind == b"moof"]
        assert len(fragments) > 2
        reader = Reader(payload)
        read_media(reader, len(payload))
        assert reader.reads <= most


def test_a_fragmented_video_without_index_is_followed_to_its_end():
    payload = b"".join(box(*part) for part in split_boxes(VIDEOS["mp4 in fragments"]()) if part[0] != b"mfra")
    assert parse_media(payload) == parse_media(VIDEOS["mp4 in fragments"]())
    far = b"".join(_padded(payload))
    reader = Reader(far)
    assert read_media(reader, len(far)).duration == parse_media(payload).duration
    assert reader.reads < 2 * far.count(b"moof") + 3


def _padded(payload):
    """Put the fragments too far apart for two to be read together."""
    for name, content in split_boxes(payload):
        yield box(name, content.ljust(8992, b"\0") if name == b"mdat" else content)


def test_more_fragments_than_are_read_leave_the_duration_open():
    payload = b"".join(
        _padded(b"".join(box(*part) for part in split_boxes(VIDEOS["mp4 in fragments"]()) if part[0] != b"mfra"))
    )
    moof, mdat = ([box(*part) for part in split_boxes(payload) if part[0] == name][-1] for name in (b"moof", b"mdat"))
    payload += (moof + mdat) * 400
    assert read_media(Reader(payload), len(payload)) == dataclasses.replace(parse_media(payload), duration=None)
    assert parse_media(payload).duration is not None


# --- broken and hostile files ---

SMALL = ["mp4", "mp4 with the header first", "mp4 in fragments", "mov", "webm", "mkv"]


@pytest.mark.parametrize("name", SMALL)
def test_a_video_cut_anywhere_gives_the_same_or_none(name):
    payload = video("mp4", "mpeg4", frames=9, options=FRAGMENTED) if "fragments" in name else VIDEOS[name]()
    whole = parse_media(payload)
    for length in range(len(payload)):
        found = parse_media(payload[:length])
        assert found in {None, whole} or (
            "fragments" in name  # which are as long as what is left of them, where they end with a fragment
            and found == dataclasses.replace(whole, duration=found.duration, frame_rate=found.frame_rate)
            and found.frame_rate in {None, whole.frame_rate}
            and (found.duration or 0) < whole.duration
        )


def mutated(payload, source):
    data = bytearray(payload)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        place = source.randrange(min(len(data), source.choice((100, len(data)))))
        match source.randrange(4):
            case 0:
                data[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            case 1:
                data[place : place + 4] = source.randbytes(4)
            case 2:
                del data[place : place + source.randrange(1, 9)]
            case 3:
                data[place:place] = data[place : place + source.randrange(1, 400)]
        data = data or bytearray(b"\0")
    return bytes(data)


def assert_sensible(media):
    if media is None:
        return
    assert (media.width is None) == (media.height is None)
    assert media.width is None or min(media.width, media.height, *media.display_size) >= 1
    assert 1 <= media.orientation <= 8
    assert media.duration is None or 0 < media.duration < float("inf")
    assert media.frame_rate is None or 0 < media.frame_rate < float("inf")
    assert 0 < media.pixel_aspect < float("inf")


def test_mutated_videos_never_raise_and_never_take_long(fuzz_count):
    source = random.Random(21)
    payloads = [VIDEOS[name]() for name in VIDEOS]
    started = time.thread_time()
    for turn in range(fuzz_count):
        payload = mutated(payloads[turn % len(payloads)], source)
        media = parse_media(payload)
        assert_sensible(media)
        if media is not None:
            assert read_media(Reader(payload), len(payload)) in {media, None, dataclasses.replace(media, duration=None)}
    assert time.thread_time() - started < 1 + fuzz_count / 50


BASES = [
    box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", bytes(60)),
    box(b"ftyp", b"qt  \0\0\0\0") + box(b"moov", box(b"mvhd", bytes(100)), box(b"trak", bytes(50))),
    matroska(),
    matroska(b"webm", ends=None),
]


@given(st.sampled_from(BASES), st.integers(0, 200), st.binary(max_size=60))
def test_any_bytes_inside_are_understood_or_none(base, place, change):
    payload = base[:place] + change + base[place + len(change) :]
    media = parse_media(payload)
    assert_sensible(media)
    assert read_media(Reader(payload), len(payload)) == media


FREE = b"\0\0\0\x08free"
HOSTILE = {
    "boxes": lambda: box(b"ftyp", b"isom\0\0\0\0") + FREE * 2_000_000,
    "boxes in a movie": lambda: box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", FREE * 2_000_000),
    "tracks": lambda: box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", box(b"trak", FREE * 100) * 20_000),
    "nested boxes": lambda: box(b"ftyp", b"isom\0\0\0\0") + box(b"moov", box(b"trak", nested(b"mdia", 5000))),
    "fragments": lambda: VIDEOS["mp4 in fragments"]() + box(b"moof", FREE * 200) * 10_000,
    "times": lambda: change_boxes(
        VIDEOS["mp4"](),
        [b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stts"],
        lambda _: b"\0\0\0\0\0\x3f\xff\xff" + b"\xff" * 8 * 0x3FFFFF,
    ),
    "elements": lambda: matroska(before=element(0xEC, b"", 1) * 4_000_000),
    "tracks of matroska": lambda: matroska(tracks=element(0xAE, number(0x83, 2), 1) * 2_000_000),
    "nothing but ones": lambda: matroska()[:20] + b"\xff" * 8_000_000,
}


def nested(name, depth):
    return b"".join(struct.pack(">I4s", 8 * (depth - level), name) for level in range(depth))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_cost_neither_time_nor_memory(name):
    view = memoryview(HOSTILE[name]())
    assert least_seconds(lambda: parse_media(view), 1, clock=time.thread_time) < 1
    tracemalloc.start()
    try:
        parse_media(view)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0",
        b"a cat",
        b"\0" * 100,
        b"GIF89a" + bytes(50),
        box(b"ftyp", b"isom"),
        box(b"mdat", bytes(9)),
        bytes(3) + b"\x10stts" + bytes(99),
    ],
)
def test_what_is_no_video_is_none(payload):
    assert parse_media(payload) is None


def test_a_movie_from_before_signatures_is_a_mov():
    parts = split_boxes(video("mov", "mjpeg"))
    old = b"".join(box(*part) for part in parts if part[0] in {b"moov", b"mdat"})
    assert old[4:8] == b"mdat"
    media = parse_media(old)
    assert (media.kind, media.display_size) == ("mov", (64, 48))


# --- Matroska ---


@pytest.mark.parametrize("ends", [8, None])
def test_fields_of_matroska_are_read(ends):
    fields = number(0x23E383, 40_000_000)
    assert parse_media(matroska(b"webm", tracks=track(fields=fields), ends=ends)) == Media(
        "webm", 64, 48, 1, 1.0, 1.5, 25.0
    )


def test_the_first_video_track_counts():
    tracks = track(kind=2, width=1) + track(width=100) + track(width=200)
    assert parse_media(matroska(tracks=tracks)).width == 100
    assert parse_media(matroska(tracks=track(kind=2))).width is None
    assert parse_media(matroska(tracks=track(kind=17))) is None
    assert parse_media(matroska(tracks=track(width=0))) is None


@pytest.mark.parametrize(
    ("fields", "aspect"),
    [
        ([], 1.0),
        ([number(0x54B0, 128)], 2.0),
        ([number(0x54BA, 96)], 0.5),
        ([number(0x54B0, 128), number(0x54BA, 96)], 1.0),
        ([number(0x54B2, 3), number(0x54B0, 16), number(0x54BA, 9)], 16 / 9 * 48 / 64),
        ([number(0x54B2, 1), number(0x54B0, 16), number(0x54BA, 9)], 1.0),  # centimetres
        ([number(0x54B2, 4), number(0x54B0, 16), number(0x54BA, 9)], 1.0),  # unknown
    ],
)
def test_the_display_size_makes_the_aspect_of_a_pixel(fields, aspect):
    media = parse_media(matroska(tracks=track(*fields)))
    assert media.pixel_aspect == pytest.approx(aspect)
    assert media.display_size == (round(64 * aspect), 48)


@pytest.mark.parametrize(
    ("info", "duration"),
    [
        (b"", None),
        (element(0x4489, struct.pack(">d", 2500.0)), 2.5),
        (number(0x2AD7B1, 1000) + element(0x4489, struct.pack(">d", 2500.0)), 0.0025),
        (element(0x4489, struct.pack(">d", float("nan"))), None),
        (element(0x4489, struct.pack(">f", float("inf"))), None),
        (element(0x4489, struct.pack(">f", -1.0)), None),
        (element(0x4489, b""), None),
        (element(0x4489, b"123"), None),
    ],
)
def test_a_duration_is_a_positive_number_of_ticks(info, duration):
    assert parse_media(matroska(info=info)).duration == duration


def test_a_header_behind_the_pictures_is_found_where_the_seek_head_says():
    cluster = element(0x1F43B675, bytes(50_000))
    info, tracks = element(0x1549A966, element(0x4489, struct.pack(">d", 700.0))), element(0x1654AE6B, track())

    def seek(places):
        entries = [
            element(0x4DBB, element(0x53AB, name.to_bytes(4, "big")) + element(0x53AC, place.to_bytes(4, "big")))
            for name, place in places.items()
        ]
        return element(0x114D9B74, b"".join(entries))

    names = (0x1549A966, 0x1654AE6B)
    start = len(seek(dict.fromkeys(names, 0))) + len(cluster)
    head = seek(dict(zip(names, (start, start + len(info)), strict=True)))
    payload = element(0x1A45DFA3, element(0x4282, b"webm", 1), 1) + element(0x18538067, head + cluster + info + tracks)
    assert parse_media(payload) == Media("webm", 64, 48, 1, 1.0, 0.7, None)
    reader = Reader(payload)
    assert read_media(reader, len(payload)) == parse_media(payload)
    assert reader.read_bytes < 10_000
    wrong = seek(dict(zip(names, (start + 1, start + 7), strict=True)))
    assert parse_media(payload.replace(head, wrong)) is None
