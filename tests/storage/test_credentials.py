from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import stat
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from shardset.errors import AccessError, MissingExtraError
from shardset.storage import access, credentials
from shardset.storage.access import azure_access, gcs_access, s3_access
from shardset.storage.cloud import CloudStore
from shardset.storage.credentials import SharedCredential, private_folder

pytestmark = pytest.mark.servers

SECRET = "a-secret-of-the-tests"


class Metadata:
    """What hands out credentials on the machines of the three clouds, and counts who asks."""

    def __init__(self):
        self.asked = Counter()
        self.lifetime = timedelta(hours=6)
        self.status = 200
        self.latency = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                path, _, query = self.path.partition("?")
                outer.asked[path] += 1
                time.sleep(outer.latency)
                answer = outer.answer(self.command, path, query, self.headers, body) if outer.status == 200 else None
                content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(outer.status if outer.status != 200 else 404 if answer is None else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def do_PUT(self):
                self.do_GET()

            def do_POST(self):
                self.do_GET()

            def do_HEAD(self):
                self.do_GET()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.request_queue_size = 128
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, method, path, query, headers, body):
        expires = datetime.now(UTC) + self.lifetime
        keys = {"AccessKeyId": "key", "SecretAccessKey": SECRET, "Token": "token"}
        base = "/latest/meta-data/iam/security-credentials/"
        if path == "/latest/api/token" and method == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in headers:
            return "session"
        if path.startswith(base) and headers["X-aws-ec2-metadata-token"] == "session":
            if path == base:
                return "the-role"
            return {**keys, "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}
        if path == "/container" and headers["Authorization"] == "Bearer of-the-container":
            return {**keys, "Expiration": expires.isoformat()}
        if path == "/" and method == "POST" and parse_qs(body)["WebIdentityToken"] == ["of-the-cluster"]:
            found = {**keys, "SessionToken": "token", "Expiration": expires.timestamp()}
            return {"AssumeRoleWithWebIdentityResponse": {"AssumeRoleWithWebIdentityResult": {"Credentials": found}}}
        if path == "/computeMetadata/v1/instance/service-accounts/default/token" and headers["Metadata-Flavor"]:
            return {"access_token": SECRET, "expires_in": int(self.lifetime.total_seconds()), "token_type": "Bearer"}
        if path == "/msi" and headers["Metadata"] == "true" and "storage.azure.com" in query:
            return {"access_token": SECRET, "expires_on": str(int(expires.timestamp()))}
        return None


@pytest.fixture
def metadata():
    server = Metadata()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A user and a machine of whom nothing is known."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "IDENTITY_", "CLOUDSDK_", "GCE_", "XDG_", "SHARDSET_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    # Nothing that is forgotten here may ask a real server.
    monkeypatch.setattr(access, "_AWS_METADATA", "http://127.0.0.1:1")
    monkeypatch.setattr(access, "_AZURE_METADATA", "http://127.0.0.1:1/")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# S3


def test_keys_and_settings_of_a_profile_are_found(home, monkeypatch):
    write(home / ".aws/credentials", f"[default]\naws_access_key_id = d\naws_secret_access_key = {SECRET}%1#2;3\n")
    write(
        home / ".aws/config",
        "[default]\nregion = eu-west-1\n[profile other]\nregion=us-west-2\nendpoint_url = http://localhost:9\n"
        f"aws_access_key_id = o\naws_secret_access_key = {SECRET}\naws_session_token = t\n",
    )
    found = s3_access({})
    assert found.config == {"region": "eu-west-1", "access_key_id": "d", "secret_access_key": f"{SECRET}%1#2;3"}
    assert (found.provider, found.endpoint) == (None, None)
    other = {
        "region": "us-west-2",
        "endpoint": "http://localhost:9",
        "access_key_id": "o",
        "secret_access_key": SECRET,
        "session_token": "t",
    }
    assert s3_access({"profile": "other"}).config == other
    monkeypatch.setenv("AWS_PROFILE", "other")
    found = s3_access({})
    assert found.config == other
    assert found.endpoint == "http://localhost:9"
    assert s3_access({"aws_region": "x", "endpoint": "http://y"}).config == {
        **other,
        "region": "x",
        "endpoint": "http://y",
    }
    assert SECRET not in repr(found)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "none"))
    with pytest.raises(AccessError, match="no AWS profile 'other'"):
        s3_access({})


