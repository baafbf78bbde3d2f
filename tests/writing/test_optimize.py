from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile

import pytest

from conftest import DATA
from shards import list_tree, read_members, tar_bytes
from shardset.dataset.opening import discover_dataset
from shardset.errors import (
    ChangedError,
    ChecksumError,
    DecodeError,
    FormatError,
    NotFoundError,
    StateError,
    StorageError,
    TruncatedError,
)
from shardset.files import lock_file
from shardset.policy import Policy
from shardset.writing import optimize
from shardset.writing.optimize import optimize_dataset
from writing.conversions import LEGACY, LIMIT, LOOSE, read_shards, tree, write_legacy, write_loose

STATE = ".webshart-optimize-state.json"
WRITERS = {"loose": write_loose, "legacy": write_legacy}


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def loose(tmp_path):
    return write_loose(tmp_path / "loose")


@pytest.fixture
def legacy(tmp_path):
    return write_legacy(tmp_path / "legacy")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def read_state(folder):
    return json.loads((folder / STATE).read_text())


def captions(folder):
    return {name: entry.get("captions") for name, _, entry in read_shards(folder)}


# ---- beside webshart


def comparable(entry):
    """Return an entry without what ours alone has, or prints with other digits."""
    entry = {key: value for key, value in entry.items() if key != "orientation"}
    return entry | {"aspect": round(entry["aspect"], 5)} if "aspect" in entry else entry


@pytest.mark.parametrize("layout", ["loose", "legacy"])
def test_shards_captions_and_state_are_those_of_webshart(layout, tmp_path, target):
    expected = DATA / "webshart" / f"optimize-{layout}-whole"
    optimize_dataset(WRITERS[layout](tmp_path / "in"), destination=target, max_shard_size_bytes=LIMIT)
    found = target / "webshart"
    assert sorted(tree(found)) == sorted(tree(expected))
    for path in expected.glob("*.tar"):
        assert (found / path.name).read_bytes() == path.read_bytes()
    ours, theirs = read_shards(found), read_shards(expected)
    assert [(*row[:2], comparable(row[2])) for row in ours] == [(*row[:2], comparable(row[2])) for row in theirs]
    assert (found / STATE).read_bytes() == (expected / STATE).read_bytes()


@pytest.mark.parametrize("layout", ["loose", "legacy"])
def test_what_webshart_began_is_gone_on_with(layout, tmp_path, target):
    source = WRITERS[layout](tmp_path / "in")
    whole = DATA / "webshart" / f"optimize-{layout}-whole"
    folder = target / "webshart"
    folder.mkdir(parents=True)
    for path in whole.glob("shard-00000.*"):
        shutil.copy(path, folder)
    shutil.copy(DATA / "webshart" / f"optimize-{layout}-begun" / STATE, folder)
    before = (folder / "shard-00000.json").read_bytes()
    result = optimize_dataset(source, destination=target, max_shard_size_bytes=LIMIT)
    assert (result["resumed"], result["shards_created"], result["status"]) == (True, 4, "complete")
    assert (folder / STATE).read_bytes() == (whole / STATE).read_bytes()
    assert (folder / "shard-00000.json").read_bytes() == before
    for path in whole.glob("*.tar"):
        assert (folder / path.name).read_bytes() == path.read_bytes()


# ---- loose files


def test_loose_files_are_packed_in_the_order_of_their_paths_without_their_sidecars(loose, target):
    result = optimize_dataset(loose, destination=target)
    found = read_shards(target / "webshart")
    assert [(name, payload) for name, payload, _ in found] == [
        (name, LOOSE[name]) for name in ("a/1.jpg", "a/2.png", "a/3.webp", "b.v1/4.jpg", "c.mp4")
    ]
    assert result["total_samples"] == result["next_sample_index"] == 5
    assert (result["captioned_samples"], result["uncaptioned_samples"]) == (4, 1)
    assert result["bytes_sharded"] == sum(len(payload) for _, payload, _ in found)
    assert result["findings"] == []


