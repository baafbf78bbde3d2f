from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from cli.running import PHOTOS, run_at_terminal
from shards import read_members, write_dataset, write_shard
from shardset.cli.payloads import look_at
from shardset.storage.memory import MemoryStore


def test_a_sample_is_shown_with_places_that_hold_its_payloads(run):
    shown = run("show", f"{PHOTOS}#0002-rocket", "--json").document
    assert (shown["key"], shown["sample_index"], shown["shard_index"]) == ("0002-rocket", 1, 0)
    whole, members = PHOTOS.read_bytes(), read_members(PHOTOS)
    for field in shown["fields"]:
        payload = members[field["name"]]
        first, last = map(int, field["range"].split("-"))
        assert whole[first : last + 1] == payload
        assert whole[field["offset"] :][: field["length"]] == payload
    jpg, txt = shown["fields"]
    assert (jpg["kind"], jpg["width"], jpg["height"], jpg["orientation"], jpg["text"]) == ("jpeg", 640, 427, 6, None)
    assert (txt["kind"], txt["text"]) == ("text", "a rocket on its launch pad under a clear sky\n")


def test_a_sample_is_shown_with_its_kinds_and_pixels_to_people(run):
    text = run("show", f"{PHOTOS}#1").text
    assert "640x427, orientation 6" in text
    assert "51200-86154" in text
    assert "a rocket on its launch pad" in text


@pytest.mark.parametrize("address", ["{}#0009-moon", "{}#8"])
def test_the_number_and_the_key_show_the_same_sample(run, address):
    assert run("show", address.format(PHOTOS), "--json").document["key"] == "0009-moon"


def test_a_sample_of_a_folder_is_numbered_through_all_shards(run, tmp_path):
    shards = write_dataset(tmp_path, shards=3, samples=4)
    shown = run("show", f"{tmp_path}#9", "--json").document
    assert (shown["shard"], shown["shard_index"], shown["sample_index"]) == (str(shards[2]), 2, 9)
    shown = run("show", f"{shards[2]}#1", "--json").document
    assert (shown["shard_index"], shown["sample_index"], shown["key"]) == (0, 1, "00000009")


def test_the_caption_of_the_index_is_shown(run, photos):
    run("index", photos)
    shown = run("show", f"{photos}#0002-rocket", "--json").document
    assert shown["caption"] == "a rocket on its launch pad under a clear sky"


def test_a_folder_alone_is_wrong_usage(run, tmp_path):
    write_dataset(tmp_path)
    done = run("show", tmp_path)
    assert done.code == 2
    assert "3 shards" in done.err
    assert f"shardset ls {tmp_path}" in done.err


def test_a_key_that_is_not_there_is_exit_code_3(run):
    done = run("show", f"{PHOTOS}#0002-roket")
    assert done.code == 3
    assert "'0002-rocket'" in done.err


def test_a_shard_is_shown_with_its_counts_and_format(run):
    shown = run("show", PHOTOS, "--json").document
    assert (shown["num_samples"], shown["num_files"], shown["size"]) == (10, 20, PHOTOS.stat().st_size)
    assert shown["members"] == {"file": 20}
    assert shown["dialect"] == "ustar"
    assert {field["field"]: field["samples"] for field in shown["fields"]} == {
        "jpg": 6, "json": 6, "txt": 4, "webp": 2, "png": 2
    }  # fmt: skip
    sizes = read_members(PHOTOS)
    assert sum(field["size"] for field in shown["fields"]) == sum(map(len, sizes.values()))
    assert shown["findings"] == []
    assert "no findings" in run("show", PHOTOS).text


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (tarfile.USTAR_FORMAT, "a.txt", ("ustar", 0)),
        (tarfile.GNU_FORMAT, "a.txt", ("gnu", 0)),
        (tarfile.GNU_FORMAT, f"{'x' * 120}.txt", ("gnu", 1)),
        (tarfile.PAX_FORMAT, "ünïcode.txt", ("pax", 1)),
    ],
)
def test_the_dialect_is_told_from_the_headers(run, tmp_path, kind, name, expected):
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as tar:
        for member in (name, "folder/b.txt"):
            tar.addfile(tarfile.TarInfo(member))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        tar.addfile(link)
    shown = run("show", tmp_path / "a.tar", "--json").document
    assert (shown["dialect"], shown["extended_members"]) == expected
    assert shown["members"] == {"file": 2, "symlink": 1}


def test_a_tar_without_members_is_shown_as_empty(run, tmp_path):
    shown = run("show", write_shard(tmp_path / "a.tar", []), "--json").document
    assert (shown["dialect"], shown["members"], shown["fields"], shown["end"]) == ("empty", {}, [], 0)