def test_keys_in_options_come_before_the_environment_and_these_before_files(home, monkeypatch):
    write(home / ".aws/credentials", "[default]\naws_access_key_id = d\naws_secret_access_key = d\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "e")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://localhost:7")
    found = s3_access({})
    assert found.config == {"region": "eu-north-1", "endpoint": "http://localhost:7"}  # obstore takes the keys itself
    assert found.provider is None
    assert s3_access({"access_key_id": "o", "secret_access_key": "o"}).config["access_key_id"] == "o"
    assert s3_access({"profile": "default"}).config["access_key_id"] == "d"


def test_nothing_is_looked_for_where_nothing_is_to_be_signed(monkeypatch):
    assert s3_access({"skip_signature": "true"}).provider is None
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert s3_access({}).provider is None
    assert gcs_access({"skip_signature": "true"}).provider is None
    assert azure_access({"skip_signature": "true", "account_name": "a"}, None).provider is None


def test_a_profile_that_needs_botocore_says_so(home, monkeypatch):
    write(home / ".aws/config", "[default]\nsso_session = s\n[profile run]\ncredential_process = none\n")
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    for options in ({}, {"profile": "run"}):
        with pytest.raises(MissingExtraError, match="pip install botocore"):
            s3_access(options)


def test_a_profile_with_a_program_is_signed_in_by_botocore(home):
    answer = json.dumps({"Version": 1, "AccessKeyId": "p", "SecretAccessKey": SECRET, "SessionToken": "t"})
    write(home / "program", f"#!/bin/sh\necho x >> {home}/runs\necho '{answer}'\n")
    (home / "program").chmod(0o755)
    write(home / ".aws/config", f"[profile run]\ncredential_process = {home}/program\n")
    found = s3_access({"profile": "run"}).provider()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("p", SECRET, "t")
    assert s3_access({"profile": "run"}).provider()["access_key_id"] == "p"
    assert (home / "runs").read_text() == "x\n"


def test_a_file_that_is_no_ini_file_is_named_and_not_quoted(home):
    write(home / ".aws/credentials", f"{SECRET}\n")
    with pytest.raises(AccessError, match="credentials cannot be understood") as caught:
        s3_access({})
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__


def test_the_instance_the_container_and_the_cluster_hand_out_keys(home, metadata, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url + "/")
    providers = {"instance": s3_access({}).provider}
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", metadata.url + "/container")
    token = write(home / "container-token", "Bearer of-the-container\n")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
    providers["container"] = s3_access({}).provider
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", write(home / "cluster-token", "of-the-cluster"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", metadata.url)
    providers["cluster"] = s3_access({}).provider
    for provider in providers.values():
        found = provider()
        left = found.pop("expires_at") - datetime.now(UTC)
        assert found == {"access_key_id": "key", "secret_access_key": SECRET, "token": "token"}
        assert timedelta(hours=5, minutes=59) < left <= timedelta(hours=6, seconds=2)
    assert metadata.asked == {
        "/latest/api/token": 1,
        "/latest/meta-data/iam/security-credentials/": 1,
        "/latest/meta-data/iam/security-credentials/the-role": 1,
        "/container": 1,
        "/": 1,
    }


# Google and Azure


