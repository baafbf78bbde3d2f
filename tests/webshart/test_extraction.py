from __future__ import annotations

import json

import pytest

from shards import (
    private_cache,  # noqa: F401 - the fixture is autouse
    replace_file,
    write_dataset,
)
from shardset.errors import ShardsetError, TruncatedError
from shardset.policy import Policy
from shardset.webshart.extraction import MetadataExtractor, as_source


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", shards=3, samples=3)
    (tmp_path / "data" / "sub").mkdir()
    (tmp_path / "data" / "shard-0002.tar").rename(tmp_path / "data" / "sub" / "shard-0000.tar")
    return tmp_path / "data"


def test_the_arguments_are_those_of_webshart_in_its_order(folder, tmp_path):
    done = tmp_path / "done"
    result = MetadataExtractor("hf_token").extract_metadata(
        str(folder), str(tmp_path / "out"), str(done), 2, (1, 3), include_image_geometry=True
    )
    assert result.indexes_written == 2
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.json")}
    assert found == {"shard-0001.json", "sub/shard-0000.json"}
    assert json.loads((tmp_path / "out" / "shard-0001.json").read_text())["includes_image_geometry"] is True
    assert (done / "sub" / "shard-0000.json").exists()


def test_a_destination_without_a_slash_works(folder, monkeypatch):
    monkeypatch.chdir(folder)
    MetadataExtractor(hf_token=None).extract_metadata(source=".", destination="out")
    assert (folder / "out" / "sub" / "shard-0000.json").exists()


def test_no_workers_mean_this_process_and_fewer_are_refused(folder, tmp_path):
    MetadataExtractor().extract_metadata(folder, tmp_path / "out", max_workers=0)
    with pytest.raises(ValueError, match="max_workers=-1"):
        MetadataExtractor().extract_metadata(folder, tmp_path / "out", max_workers=-1)


def test_a_truncated_tar_raises_or_is_counted(folder, tmp_path):
    path = folder / "shard-0001.tar"
    replace_file(path, path.read_bytes()[:515])
    with pytest.raises(TruncatedError, match=r"shard-0001\.tar"):
        MetadataExtractor().extract_metadata(folder, tmp_path / "out")
    result = MetadataExtractor().extract_metadata(folder, tmp_path / "out", policy=Policy(on_error="skip"))
    assert result.report.counts["truncated_payload"] == 1


def test_the_token_is_shown_nowhere():
    assert "hf_secret" not in repr(MetadataExtractor("hf_secret"))


def test_a_dataset_of_the_hub_is_named_by_two_parts_unless_something_here_is(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert as_source("owner/name") == "hf://datasets/owner/name"
    here = ["data/sub", "./owner/name", "/owner/name", "owner", "a/b/c", "s3://a/b", "data/*.tar", "owner/"]
    assert [as_source(source) for source in here] == here


def test_a_source_that_is_nowhere_is_a_clear_error(tmp_path):
    with pytest.raises(ShardsetError):
        MetadataExtractor().extract_metadata("nowhere/here/at/all", tmp_path / "out")