def test_captions_and_metadata_of_sidecars_are_in_the_index(loose, target):
    optimize_dataset(loose, destination=target)
    entries = {name: entry for name, _, entry in read_shards(target / "webshart")}
    assert captions(target / "webshart") == {
        "a/1.jpg": "a café",
        "a/2.png": "a thing",
        "a/3.webp": None,
        "b.v1/4.jpg": "the text goes before",
        "c.mp4": {"scene": {"shot": 2}},
    }
    assert entries["a/2.png"]["json_metadata"] == json.loads(LOOSE["a/2.json"])
    assert "json_metadata" not in entries["b.v1/4.jpg"]
    dataset = discover_dataset(target / "webshart")
    assert dataset.find("a/1").caption == "a café"


def test_pixel_sizes_are_in_the_index_unless_they_are_left_out(tmp_path, target):
    with tarfile.open(DATA / "webshart" / "photos-00000.tar") as tar:
        photo = tar.extractfile("0005-cat.webp").read()
    source = write_loose(tmp_path / "in", {"cat.webp": photo})
    optimize_dataset(source, destination=target)
    optimize_dataset(source, destination=target, output_prefix="plain", include_image_geometry=False)
    with_size, without = (read_shards(target / name)[0][2] for name in ("webshart", "plain"))
    assert (with_size["width"], with_size["height"]) == (451, 300)
    assert "width" not in without


def test_only_files_with_the_suffixes_asked_for_are_packed(loose, target):
    result = optimize_dataset(loose, destination=target, payload_extensions=[" PNG", ".Mp4", "mp4", ""])
    assert [name for name, _, _ in read_shards(target / "webshart")] == ["a/2.png", "c.mp4"]
    assert result["payload_extensions"] == [".mp4", ".png"]


def test_a_subfolder_and_a_prefix_are_taken_as_said(loose, target):
    result = optimize_dataset(loose, destination=target, source_subfolder="/a/", output_prefix="/x/y/")
    assert [name for name, _, _ in read_shards(target / "x" / "y")] == ["1.jpg", "2.png", "3.webp"]
    assert result["source"] == {"kind": "local", "subfolder": "a"}
    assert result["output_prefix"] == "x/y"


def test_an_empty_prefix_writes_into_the_destination_itself(loose, target):
    optimize_dataset(loose, destination=target, output_prefix="")
    assert (target / "shard-00000.tar").exists()
    assert optimize_dataset(loose, destination=target, output_prefix="")["resumed"]


def test_a_file_larger_than_a_shard_has_one_of_its_own(tmp_path, target):
    source = write_loose(tmp_path / "in", {"1.jpg": b"x", "2.jpg": b"y" * 9000, "3.jpg": b"z", "4.jpg": b"z"})
    optimize_dataset(source, destination=target, max_shard_size_bytes=4096)
    shards = [[*read_members(path)] for path in sorted((target / "webshart").glob("*.tar"))]
    assert shards == [["1.jpg"], ["2.jpg"], ["3.jpg", "4.jpg"]]