def test_google_is_reached_by_file_or_metadata_server(home, metadata, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
    found = gcs_access({}).provider()
    assert found["token"] == SECRET
    assert timedelta(hours=5) < found["expires_at"] - datetime.now(UTC) <= timedelta(hours=6)
    path = write(home / ".config/gcloud/application_default_credentials.json", '{"type": "authorized_user"}')
    assert gcs_access({}).config == {"application_credentials": path}
    assert gcs_access({}).provider is None
    path = write(home / "key.json", '{"type": "service_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    assert gcs_access({}).config == {"application_credentials": path}
    write(home / "key.json", '{"type": "external_account"}')
    monkeypatch.setitem(__import__("sys").modules, "google.auth", None)
    with pytest.raises(MissingExtraError, match="pip install google-auth"):
        gcs_access({})
    write(home / "key.json", SECRET)
    with pytest.raises(AccessError, match="no file of Google credentials") as caught:
        gcs_access({})
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{}")
    assert gcs_access({}).config == {}


def test_azure_is_reached_by_key_connection_string_or_identity(metadata, monkeypatch):
    text = f"DefaultEndpointsProtocol=https;AccountName=acc;AccountKey={SECRET}==;EndpointSuffix=core.windows.net"
    expected = {"account_name": "acc", "account_key": SECRET + "==", "endpoint": "https://acc.blob.core.windows.net"}
    assert azure_access({"connection_string": text}, None).config == expected
    signed = f"BlobEndpoint=https://acc.blob.core.windows.net/;SharedAccessSignature=sv=1&sig={SECRET}="
    assert azure_access({"azure_storage_connection_string": signed}, None).config == {
        "account_name": "acc",
        "sas_key": f"sv=1&sig={SECRET}=",
        "endpoint": "https://acc.blob.core.windows.net",
    }
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert azure_access({}, None).config == expected
    other = azure_access({"account_key": "k"}, "other")
    assert other.config == {"account_name": "other", "account_key": "k"}
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "cli")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "k")
    assert azure_access({}, None).config == {"account_name": "cli", "account_key": "k"}
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", metadata.url + "/msi")
    found = azure_access({}, None).provider()
    assert found["token"] == SECRET
    assert timedelta(hours=5) < found["expires_at"] - datetime.now(UTC) <= timedelta(hours=6)


def test_where_there_is_nothing_the_error_says_what_was_looked_for_and_what_to_do(monkeypatch):
    started = time.monotonic()
    for store, url, word in (
        (CloudStore(), "s3://b/k", "AWS"),
        (CloudStore(), "gs://b/k", "Google"),
        (CloudStore(options={"account_name": "a"}), "az://b/k", "Azure"),
    ):
        with pytest.raises(AccessError, match=f"no {word} credentials were found") as caught:
            store.info(url)
        assert caught.value.url == url
        assert "SKIP_SIGNATURE=true" in caught.value.hint
    assert time.monotonic() - started < 20
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessError, match="no AWS credentials"):
        CloudStore().info("s3://b/k")


# Once a node


def _ask_in_child(url, start, answers):
    os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = url
    provider = s3_access({}).provider
    start.wait()
    answers.put((provider()["secret_access_key"], provider()["token"]))


