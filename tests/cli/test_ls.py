from __future__ import annotations

import pytest

from cli.running import PHOTOS, run_at_terminal
from shards import list_tree, make_members, read_samples, write_dataset, write_shard


def test_a_folder_lists_its_shards_with_exact_sizes(run, tmp_path):
    shards = write_dataset(tmp_path)
    assert run("ls", tmp_path).lines == [
        [str(path), str(path.stat().st_size), "4", "12", "jpg json txt", ""] for path in shards
    ]


def test_a_shard_lists_its_samples_where_tarfile_finds_them(run, photos):
    listed = run("ls", photos / PHOTOS.name, "--json").documents
    expected = read_samples(PHOTOS)
    assert [sample["key"] for sample in listed] == [sample.key for sample in expected]
    for sample, right in zip(listed, expected, strict=True):
        assert [(part["field"], part["name"], part["offset"], part["length"]) for part in sample["fields"]] == [
            (part.suffix, part.name, part.offset, len(part.payload)) for part in right.parts
        ]
    assert [sample["sample_index"] for sample in listed] == list(range(10))
    assert listed[0]["caption"] is listed[0]["width"] is None  # no index holds them


def test_lines_for_programs_have_a_column_each(run, photos):
    lines = run("ls", photos / PHOTOS.name).lines
    assert lines[1] == ["1", "0002-rocket", "jpg txt", "35000", "", ""]
    assert {len(line) for line in lines} == {6}


def test_an_index_adds_pixels_as_shown_and_captions(run, photos):
    assert run("index", photos, "--geometry").code == 0
    line = run("ls", photos / PHOTOS.name).lines[1]
    assert line == ["1", "0002-rocket", "jpg txt", "35000", "640x427", "a rocket on its launch pad under a clear sky"]
    document = run("ls", photos / PHOTOS.name, "--json").documents[1]
    assert (document["width"], document["height"]) == (640, 427)  # stored as 427x640, and turned by its EXIF


def test_one_shard_in_a_folder_or_a_pattern_is_listed_as_a_shard(run, photos):
    assert len(run("ls", photos).lines) == 1
    assert len(run("ls", f"{photos}/*.tar").lines) == 1
    assert len(run("ls", f"{photos}/photos-{{00000..00000}}.tar").lines) == 1
    assert len(run("ls", photos / PHOTOS.name).lines) == 10


def test_a_relative_path_is_a_shard_too(run, photos, monkeypatch):
    monkeypatch.chdir(photos)
    assert len(run("ls", PHOTOS.name).lines) == 10


def test_a_limit_says_how_much_it_cuts_off(run, tmp_path):
    write_dataset(tmp_path, shards=5)
    done = run("ls", tmp_path, "--limit", 2)
    assert len(done.lines) == 2
    assert "3 shards more" in done.err
    done = run("ls", tmp_path, "--json", "-n", 4)
    assert len(done.documents) == 4
    assert "1 shard more" in done.err
    assert len(run("ls", tmp_path, "--limit", 0).lines) == 5
    assert run("ls", tmp_path, "--limit", 5).err == ""


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2100])
def test_all_samples_are_listed_away_from_a_terminal(run, tmp_path, count):
    shard = write_shard(tmp_path / "a.tar", make_members(count, fields=("txt",)))
    assert [line[1] for line in run("ls", shard).lines] == [f"{number:08d}" for number in range(count)]


@pytest.mark.slow
def test_a_terminal_gets_a_hundred_unless_more_are_asked_for(tmp_path):
    shard = write_shard(tmp_path / "a.tar", make_members(150, fields=("txt",)))
    _, shown = run_at_terminal("ls", shard)
    assert "00000099" in shown
    assert "00000100" not in shown
    assert "50 samples more" in shown
    _, shown = run_at_terminal("ls", shard, "--limit", 0)
    assert "00000149" in shown


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_is_wider_than_the_terminal(photos, run, columns):
    run("index", photos, "--geometry")
    _, shown = run_at_terminal("ls", photos / PHOTOS.name, columns=columns, NO_COLOR="1")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert any("…" in line for line in lines)


def test_hostile_names_stay_on_their_line_and_in_their_column(run, hostile):
    lines = run("ls", hostile).lines
    assert [line[1] for line in lines] == [
        "\\x1b[31mred", "\\u202egnp", "bad\\xff", "[bold]a[/bold]", "tab\\x09newline\\x0a", "宽字符", "twice", "apart",
        "between", "apart",
    ]  # fmt: skip
    assert all(len(line) == 6 for line in lines)
    listed = run("ls", hostile, "--json").documents
    assert listed[0]["key"] == "\x1b[31mred"
    assert (listed[2]["key"], listed[2]["key_hex"]) == ("bad\ufffd", b"bad\xff".hex())


def test_findings_are_counted_by_code(run, hostile):
    [shard] = run("ls", hostile.parent, "--json").documents
    assert shard["findings"] == {"duplicate_suffix": 1, "name_not_utf8": 2, "repeated_key": 1}
    assert shard["num_files"] == 13
    assert "name_not_utf8 x2" in run("ls", hostile.parent).text


def test_a_damaged_shard_is_listed_up_to_its_damage_beside_the_others(run, tmp_path):
    first, *_ = write_dataset(tmp_path)
    first.write_bytes(first.read_bytes()[: 7 * 1024 + 100])
    done = run("ls", tmp_path, "--json")
    assert done.code == 0
    assert [shard["num_samples"] for shard in done.documents] == [3, 4, 4]
    assert done.documents[0]["findings"] == {"truncated_header": 1}
    assert "1 shard is damaged" in done.err
    assert len(run("ls", first).lines) == 3


def test_what_is_no_tar_beside_good_shards_is_listed_with_its_finding(run, tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "page.tar").write_bytes(b"<html>" + bytes(1000))
    assert run("ls", tmp_path).lines[0][1:] == ["1006", "0", "0", "", "not_tar"]


def test_an_empty_tar_is_no_error(run, tmp_path):
    done = run("ls", write_shard(tmp_path / "a.tar", []))
    assert done == (0, b"", "")


def test_looking_writes_nothing_into_the_data_folder(run, tmp_path):
    folder = tmp_path / "data"
    shards = write_dataset(folder)
    before = list_tree(folder)
    for arguments in (["ls", folder], ["ls", shards[0]], ["show", f"{shards[0]}#0"], ["stats", folder]):
        assert run(*arguments).code == 0
    assert list_tree(folder) == before