def test_no_shard_passes_the_limit_but_for_long_names(loose, target):
    optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT)
    for path in (target / "webshart").glob("*.tar"):
        sizes = [512 + -(-len(payload) // 512) * 512 for payload in read_members(path).values()]
        assert len(sizes) == 1 or sum(sizes) + 1024 <= LIMIT


def test_the_manifest_digest_is_over_paths_and_sizes(tmp_path, target):
    source = write_loose(tmp_path / "in", {"b.jpg": b"12", "a.jpg": b"123", "a.txt": b"1234"})
    listed = b"a.jpg\x003\x00a.txt\x004\n" + b"b.jpg\x002\x00\n"
    assert optimize_dataset(source, destination=target)["manifest_sha256"] == hashlib.sha256(listed).hexdigest()


def test_the_source_stays_as_it_is(loose, target):
    before = list_tree(loose)
    optimize_dataset(loose, destination=target)
    assert list_tree(loose) == before


@pytest.mark.parametrize(
    ("name", "payload", "message"),
    [
        ("x.txt", b"\xff\xfe", "cannot be read"),
        ("x.json", b"{broken", "cannot be read"),
        ("x.json", b'{"caption": NaN}', "NaN is no JSON value"),
        ("x.json", b"[" * 100_000, "nested too deep"),
        ("x.txt", b"x" * (4 << 20) + b"x", "exceeds 4194304 bytes"),
    ],
)
def test_a_sidecar_that_cannot_be_read_is_an_error_that_names_it(tmp_path, target, name, payload, message):
    source = write_loose(tmp_path / "in", {"x.jpg": b"1", name: payload})
    with pytest.raises(DecodeError, match=message) as caught:
        optimize_dataset(source, destination=target)
    assert name in str(caught.value)
    assert not list((target / "webshart").glob("shard-*"))
    result = optimize_dataset(source, destination=target, policy=Policy(on_error="skip"))
    assert (result["captioned_samples"], result["uncaptioned_samples"]) == (0, 1)
    assert [finding["count"] for finding in result["findings"]] == [1]
    assert name in result["findings"][0]["places"][0]


def test_a_file_that_shrinks_or_grows_meanwhile_is_an_error_and_leaves_no_shard(loose, target):
    def disturb(change):
        def progress(done, total):
            assert total == 5
            if done == 1:
                (loose / "a" / "2.png").write_bytes(LOOSE["a/2.png"] + b"+" if change > 0 else b"-")

        with pytest.raises(ChangedError, match="it had 600 bytes"):
            optimize_dataset(loose, destination=target, progress=progress)
        write_loose(loose)

    disturb(1)
    disturb(-1)
    assert sorted(tree(target)) == [f"webshart/{STATE}"]
    assert optimize_dataset(loose, destination=target)["status"] == "complete"


# ---- archives


def test_members_of_archives_are_packed_under_the_archives_name_with_their_names_as_captions(legacy, target):
    result = optimize_dataset(legacy, destination=target)
    assert [(name, payload) for name, payload, _ in read_shards(target / "webshart")] == [
        ("first/a_red_car.jpg", LEGACY["first.tar"][0][1]),
        ("first/sub/blue__.png", LEGACY["first.tar"][1][1]),
        ("first/.hid.png", b"hid"),
        ("more/second/" + "long_" * 30 + ".jpg", b"long" * 100),
        ("more/second/ünï_code.jpg", b"u" * 700),
    ]
    assert [*captions(target / "webshart").values()] == [
        "a red car",
        "blue",
        ".hid",
        ("long " * 30).strip(),
        "ünï code",
    ]
    assert (result["input_layout"], result["total_samples"], result["next_sample_index"]) == ("legacy_tar", 0, 5)
    assert (result["next_source_archive_index"], result["next_source_member_offset"]) == (2, 0)


def test_loose_files_go_before_archives(legacy, target):
    write_loose(legacy, {"one.jpg": b"1"})
    assert optimize_dataset(legacy, destination=target)["input_layout"] == "loose"


def test_a_member_that_is_cut_off_is_left_out_and_named(tmp_path, target, caplog):
    whole = tar_bytes([("one.jpg", b"1" * 600), ("two.jpg", b"2" * 5000)])
    source = write_legacy(tmp_path / "in", {})
    source.mkdir()
    (source / "cut.tar").write_bytes(whole[:3000])
    write_legacy(source, {"good.tar": [("three.jpg", b"3")]})
    result = optimize_dataset(source, destination=target)
    assert [name for name, _, _ in read_shards(target / "webshart")] == ["cut/one.jpg", "good/three.jpg"]
    (finding,) = result["findings"]
    assert (finding["code"], finding["count"]) == ("truncated_payload", 1)
    assert "cut.tar" in finding["places"][0]
    assert "two.jpg" in finding["places"][0]
    assert "two.jpg" in caplog.text
    strict = Policy(codes={"truncated_payload": "raise"})
    with pytest.raises(TruncatedError, match=r"cut\.tar"):
        optimize_dataset(source, destination=target, output_prefix="again", policy=strict)


def test_a_cut_header_ends_an_archive_as_a_cut_payload_does(tmp_path, target):
    source = tmp_path / "in"
    source.mkdir()
    (source / "cut.tar").write_bytes(tar_bytes([("one.jpg", b"1"), ("two.jpg", b"2")])[: 1024 + 100])
    result = optimize_dataset(source, destination=target)
    assert (result["status"], result["next_sample_index"]) == ("complete", 1)
    assert [finding["code"] for finding in result["findings"]] == ["truncated_header"]


def test_a_last_member_whose_padding_alone_is_missing_is_packed(tmp_path, target):
    source = tmp_path / "in"
    source.mkdir()
    (source / "cut.tar").write_bytes(tar_bytes([("one.jpg", b"1" * 600)])[: 512 + 600])
    optimize_dataset(source, destination=target)
    assert [row[:2] for row in read_shards(target / "webshart")] == [("cut/one.jpg", b"1" * 600)]


def test_damage_in_the_middle_of_an_archive_is_an_error(legacy, target):
    payload = bytearray((legacy / "first.tar").read_bytes())
    payload[1536] ^= 1
    (legacy / "first.tar").write_bytes(payload)
    with pytest.raises(ChecksumError, match=r"first\.tar at byte 1536"):
        optimize_dataset(legacy, destination=target)
    result = optimize_dataset(legacy, destination=target, policy=Policy(on_error="skip"))
    assert result["findings"][0]["code"] == "bad_checksum"
    assert result["next_sample_index"] == 3


@pytest.mark.parametrize("name", ["/etc/x.jpg", "../x.jpg", "a/../../x.jpg"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, target, name):
    source = write_legacy(tmp_path / "in", {"a.tar": [("good.jpg", b"1"), (name, b"2")]})
    with pytest.raises(FormatError, match="unsafe path") as caught:
        optimize_dataset(source, destination=target)
    assert (caught.value.code, caught.value.offset) == ("unsafe_name", 1024)
    result = optimize_dataset(source, destination=target, policy=Policy(on_error="skip"))
    assert [name for name, _, _ in read_shards(target / "webshart")] == ["a/good.jpg"]
    assert "unsafe_name" in [finding["code"] for finding in result["findings"]]


def test_a_member_that_is_there_twice_is_packed_twice_and_named(tmp_path, target):
    source = write_legacy(tmp_path / "in", {"a.tar": [("x_y.jpg", b"1"), ("x_y.jpg", b"2")]})
    result = optimize_dataset(source, destination=target)
    found = read_shards(target / "webshart")
    assert [payload for _, payload, _ in found] == [b"1", b"2"]
    assert [entry["captions"] for _, _, entry in found] == ["x y", "x y"]
    twice = next(finding for finding in result["findings"] if finding["code"] == "duplicate_member")
    assert (twice["count"], twice["places"][0].startswith("shard-00000.tar#a/x_y.jpg")) == (1, True)


def test_folders_links_and_dots_in_names_are_dealt_with(tmp_path, target):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}) as tar:
        folder, link, member = tarfile.TarInfo("sub.jpg"), tarfile.TarInfo("link.jpg"), tarfile.TarInfo("././x/./a.jpg")
        folder.type, link.type, link.linkname, member.size = tarfile.DIRTYPE, tarfile.SYMTYPE, "a.jpg", 1
        for info in (folder, link, member):
            tar.addfile(info, io.BytesIO(b"1"))
    source = tmp_path / "in" / "v1.0"
    source.mkdir(parents=True)
    (source / "d.1.tar").write_bytes(file.getvalue())
    optimize_dataset(tmp_path / "in", destination=target)
    assert [name for name, _, _ in read_shards(target / "webshart")] == ["v1.0/d.1/x/a.jpg"]


def test_a_sparse_member_is_packed_with_its_holes_as_zeros(tmp_path, target):
    shutil.copytree(DATA / "tar", tmp_path / "vectors")
    names = sorted((tmp_path / "vectors").rglob("*sparse*.tar"))
    source = tmp_path / "in"
    source.mkdir()
    shutil.copy(names[0], source / "s.tar")
    with tarfile.open(source / "s.tar") as tar:
        expected = {info.name: tar.extractfile(info).read() for info in tar if info.isreg()}
    suffixes = {name.rpartition(".")[2] for name in expected}
    optimize_dataset(source, destination=target, payload_extensions=suffixes)
    assert {name.removeprefix("s/"): payload for name, payload, _ in read_shards(target / "webshart")} == expected


# ---- again


def test_a_run_in_pieces_gives_what_one_run_gives(loose, legacy, tmp_path):
    for source in (loose, legacy):
        whole, pieces = tmp_path / f"{source.name}-whole", tmp_path / f"{source.name}-pieces"
        result = optimize_dataset(source, destination=whole, max_shard_size_bytes=LIMIT)
        seen = []
        while not seen or seen[-1]["status"] != "complete":
            seen.append(optimize_dataset(source, destination=pieces, max_shard_size_bytes=LIMIT, max_shards=2))
        assert [done["shards_created"] for done in seen] == [2, 2, 1]
        assert [done["resumed"] for done in seen] == [False, True, True]
        assert tree(pieces) == tree(whole)
        assert seen[-1] | {"shards_created": 5, "resumed": False} == result


def test_a_complete_conversion_is_left_alone(loose, target):
    first = optimize_dataset(loose, destination=target)
    before = list_tree(target)
    again = optimize_dataset(loose, destination=target)
    assert (again["shards_created"], again["resumed"]) == (0, True)
    assert {name for name, seen in list_tree(target).items() if before[name] != seen} <= {"webshart"}
    assert {**first, "shards_created": 0, "resumed": True} == again


def test_a_destination_within_the_source_is_no_input_of_the_next_run(legacy):
    first = optimize_dataset(legacy, destination=legacy, max_shard_size_bytes=LIMIT, max_shards=1)
    again = optimize_dataset(legacy, destination=legacy, max_shard_size_bytes=LIMIT)
    assert (first["manifest_sha256"], again["status"]) == (again["manifest_sha256"], "complete")
    assert len(read_shards(legacy / "webshart")) == 5


def test_another_source_or_other_settings_are_refused_and_named(loose, target):
    optimize_dataset(loose, destination=target, max_shards=1, max_shard_size_bytes=LIMIT)
    before = tree(target)
    with pytest.raises(StateError, match="changed fields: max_shard_size_bytes -"):
        optimize_dataset(loose, destination=target)
    write_loose(loose, {"a/1.jpg": b"another size"})
    with pytest.raises(ValueError, match="manifest_sha256"):
        optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT)
    assert tree(target) == before


