"""HttpStore over a real nginx, plain and with TLS. Faulty servers are in test_http_faults.py."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import pytest

from servers.nginx import serve_nginx
from shardset.errors import AccessError, ChangedError
from shardset.storage import HttpStore, url_join
from storage.store_suite import ODD_NAMES, PAYLOAD, ForkSuite, ReadSuite

_numbers = count()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def nginx(root):
    with serve_nginx(root) as server:
        yield server


@pytest.fixture
def folder(root):
    folder = root / f"t{next(_numbers)}"
    folder.mkdir()
    return folder


@pytest.fixture
def base(nginx, folder):
    return nginx.url + folder.name


@pytest.fixture
def store():
    return HttpStore()


class _Served:
    @pytest.fixture
    def put(self, folder, base):
        def put(name, data):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            return url_join(base, name)

        return put


class TestReading(_Served, ReadSuite):
    def test_odd_names_are_taken_as_they_are(self, store, base, put):
        names = [name for name in ODD_NAMES if not name.startswith(".")]  # which nginx leaves out of its pages
        urls = [put(name, name.encode()) for name in names]
        assert {info.url for info in store.list(base)} == set(urls)
        for url, name in zip(urls, names, strict=True):
            assert store.read(url, 0, store.info(url).size) == name.encode()
        hidden = put(".hidden", b"hidden")
        assert store.read(hidden, 0, 6) == b"hidden"


class TestForking(_Served, ForkSuite):
    pass


class TestForkingWithTls(_Served, ForkSuite):
    @pytest.fixture
    def base(self, secure_nginx, folder, monkeypatch):
        monkeypatch.setenv("SSL_CERT_FILE", str(secure_nginx.ca_file))
        return secure_nginx.url + folder.name

    def test_a_child_that_ends_leaves_its_parents_connection_alone(self, secure_nginx, url):
        secure_nginx.forget()
        _run(_FORKING, url)
        assert len({request.connection for request in secure_nginx.requests()}) == 1


_FORKING = """
import os, sys
from shardset.storage import HttpStore
store = HttpStore()
store.read(sys.argv[1], 0, 10)
if os.fork() == 0:
    sys.exit()  # the interpreter is taken down in order, with everything that it holds
os.wait()
store.read(sys.argv[1], 5, 10)
"""


def _run(program, *arguments):
    return subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="module")
def secure_nginx(root):
    with serve_nginx(root, tls=True) as server:
        yield server


def test_a_certificate_that_nobody_knows_is_refused(secure_nginx, folder):
    (folder / "a.tar").write_bytes(b"123")
    program = "import sys; from shardset.storage import HttpStore; HttpStore().info(sys.argv[1])"
    with pytest.raises(subprocess.CalledProcessError) as caught:  # in a process that has no connection yet
        _run(program, f"{secure_nginx.url}{folder.name}/a.tar")
    assert b"TransferError: SSL certificate" in caught.value.stderr


def test_nothing_is_written_to_a_web_server(store, base):
    with pytest.raises(AccessError, match="read only"):
        store.write(url_join(base, "a"), b"1")


class TestChanges(_Served):
    def test_an_object_that_changes_while_it_is_read_is_noticed(self, store, put):
        url = put("a.tar", PAYLOAD)
        reader = store.open(url)
        assert reader.read(0, 5) == PAYLOAD[:5]
        put("a.tar", PAYLOAD[::-1] + b"1")
        for read in (
            lambda: reader.read(0, 5),
            lambda: reader.read_many([0, 200_000], [9, 9]),
            lambda: list(reader.iter_pieces()),
        ):
            with pytest.raises(ChangedError, match="changed") as caught:
                read()
            assert caught.value.url == url
        assert store.read(url, 0, 5) == PAYLOAD[:-6:-1]  # what was seen to be gone is asked about anew

    def test_what_is_known_already_is_not_asked_for(self, nginx, store, put):
        url = put("a.tar", PAYLOAD)
        info = store.info(url)
        nginx.forget()
        assert HttpStore().open(url, info).read(7, 9) == PAYLOAD[7:16]
        assert [request.method for request in nginx.requests()] == ["GET"]

    def test_near_ranges_are_one_request_and_far_ones_are_as_many(self, nginx, store, put):
        url = put("a.tar", bytes(3_000_000))
        reader = store.open(url)
        nginx.forget()
        reader.read_many([0, 1000, 50_000, 2_000_000, 2_100_000], [10, 10, 1000, 10, 10])
        assert sorted(request.range for request in nginx.requests()) == ["bytes=0-50999", "bytes=2000000-2100009"]

    def test_a_redirect_is_followed_once_and_remembered(self, nginx, store, folder, put):
        put("a.tar", PAYLOAD)
        url = f"{nginx.url}redirect/{folder.name}/a.tar"
        reader = store.open(url)
        nginx.forget()
        assert reader.read_many(range(0, 290_000, 20_000), [5] * 15)
        assert not [request for request in nginx.requests() if "redirect" in request.uri]

    def test_a_hundred_reads_use_one_connection(self, nginx, store, put):
        reader = store.open(put("a.tar", PAYLOAD))
        nginx.forget()
        for offset in range(100):
            reader.read(offset, 10)
        assert len({request.connection for request in nginx.requests()}) == 1
