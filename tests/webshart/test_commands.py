"""webshart's program and the functions behind it, called as its users do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest

import shardset.webshart as module
from cli.running import environment
from shards import private_cache, write_shard  # noqa: F401 - a fixture
from shardset import index_dataset
from shardset.webshart.commands import parse_range
from writing.conversions import write_loose

IMAGE = b"GIF89a\x10\x00\x09\x00" + bytes(8)


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        members = [(f"{number}.gif", IMAGE), (f"{number}x.gif", IMAGE), (f"{number}x.txt", b"t")]
        write_shard(tmp_path / "data" / f"s-{number}.tar", members)
    return tmp_path / "data"


def extraction(source, destination, **changed):
    settings = {"checkpoint_dir": None, "max_workers": 2, "hf_token": None, "range": None}
    return Namespace(
        source=str(source), destination=str(destination), **settings | {"include_image_geometry": False} | changed
    )


def test_a_namespace_of_options_is_enough_to_extract(folder, tmp_path, capsys):
    done = tmp_path / "done"
    args = extraction(folder, tmp_path / "out", range="1,3", checkpoint_dir=str(done), include_image_geometry=True)
    assert module.extract_metadata(args) is None
    assert capsys.readouterr() == (
        f"Processing shards in range [1, 3)\n✓ Metadata extraction complete for {folder}\n",
        "",
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["s-1.json", "s-2.json"]
    assert json.loads((tmp_path / "out" / "s-1.json").read_text())["files"]["1.gif"]["width"] == 16
    assert len(list(done.iterdir())) == 2


@pytest.mark.parametrize("wrong", ["1", "a,b", "3,1", "-1,2", "1,2,3"])
def test_a_range_that_is_none_is_said_and_ends_the_program(folder, tmp_path, capsys, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse_range(wrong)
    with pytest.raises(SystemExit) as end:
        module.extract_metadata(extraction(folder, tmp_path / "out", range=wrong))
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"✗ Error parsing range: '{wrong}' ")
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_is_said_and_ends_the_program(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        module.extract_metadata(extraction(tmp_path / "no", tmp_path / "out"))
    assert end.value.code == 1
    assert "✗ Error extracting metadata: " in capsys.readouterr().err
    for command, doing in (("optimize-captions", "captions"), ("optimize-dataset", "dataset")):
        with pytest.raises(SystemExit) as end:
            module.main([command, "--source", str(tmp_path / "no"), "--destination", str(tmp_path / "out")])
        assert end.value.code == 1
        err = capsys.readouterr().err
        assert err.startswith(f"✗ Error optimizing {doing}: ")
        assert str(tmp_path / "no") in err


def captions(source, destination, **changed):
    text = dict.fromkeys(("metadata", "subfolder", "hf_token", "range", "shard_cache_dir", "push_to_hub"))
    rest = {"shard_cache_gb": 25.0, "parallel_downloads": 4, "path_in_repo": "", "revision": "main"}
    return Namespace(source=str(source), destination=str(destination), **text | rest | changed)


def test_captions_are_coalesced_and_uploaded(folder, tmp_path, capsys, monkeypatch):
    index_dataset(folder, captions=False, workers=0)
    uploads = []

    def upload(*args, **kwargs):
        uploads.append((args, kwargs))
        return "https://hub/commit/1"

    monkeypatch.setattr(module, "upload_caption_metadata", upload)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    out = str(tmp_path / "out")
    module.optimize_captions(captions(folder, out, range="1,9", push_to_hub="a/b", path_in_repo="p", revision="r"))
    assert capsys.readouterr().out.splitlines() == [
        f"Coalesced 2 captions across 2 shards into {out}",
        "Uploaded caption metadata: https://hub/commit/1",
    ]
    token = "hf_of_the_environment"
    assert uploads == [((out, "a/b"), {"path_in_repo": "p", "revision": "r", "hf_token": token})]
    assert json.loads((tmp_path / "out" / "s-2.json").read_text())["files"]["2x.gif"]["captions"] == "t"
    assert not (tmp_path / "out" / "s-0.json").exists()
    with pytest.raises(ValueError, match="3,1"):
        module.optimize_captions(captions(folder, out, range="3,1"))


def test_every_option_about_captions_arrives(monkeypatch):
    seen = []

    class Dataset:
        num_shards = 2

        def enable_shard_cache(self, *args, **kwargs):
            seen.append((args, kwargs))

    dataset = Dataset()
    monkeypatch.setattr(module, "discover_dataset", lambda *args, **kwargs: seen.append((args, kwargs)) or dataset)

    def make_loader(*args, **kwargs):
        seen.append((args, kwargs))
        done = {"coalesced_samples": 1, "shards": 2}
        return SimpleNamespace(coalesce_caption_metadata=lambda **kwargs: seen.append(kwargs) or done)

    monkeypatch.setattr(module, "TarDataLoader", make_loader)
    options = "--metadata m --subfolder f --hf-token t --shard-cache-dir c --shard-cache-gb 1.5 --parallel-downloads 7"
    module.main(["optimize-captions", "--source", "s", "--destination", "d", *options.split()])
    assert seen == [
        (("s",), {"hf_token": "t", "subfolder": "f", "metadata": "m"}),
        (("c",), {"cache_limit_gb": 1.5, "parallel_downloads": 7}),
        ((dataset,), {"load_file_data": False}),
        {"destination": "d", "shard_indices": None},
    ]


def test_loose_files_are_packed_and_a_second_run_goes_on(tmp_path, capsys):
    source, out = write_loose(tmp_path / "loose"), tmp_path / "out"
    line = ["optimize-dataset", "--source", str(source), "--destination", str(out), "--max-shard-size-gb", "0.000003"]
    module.main([*line, "--max-shards", "2"])
    assert capsys.readouterr().out == "Optimized 2/5 samples into 2 shards (created 2 this run; status=running)\n"
    module.main(line)
    assert capsys.readouterr().out.endswith("(created 3 this run; status=complete)\n")


def test_every_option_of_packing_arrives(monkeypatch, capsys):
    seen = []
    done = {
        "next_sample_index": 4, "total_samples": 0, "next_shard_index": 1, "shards_created": 1, "status": "complete"
    }  # fmt: skip
    monkeypatch.setattr(module, "optimize_dataset", lambda source, **kwargs: seen.append((source, kwargs)) or done)
    options = (
        "--push-to-hub a/b --subfolder f --output-prefix p --source-revision x --target-revision y --hf-token t "
        "--max-shard-size-gb 0.5 --payload-extensions jpg,.png --no-image-geometry --max-shards 3 --private"
    )
    module.main(["optimize-dataset", "--source", "s", *options.split()])
    module.main(["optimize-dataset", "--source", "s"])
    assert capsys.readouterr().out.startswith("Optimized 4/? samples into 1 shards (created 1 this run; status=com")
    given = {
        "destination": None, "push_to_hub": "a/b", "source_subfolder": "f", "output_prefix": "p",
        "source_revision": "x", "target_revision": "y", "hf_token": "t", "max_shard_size_bytes": 1 << 29,
        "payload_extensions": ["jpg", ".png"], "include_image_geometry": False, "max_shards": 3, "private": True,
    }  # fmt: skip
    plain = {
        "destination": None, "push_to_hub": None, "source_subfolder": "", "output_prefix": "webshart",
        "source_revision": "main", "target_revision": "main", "hf_token": None, "max_shard_size_bytes": 1 << 30,
        "payload_extensions": module.DEFAULT_PAYLOAD_EXTENSIONS, "include_image_geometry": True, "max_shards": None,
        "private": None,
    }  # fmt: skip
    assert seen == [("s", given), ("s", plain)]


def test_every_option_of_extraction_arrives_where_the_extractor_was_replaced(monkeypatch):
    seen = []

    class Extractor:
        def __init__(self, hf_token=None):
            seen.append(hf_token)

        def extract_metadata(self, **kwargs):
            seen.append(kwargs)

    monkeypatch.setattr(module, "MetadataExtractor", Extractor)
    options = "--checkpoint-dir c --max-workers 3 --hf-token t --range 0,5 --include-image-geometry"
    module.main(["extract-metadata", "--source", "s", "--destination", "d", *options.split()])
    module.main(["extract-metadata", "--source", "s", "--destination", "d"])
    where = {"source": "s", "destination": "d"}
    given = {"checkpoint_dir": "c", "max_workers": 3, "shard_range": (0, 5), "include_image_geometry": True}
    plain = {"checkpoint_dir": None, "max_workers": 4, "shard_range": None, "include_image_geometry": False}
    assert seen == ["t", where | given, None, where | plain]


def test_a_function_that_was_replaced_is_what_the_program_runs(monkeypatch):
    ran = []
    for name in ("extract_metadata", "optimize_captions", "run_optimize_dataset"):
        monkeypatch.setattr(module, name, lambda args: ran.append(args.command))
    commands = ["extract-metadata", "optimize-captions", "optimize-dataset"]
    for command in commands:
        module.main([command, "--source", "s", "--destination", "d"])
    assert ran == commands


@pytest.mark.parametrize(
    ("line", "code", "told"), [([], 1, "out"), (["extract-metadata"], 2, "err"), (["x"], 2, "err")]
)
def test_a_command_line_that_is_none_is_answered_with_help(line, code, told, capsys):
    with pytest.raises(SystemExit) as end:
        module.main(line)
    assert end.value.code == code
    assert "usage: " in getattr(capsys.readouterr(), told)


def test_an_interrupt_ends_the_program_with_a_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_optimize_dataset", interrupt)
    with pytest.raises(SystemExit) as end:
        module.main(["optimize-dataset", "--source", "s"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "✗ Cancelled by user\n")


def test_a_name_that_cannot_be_written_is_spelt_out(tmp_path, monkeypatch):
    folder = tmp_path / "bad\udcff"
    write_shard(folder / "s.tar", [("a.gif", IMAGE)])
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    module.extract_metadata(extraction(folder, tmp_path / "out"))
    shown.flush()
    assert shown.buffer.getvalue().decode("ascii").endswith("bad\\udcff\n")


def test_the_program_runs_in_a_process_of_its_own(folder, tmp_path):
    line = ["extract-metadata", "--source", str(folder), "--destination", str(tmp_path / "out")]
    program = [sys.executable, "-c", "from shardset.webshart import main; main()", *line]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"✓ Metadata extraction complete for {folder}\n"
    assert len(list((tmp_path / "out").iterdir())) == 3