def test_shards_without_a_state_are_not_written_over(loose, target):
    optimize_dataset(loose, destination=target)
    (target / "webshart" / STATE).unlink()
    before = tree(target)
    with pytest.raises(StateError, match="resume state is missing"):
        optimize_dataset(loose, destination=target)
    assert tree(target) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.clear(), "lacks fields"),
        (lambda state: state.update(mine=1), "mine"),
        (lambda state: state.update(status="paused"), "status: 'paused'"),
        (lambda state: state.update(next_sample_index=9), "sample position 9 of 5"),
        (lambda state: state.update(captioned_samples=4), "do not add up"),
        (lambda state: state.update(next_shard_index=-1), "negative"),
        (lambda state: state.update(bytes_sharded="7"), "negative or odd"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(loose, target, change, message):
    optimize_dataset(loose, destination=target, max_shards=1, max_shard_size_bytes=LIMIT)
    state = read_state(target / "webshart")
    change(state)
    (target / "webshart" / STATE).write_text(json.dumps(state))
    with pytest.raises(StateError, match=message):
        optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT)


@pytest.mark.parametrize("content", [b"", b'{"schema', b"[]"])
def test_a_state_file_that_is_cut_is_refused_by_name(loose, target, content):
    (target / "webshart").mkdir(parents=True)
    (target / "webshart" / STATE).write_bytes(content)
    with pytest.raises(StateError, match="optimize-state"):
        optimize_dataset(loose, destination=target)


