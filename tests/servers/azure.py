"""A real server of Azure blobs (Azurite, keys checked) on a free port of this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import tempfile
import uuid
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Final
from urllib.request import Request, urlopen

from servers.s3 import MODULES, run_node

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCOUNT: Final = "devstoreaccount1"
# Published by Microsoft for all emulators of the world.
KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class AzureServer:
    """A running server.

    Attributes:
        endpoint: Its address, with the account.
    """

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        """What obstore needs to know, without the container."""
        return {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": KEY}

    @property
    def connection_string(self) -> str:
        """The same, as Azure's own tools write it."""
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint};"

    def make_bucket(self, *, public: bool = False) -> str:
        """Make a new container, and return its name."""
        name = f"c-{uuid.uuid4().hex[:20]}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        if public:
            headers["x-ms-blob-public-access"] = "container"
        told = "".join(f"{header}:{headers[header]}\n" for header in sorted(headers))
        # Twelve empty lines stand for standard headers that are not sent (Azure, "Authorize with Shared Key").
        text = "PUT" + "\n" * 12 + f"{told}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        with urlopen(Request(f"{self.endpoint}/{name}?restype=container", headers=headers, method="PUT")):
            return name


@contextlib.contextmanager
def serve_azure() -> Iterator[AzureServer]:
    """Run a server while the block runs."""
    script = MODULES / "azurite" / "dist" / "src" / "blob" / "main.js"
    with tempfile.TemporaryDirectory(prefix="azure-") as folder:
        quiet = ("--silent", "--disableTelemetry", "--skipApiVersionCheck")
        command = [script, *quiet, "--location", folder, "--blobHost", "127.0.0.1", "--blobPort", "0"]
        with run_node(command, r"successfully listens on http://127\.0\.0\.1:([0-9]+)") as port:
            yield AzureServer(f"http://127.0.0.1:{port}/{ACCOUNT}")
