"""The commands on shards elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from cli.running import environment, program, run_process
from servers.faults import Fault
from servers.faulty import FaultServer
from servers.s3 import serve_s3
from shards import make_members, tar_bytes
from shardset.storage import CloudStore

pytestmark = pytest.mark.servers

SECRETS = "?token=SECRET-1&X-Amz-Signature=SECRET-2"


@pytest.fixture
def server():
    with FaultServer() as server:
        for shard in range(3):
            server.put(f"/d/{shard}.tar", tar_bytes(make_members(4, start=4 * shard)))
        yield server


def test_the_commands_take_addresses_of_web_servers(run, server):
    shards = run("ls", server.url + "d/")
    assert (shards.code, shards.err) == (0, "")
    assert [line[0] for line in shards.lines] == [f"{server.url}d/{n}.tar" for n in range(3)]
    samples = run("ls", server.url + "d/1.tar", "--json")
    assert [document["key"] for document in samples.documents] == [f"{n:08d}" for n in range(4, 8)]
    shown = run("show", f"{server.url}d/1.tar#00000005", "--json").document
    assert (shown["key"], shown["shard"]) == ("00000005", server.url + "d/1.tar")
    for name in ("00000005.jpg", "1.jpg"):
        done = run("cat", f"{server.url}d/1.tar#{name}")
        assert (done.code, done.out) == (0, dict(make_members(4, start=4))["00000005.jpg"])
    assert run("show", server.url + "d/1.tar", "--json").document["num_samples"] == 4
    assert run("stats", server.url + "d/{0..2}.tar", "--json").document["num_samples"] == 12
    assert run("stats", server.url + "d/[01].tar", "--json").document["num_samples"] == 8


def test_what_is_printed_of_a_shard_elsewhere_is_what_is_printed_of_the_file(run, server, tmp_path):
    (tmp_path / "1.tar").write_bytes(tar_bytes(make_members(4, start=4)))
    for command in ("ls", "show", "stats"):
        here = run(command, tmp_path / "1.tar", "--json").text.replace(f"{tmp_path}/", server.url + "d/")
        assert run(command, server.url + "d/1.tar", "--json").text == here


@pytest.mark.parametrize("source", ["none.tar", "none/", "d/7.tar", "d/{2..3}.tar", "d/*.none", "none.txt"])
@pytest.mark.parametrize("command", ["ls", "show", "stats", "index"])
def test_what_is_not_there_is_said_in_a_line_with_code_3(run, server, source, command):
    done = run(command, server.url + source, *(["--no-sidecars"] if command == "index" else []))
    assert (done.code, done.out) == (3, b"")
    assert "Traceback" not in done.err
    assert server.url in done.err
    assert len(done.err.strip().splitlines()) <= 3


@pytest.mark.parametrize(("status", "code"), [(403, 3), (401, 3), (410, 3), (418, 4), (501, 4)])
def test_a_refusal_has_the_code_of_its_kind(run, server, status, code):
    server.add(Fault.status(status))
    done = run("ls", server.url + "d/1.tar")
    assert (done.code, done.out) == (code, b"")
    assert str(status) in done.err
    assert "Traceback" not in done.err


def test_indexes_cannot_go_beside_shards_on_a_web_server(run, server, tmp_path):
    done = run("index", server.url + "d/")
    assert done.code == 3
    assert "--destination" in done.err
    assert not server.requests("GET", "*.tar")
    done = run("index", server.url + "d/", "--destination", tmp_path / "out", "--json")
    assert (done.code, done.document["sidecars_written"]) == (0, 3)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.json")) == ["0.json", "1.json", "2.json"]
    server.forget()
    done = run("index", server.url + "d/", "--destination", tmp_path / "out", "--json")
    assert (done.document["shards_reused"], done.document["num_samples"]) == (3, 12)
    assert not server.requests("GET", "*.tar")


@pytest.mark.parametrize(
    "args",
    [
        *(
            ("ls", ""),
            ("ls", "", "--json"),
            ("show", ""),
            ("show", "", "--json"),
            ("stats", ""),
            ("stats", "", "--json"),
        ),
        *(("show", "#00000001"), ("show", "#none"), ("cat", ""), ("cat", "#00000001"), ("cat", "#none.jpg")),
        *(("index", ""), ("index", "", "--no-sidecars", "--json"), ("ls", "", "-vv"), ("ls", "&x=#")),
    ],
)
@pytest.mark.parametrize("path", ["d/0.tar", "d/none.tar", "d/[0-1].tar", "d/"])
def test_nothing_that_is_printed_holds_what_lets_one_in(run, server, args, path):
    command, fragment, *options = args
    source = server.url.replace("://", "://user:SECRET-0@") + path + SECRETS
    done = run(command, source + fragment, *options)
    assert done.code in {0, 2, 3}
    assert "SECRET" not in done.text + done.err


def test_shards_in_a_bucket_are_reached_by_the_environment_of_its_tools(run, monkeypatch):
    with serve_s3() as server:
        bucket = server.make_bucket()
        store = CloudStore(options=server.options)
        for shard in range(2):
            store.write(f"s3://{bucket}/d/{shard}.tar", tar_bytes(make_members(4, start=4 * shard)))
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret_access_key"])
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        url = f"s3://{bucket}/d"
        assert [line[0] for line in run("ls", url).lines] == [f"{url}/0.tar", f"{url}/1.tar"]
        assert run("cat", f"{url}/1.tar#00000005.jpg").out == dict(make_members(4, start=4))["00000005.jpg"]
        assert run("stats", f"{url}/*.tar", "--json").document["num_samples"] == 8
        done = run("index", url, "--json")
        assert (done.code, done.document["sidecars_written"]) == (0, 2)
        assert json.loads(store.open(f"{url}/0.json").read(0, store.info(f"{url}/0.json").size))["files"]
        assert run("index", url, "--json").document["num_samples"] == 8
        done = run("ls", f"s3://{bucket}/none.tar")
        assert (done.code, "Traceback" in done.err) == (3, False)
        done = run("ls", "s3://no-such-bucket-here/x/")
        assert (done.code, "Traceback" in done.err) == (3, False)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
        done = run("ls", url)
        assert (done.code, "Traceback" in done.err) == (3, False)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1:9", "no-such-host.invalid"])
def test_a_host_that_is_not_there_is_said_within_fifteen_seconds(host):
    begin = time.monotonic()
    done = run_process("ls", f"http://{host}/d/")
    assert (done.code, done.out) == (4, b"")
    assert host.partition(":")[0] in done.err
    assert "Traceback" not in done.err
    assert time.monotonic() - begin < 15


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal")
@pytest.mark.parametrize("command", ["ls", "stats", "cat", "index -j0", "index -j2"])
@pytest.mark.parametrize("fault", ["head", "body"])
def test_ctrl_c_ends_a_stalled_download_at_once(server, command, fault):
    if fault == "head":
        server.add(Fault.quiet())
    else:
        server.add(Fault.quiet(after=100), method="GET", path="*.tar")
    name, *options = command.split()
    source = server.url + ("d/0.tar#00000000.jpg" if name == "cat" else "d/{0..2}.tar")
    options += ["--no-sidecars"] if name == "index" else []
    run = subprocess.Popen(
        program(name, source, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while not server.requests(None if fault == "head" else "GET"):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.3)
        begin = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        _, err = run.communicate(timeout=8)
        assert (run.returncode, time.monotonic() - begin < 4) == (130, True)
        assert b"Traceback" not in err
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