def test_two_runs_do_not_write_into_one_folder_at_once(loose, target):
    (target / "webshart").mkdir(parents=True)
    with lock_file(target / "webshart" / ".shardset-optimize.lock"), pytest.raises(StorageError, match="another"):
        optimize_dataset(loose, destination=target)
    assert optimize_dataset(loose, destination=target)["status"] == "complete"


def test_an_error_on_the_way_leaves_whole_shards_and_no_other_files(loose, target, monkeypatch):
    class Full(optimize.MemberWriter):
        def add(self, name, size, pieces):
            if name.startswith("b"):
                raise OSError(28, "No space left on device")
            super().add(name, size, pieces)

    monkeypatch.setattr(optimize, "MemberWriter", Full)
    with pytest.raises(StorageError, match="no space left on device") as caught:
        optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT)
    assert caught.value.errno == 28
    state = read_state(target / "webshart")
    names = {
        f"shard-{number:05d}.{suffix}" for number in range(state["next_shard_index"]) for suffix in ("tar", "json")
    }
    assert set(tree(target / "webshart")) == {STATE, *names}
    assert state["next_sample_index"] == len(read_shards(target / "webshart")) > 0


def test_ctrl_c_leaves_nothing_half_done(loose, target):
    def interrupt(done, _):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT, progress=interrupt)
    assert not list((target / "webshart").glob("*.partial"))
    assert not (target / "webshart" / ".shardset-optimize.lock").exists()
    assert optimize_dataset(loose, destination=target, max_shard_size_bytes=LIMIT)["resumed"]


