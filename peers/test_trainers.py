"""The programs of docs/training.md, run as they stand there: killed, gone on with, and by two processes at once.

Run by ``make test-torch``. One line is put into each: it says which samples a step is made of.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

import shardset
from sessions import tells_of_interrupt
from shardset.loading.loader import Loader
from shardset.writing.tar_writer import TarWriter

SAID = """
import os, time

left = int(os.environ.get("STOP_AFTER", -1))


def step(line):
    global left
    os.write(1, line)  # at one go: two processes may write to one file
    left -= 1
    while not left:  # to be killed here
        time.sleep(1)
"""
PAGE = Path(__file__).parent.parent / "docs" / "training.md"
SHARDS, SAMPLES = 3, 17
BATCH = 4
STEPS = SHARDS * SAMPLES // BATCH
RESUMED = ("plain", "dataloader", "stateful", "lightning", "accelerate")

pytestmark = pytest.mark.slow


def program(name):
    """Return a program of the page, with a line that prints each step's samples."""
    found = re.search(
        rf"<!-- run by peers/test_trainers.py: {name} -->\n```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found, name
    line = """f"STEP {batch['__epoch__']} {batch['__position__']} {batch['__index__'].tolist()}\\\\n".encode()"""
    step = f"__import__('said').step({line})"
    loop = re.compile(r"^( *)(for (?:step, )?batch in .*|def training_step\(self, batch\)):$", re.MULTILINE)
    text, count = loop.subn(rf"\g<0>\n\1    {step}", found[1])
    assert count == (0 if name == "samplers" else 1), name
    return text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDSET_CACHE", str(tmp_path / "cache"))
    for number in range(SHARDS):
        path = tmp_path / "shards" / f"s-{number}.tar"
        path.parent.mkdir(exist_ok=True)
        with TarWriter(path) as writer:
            for sample in range(number * SAMPLES, (number + 1) * SAMPLES):
                buffer = io.BytesIO()
                Image.new("RGB", (40, 36), (5 * sample, 3 * sample, 200)).save(buffer, "JPEG")
                writer.write({"__key__": f"{sample:03d}", "jpg": buffer.getvalue(), "cls": sample % 10})
    return tmp_path


def run(folder, text, *, world=1, stop_after=None):
    """Run a program by as many processes, and kill them all after some steps; return the steps of each."""
    path = folder / "program.py"
    path.write_text(text)
    (folder / "said.py").write_text(SAID)
    port = free_port()
    log = folder / f"log-{time.monotonic_ns()}"
    log.mkdir()
    processes = []
    for rank in range(world):
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
        if stop_after is not None:
            environment["STOP_AFTER"] = str(stop_after)
        if world > 1:
            told = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
            }
            environment |= {name: str(value) for name, value in told.items()}
        with (log / f"{rank}.out").open("wb") as out, (log / f"{rank}.err").open("wb") as errors:
            command = [sys.executable, path]
            started = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=errors, start_new_session=True
            )
            processes.append(started)

    def steps(rank):
        text = (log / f"{rank}.out").read_text()
        lines = [line.split(" ", 3) for line in text.splitlines(keepends=True) if line.startswith("STEP ")]
        return [(int(line[1]), int(line[2]), json.loads(line[3])) for line in lines if line[-1].endswith("\n")]

    def has_ended():
        return all(process.poll() is not None for process in processes)

    def has_stopped():
        return stop_after is not None and all(len(steps(rank)) >= stop_after for rank in range(world))

    wait_until(lambda: has_ended() or has_stopped(), 240)
    codes = [process.poll() for process in processes]
    said = "".join((log / f"{rank}.err").read_text() for rank in range(world))
    if stop_after is None:
        assert codes == [0] * world, said
    else:
        assert codes == [None] * world, said
        for process in processes:
            process.kill()
            process.wait()
    for process in processes:
        wait_until(lambda process=process: not is_running(process.pid), 60)
    return [steps(rank) for rank in range(world)]


