"""A real S3 server (s3rver, which looks at keys and not at signatures) on a free port of this machine."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODULES: Final = Path(__file__).parent / "node_modules"
# Ends a server when its standard input does: when the block is left, and also when the tests are killed.
_GUARD: Final = '"$@" & read -r _; kill -TERM $!; wait $!'


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint: Its address; buckets are the first part of the path.
        folder: Where it keeps its buckets.
    """

    endpoint: str
    folder: Path

    @property
    def options(self) -> dict[str, str]:
        """What obstore needs to know, without the bucket."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": "S3RVER",
            "secret_access_key": "S3RVER",
            "region": "us-east-1",
        }

    def make_bucket(self) -> str:
        """Make a new bucket, and return its name."""
        name = f"b-{uuid.uuid4().hex[:20]}"
        (self.folder / name).mkdir()  # which is all that a bucket is to s3rver
        return name


@contextlib.contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Run a server while the block runs."""
    script = Path(__file__).with_suffix(".cjs")
    with (
        tempfile.TemporaryDirectory(prefix="s3-") as folder,
        run_node([script, folder], r"listening on ([0-9]+)") as port,
    ):
        yield S3Server(f"http://127.0.0.1:{port}", Path(folder))


@contextlib.contextmanager
def run_node(command: Sequence[str | Path], listening: str) -> Iterator[int]:
    """Run a server on node while the block runs, and give the port that it says it listens on.

    Args:
        command: The script and its arguments.
        listening: A pattern for what it prints then, with the port in its first group.

    Raises:
        RuntimeError: It did not start.
    """
    node = shutil.which("node")
    if node is None or not MODULES.exists():
        raise RuntimeError("the servers for tests are not installed: run `make programs`")
    with tempfile.NamedTemporaryFile(prefix="node-") as log:
        server = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", node, *command], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            yield _wait_for_port(server, Path(log.name), listening)
        finally:
            server.stdin.close()
            server.wait()


def _wait_for_port(server: subprocess.Popen[bytes], log: Path, listening: str) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        said = log.read_text("utf-8", "replace")
        match = re.search(listening, said)
        if match is not None:
            return int(match[1])
        if server.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"a server for tests did not start: {log.read_text('utf-8', 'replace')}")