# ---- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "destination or push_to_hub is required"),
        ({"destination": "x", "max_shard_size_bytes": 0}, "must be greater than zero"),
        ({"destination": "x", "max_shards": 0}, "must be greater than zero"),
        ({"destination": "x", "output_prefix": "a/../b"}, "invalid repository path prefix"),
        ({"destination": "x", "source_subfolder": ".."}, "invalid repository path prefix"),
        ({"destination": "x", "payload_extensions": [" "]}, "at least one payload extension"),
        ({"destination": "x", "payload_extensions": ["xyz"]}, r"matched: \.xyz"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(loose, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        optimize_dataset(loose, **options)
    assert not (tmp_path / "x").exists()


def test_archives_without_anything_to_pack_are_an_error(tmp_path, target):
    source = write_legacy(tmp_path / "in", {"a.tar": [("x.txt", b"1")]})
    with pytest.raises(ValueError, match="no member of the archives matched"):
        optimize_dataset(source, destination=target)


@pytest.mark.parametrize("source", ["nowhere", "owner/name"])
def test_a_source_that_is_no_folder_here_is_a_clear_error(target, source):
    with pytest.raises(NotFoundError, match="no such folder") as caught:
        optimize_dataset(source, destination=target)
    assert "download" in caught.value.hint
    with pytest.raises(NotFoundError):
        optimize_dataset(target.parent, destination=target, source_subfolder="nowhere")


def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch):
    write_loose(tmp_path / "loose")
    monkeypatch.setenv("HOME", str(tmp_path))
    optimize_dataset("~/loose", destination="~/out")
    assert len(read_shards(tmp_path / "out" / "webshart")) == 5