def test_eight_processes_cause_one_fetch(metadata, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    metadata.latency = 0.05
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(8), context.Queue()
    children = [context.Process(target=_ask_in_child, args=(metadata.url, start, answers)) for _ in range(8)]
    for child in children:
        child.start()
    assert [answers.get(timeout=30) for _ in children] == [(SECRET, "token")] * 8
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert set(metadata.asked.values()) == {1}


def test_sixteen_threads_cause_one_fetch(metadata, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    provider = s3_access({}).provider
    threads = [threading.Thread(target=provider) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(metadata.asked.values()) == {1}


def test_the_shared_file_is_private(home, metadata, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    s3_access({}).provider()
    folder = private_folder()
    assert folder == home / "cache" / "credentials"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (kept,) = folder.glob("*.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert SECRET.encode() in kept.read_bytes()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert private_folder() == home / "shardset" / "credentials"


def test_a_folder_that_others_may_look_into_keeps_nothing(metadata, monkeypatch, caplog):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    folder = private_folder()
    folder.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert s3_access({}).provider()["token"] == "token"
    assert list(folder.iterdir()) == []
    assert "others may look into" in caplog.text


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(home, metadata, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    monkeypatch.setenv("SHARDSET_CACHE", write(home / "file", ""))
    assert s3_access({}).provider()["token"] == "token"


def test_what_is_about_to_expire_is_fetched_anew_but_not_at_each_call(monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(credentials.time, "time", lambda: now[0])
    fetched = []

    def fetch():
        fetched.append(now[0])
        return {"token": f"{len(fetched)}"}, ends[0]

    ends = [now[0] + 3600]
    asked = [SharedCredential("test", fetch), SharedCredential("test", fetch)]
    for seconds, count in ((0, 1), (3000, 1), (3239, 1), (3241, 2), (3250, 2), (3302, 3)):
        now[0] = 1_000_000.0 + seconds  # the server has no newer one yet
        assert {provider()["token"] for provider in asked} == {f"{count}"}
    ends = [now[0] + 3600]
    now[0] += 61
    assert {provider()["token"] for provider in asked} == {"4"}
    now[0] += 3000
    assert {provider()["token"] for provider in asked} == {"4"}
    assert len(fetched) == 4


def test_different_sources_share_nothing(metadata, monkeypatch):
    one = SharedCredential("one", lambda: ({"token": "1"}, None))
    other = SharedCredential("other", lambda: ({"token": "2"}, None))
    assert [one()["token"], other()["token"]] == ["1", "2"]
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
    assert gcs_access({}).provider()["token"] == SECRET


def test_a_damaged_file_is_fetched_over():
    provider = SharedCredential("one", lambda: ({"token": "1"}, time.time() + 3600))
    provider()
    (path,) = private_folder().glob("*.json")
    for damaged in (b"", b"{", b"[]", b'{"credential": 1}'):
        path.write_bytes(damaged)
        assert SharedCredential("one", lambda: ({"token": "2"}, time.time() + 3600))()["token"] == "2"


def test_a_server_that_fails_is_asked_again_and_then_said_to_fail(metadata, monkeypatch):
    monkeypatch.setattr(credentials.time, "sleep", lambda _: None)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", metadata.url + "/msi")
    metadata.status = 503
    provider = azure_access({"account_name": "a"}, None).provider
    with pytest.raises(AccessError, match="no Azure credentials"):
        provider()
    assert metadata.asked["/msi"] == 3
    metadata.status = 404
    with pytest.raises(AccessError, match="no Azure credentials"):
        provider()
    assert metadata.asked["/msi"] == 4
    metadata.status = 200
    assert provider()["token"] == SECRET
    assert provider.error is None


def test_a_credential_stands_in_no_repr_pickle_or_log(metadata, monkeypatch, caplog):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    with caplog.at_level(logging.DEBUG):
        found = s3_access({})
        found.provider()
    store = CloudStore()
    store._find("s3://b/k")[0]._access.provider()
    for shown in (repr(found), repr(found.provider), repr(store), caplog.text):
        assert SECRET not in shown
    assert SECRET.encode() not in pickle.dumps(store)


def test_obstore_signs_with_what_the_metadata_server_hands_out(metadata, monkeypatch):
    seen = []
    real = metadata.answer

    def answer(method, path, query, headers, body):
        if path.startswith("/bucket"):
            seen.append((headers["Authorization"].partition("/")[0], headers["x-amz-security-token"]))
            return None
        return real(method, path, query, headers, body)

    metadata.answer = answer
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    store = CloudStore(options={"endpoint": metadata.url})
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            store.info("s3://bucket/k")
    assert seen == [("AWS4-HMAC-SHA256 Credential=key", "token")] * 3
    assert metadata.asked["/latest/api/token"] == 1
    assert urlsplit(metadata.url).port