def test_every_finding_is_shown_with_its_place(run, hostile):
    shown = run("show", hostile, "--json").document
    with tarfile.open(hostile, errors="surrogateescape") as tar:
        second = [info.offset_data for info in tar if info.name == "twice.jpg"][1]
    found = {finding["code"]: finding for finding in shown["findings"]}
    assert set(found) == {"duplicate_suffix", "name_not_utf8", "repeated_key"}
    assert (found["duplicate_suffix"]["offset"], found["duplicate_suffix"]["member"]) == (second, "twice.jpg")
    assert found["duplicate_suffix"]["is_error"] is False
    text = run("show", hostile).text
    assert "4 findings" in text
    assert f"duplicate_suffix at byte {second}, twice.jpg" in text


def test_files_of_no_sample_are_listed(run, hostile):
    others = run("show", hostile, "--json").document["other_files"]
    assert [other["name"] for other in others] == ["README", "caf\ufffd"]
    assert others[1]["name_hex"] == b"caf\xe9".hex()
    assert "2 files of no sample" in run("show", hostile).text


def test_a_truncated_shard_says_where_it_ends(run, tmp_path):
    shard = write_shard(tmp_path / "a.tar", [("a.txt", b"whole"), ("b.txt", bytes(5000))])
    shard.write_bytes(shard.read_bytes()[:3000])
    shown = run("show", shard, "--json").document
    assert [(finding["code"], finding["is_error"]) for finding in shown["findings"]] == [("truncated_payload", True)]
    assert shown["num_samples"] == 1


def test_samples_of_one_key_name_each_other(run, hostile):
    first = run("show", f"{hostile}#apart", "--json").document
    [other] = first["same_key"]
    assert run("show", f"{hostile}#{other}", "--json").document["same_key"] == [first["sample_index"]]
    assert f"sample {other}" in run("show", f"{hostile}#apart").text


def test_both_members_of_one_suffix_are_shown(run, hostile):
    shown = run("show", f"{hostile}#twice", "--json").document
    assert [field["text"] for field in shown["fields"]] == ["first", "second"]


def test_a_long_text_is_cut_and_a_sparse_file_has_no_range(run, tmp_path, cases):
    shard = write_shard(tmp_path / "a.tar", [("k.txt", b"x" * 5000)])
    assert run("show", f"{shard}#k", "--json").document["fields"][0]["text"] == "x" * 1000
    sparse = cases / "sparse_pax_10.tar"
    [listed, *_] = run("ls", sparse, "--json").documents
    if listed["fields"]:
        [field] = run("show", f"{sparse}#0", "--json").document["fields"]
        assert (field["kind"], field["offset"], field["range"]) == ("sparse file", None, None)


def png(width, height):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("payload", "kind", "pixels", "text"),
    [
        (b"", "empty", None, None),
        (b"plain", "text", None, "plain"),
        ("宽字符".encode() * 30_000, "text", None, ("宽字符" * 400)[:1000]),
        (b"x" * 65_535 + "宽".encode(), "text", None, "x" * 1000),
        (b"\xff\xfe\x00", "data", None, None),
        (b"a\0b", "data", None, None),
        (b'{"a": 1}', "json", None, '{"a": 1}'),
        (b"\x1f\x8b\x08" + bytes(20), "gzip", None, None),
        (gzip.compress(b"x", mtime=0), "gzip", None, None),
        (png(3, 2), "png", (3, 2), None),
        (png(3, 2)[:10], "png", None, None),
    ],
)
def test_a_payload_is_told_by_its_content(payload, kind, pixels, text):
    store = MemoryStore()
    store.write("memory://x", b"before" + payload)
    found, geometry, preview = look_at(store.open("memory://x"), 6, len(payload))
    assert (found, geometry and geometry.display_size, preview) == (kind, pixels, text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx")])
def test_a_video_is_shown_with_its_size_duration_and_frame_rate(run, tmp_path, name, codec):
    import av

    with av.open(str(tmp_path / f"a.{name}"), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(50):
            container.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
        container.mux(stream.encode())
    shard = write_shard(tmp_path / "a.tar", [(f"a.{name}", (tmp_path / f"a.{name}").read_bytes())])
    assert "64x48, 2 s, 25 frames/s" in run("show", f"{shard}#0").text
    (field,) = run("show", f"{shard}#0", "--json").document["fields"]
    assert (field["kind"], field["width"], field["height"], field["orientation"]) == (name, 64, 48, 1)
    assert (field["duration"], field["frame_rate"]) == (pytest.approx(2, abs=0.05), pytest.approx(25, abs=0.5))


def test_a_narrow_terminal_cuts_the_content_and_no_place():
    _, shown = run_at_terminal("show", f"{PHOTOS}#1", columns=60, NO_COLOR="1")
    table = [line for line in shown.splitlines() if line.startswith(("field", "jpg", "txt"))]
    assert len(table) == 3
    assert max(map(len, table)) <= 60
    assert "51200-86154" in table[1]