def free_port():
    """Return a port for processes to meet at, of those that no system gives to whoever asks for any.

    It is seconds until they listen there, and one of the others may be anybody's by then.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def is_running(session):
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def steps_of(folder, epochs, world=1):
    """The steps of all ranks together, as the loader has them by itself."""
    dataset = shardset.discover_dataset(folder / "shards")
    loaders = [Loader(dataset, BATCH, shuffle=True, seed=1, rank=rank, world_size=world) for rank in range(world)]
    ranks = []
    for loader in loaders:
        batches = [batch for _ in range(epochs) for batch in loader]
        ranks.append([(batch["__epoch__"], batch["__position__"], batch["__index__"].tolist()) for batch in batches])
    return join(ranks)


def join(ranks):
    """Join the steps of ranks, which must be even."""
    assert len({len(steps) for steps in ranks}) == 1
    joined = []
    for shares in zip(*ranks, strict=True):
        assert len({share[:2] for share in shares}) == 1
        joined.append((*shares[0][:2], sorted(index for share in shares for index in share[2])))
    return joined


@pytest.mark.parametrize("name", RESUMED)
def test_a_program_of_the_page_that_is_killed_goes_on_with_the_same_stream(folder, name):
    want = steps_of(folder, 2)
    text = program(name)
    assert join(run(folder, text, stop_after=8)) == want[:8]  # killed when it was about to take the eighth step
    saved = 6 if name in {"lightning", "accelerate"} else 7  # each third step, or each
    assert join(run(folder, text)) == want[saved:]
    assert len(want) == 2 * STEPS


@pytest.mark.parametrize("name", ["plain", "accelerate"])
def test_two_processes_share_the_stream_once_and_one_goes_on_with_it(folder, name):
    text = program(name)
    want = steps_of(folder, 2, world=2)
    assert len(want) == 2 * (SHARDS * SAMPLES // (2 * BATCH))
    assert join(run(folder, text, world=2)) == want
    for state in ("state.json", "checkpoint"):
        path = folder / state
        if path.exists():
            path.rename(path.with_name("old"))
    ranks = run(folder, text, world=2, stop_after=5)
    assert [len(given) for given in ranks] == [5, 5]
    saved = want[2 if name == "accelerate" else 3]
    assert join(run(folder, text)) == [step for step in steps_of(folder, 2) if step[:2] > saved[:2]]


def in_pairs(steps):
    """Join the steps of two processes that write to one stream, in any order."""
    found = {}
    for epoch, position, numbers in steps:
        found.setdefault((epoch, position), []).append(numbers)
    assert {len(shares) for shares in found.values()} == {2}
    return [(*place, sorted(index for share in shares for index in share)) for place, shares in sorted(found.items())]


def on_two(text):
    return text.replace('accelerator="cpu",', 'accelerator="cpu", devices=2, strategy="ddp",')


def test_lightning_with_two_processes_shares_the_stream_once_and_goes_on_alone_at_the_end_of_an_epoch(folder):
    text = program("lightning").replace("every_n_train_steps=3", "every_n_epochs=1, save_on_train_epoch_end=True")
    (steps,) = run(folder, on_two(text))
    assert in_pairs(steps) == steps_of(folder, 2, world=2)
    (again,) = run(folder, text.replace("max_epochs=2", "max_epochs=3"))
    assert join([again]) == [step for step in steps_of(folder, 3) if step[0] == 2]
    (steps,) = run(folder, on_two(text.replace("max_epochs=2", "max_epochs=4")))
    assert in_pairs(steps) == [step for step in steps_of(folder, 4, world=2) if step[0] == 3]


def test_samplers_of_ones_own_work_as_the_page_says(folder):
    path = folder / "program.py"
    path.write_text(program("samplers"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("(8, 32, 32, 3) [") for line in lines)


def test_accelerate_that_goes_back_to_the_first_epoch_is_an_error(folder):
    text = program("accelerate")
    run(folder, text, stop_after=STEPS + 7)  # in the second epoch
    line = "    dataloader.set_epoch(dataset.epoch)"
    assert line in text
    (folder / "program.py").write_text("\n".join(each for each in text.splitlines() if not each.startswith(line)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "a state of epoch 1 was loaded, and set_epoch(0) would drop it" in done.stderr


def test_an_interrupted_program_says_no_more_than_that(folder):
    path = folder / "program.py"
    text = program("plain")
    epochs = "for epoch in range(loader.epoch, 2):"
    assert epochs in text
    path.write_text(text.replace(epochs, "while True:"))  # or it may be through before the interrupt comes
    (folder / "said.py").write_text(SAID)
    process = subprocess.Popen(
        [sys.executable, path],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline().startswith("STEP 0 4 ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert tells_of_interrupt(errors), errors


def test_the_demo_goes_on_with_the_same_samples_after_it_was_killed(tmp_path):
    program = PAGE.parent.parent / "examples" / "train.py"
    done = subprocess.run(
        [sys.executable, program, "--out", tmp_path / "out"], capture_output=True, text=True, check=True, timeout=240
    )
    assert "killed with SIGKILL after step" in done.stdout
    assert "They are the same." in done.stdout
    assert done.stdout.count("60 steps, 1,920 samples, sha256") == 2
    assert not done.stderr
