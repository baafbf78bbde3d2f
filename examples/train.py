"""A small network learns to tell ten photographs apart, is killed on the way, and goes on in two processes.

Run by ``make demo-train``. Crops of the photographs become labelled samples in tar shards. A training in one process
is killed in mid-epoch (SIGKILL, from outside), and goes on from its last checkpoint in two processes, which torch
connects. Another one is never interrupted. Each step of both is compared: the samples, and the pixels that the random
crop left.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import shardset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
SHARDS = 6
CROPS = 48
"""Samples that are made of each photograph."""
SIZE = 40
"""Height and width of the images that the network sees, in pixels."""
GLOBAL_BATCH = 32
EPOCHS = 4
CHECKPOINT_EVERY = 5


# ---- the data


def make_shards(folder: Path) -> int:
    """Cut the photographs into labelled samples, a place and a size at random each, and return how many there are."""
    from PIL import Image

    chance = random.Random(1)  # noqa: S311 - no secret
    samples: list[dict[str, Any]] = []
    photographs = sorted(path for path in DATA.glob("0*") if path.suffix in {".jpg", ".webp", ".png"})
    for label, path in enumerate(photographs):
        image = Image.open(path).convert("RGB")
        for number in range(CROPS):
            side = round(min(image.size) * chance.uniform(0.4, 0.9))
            left, top = chance.randint(0, image.width - side), chance.randint(0, image.height - side)
            buffer = io.BytesIO()
            image.crop((left, top, left + side, top + side)).resize((96, 96)).save(buffer, "JPEG", quality=88)
            key = f"{path.stem}-{number:02d}"
            samples.append({"__key__": key, "jpg": buffer.getvalue(), "cls": label, "txt": path.stem[5:]})
    # One photograph after the other, as collected data often lie: the loader has to mix them.
    for number in range(SHARDS):
        start, stop = (part * len(samples) // SHARDS for part in (number, number + 1))
        with shardset.TarWriter(folder / f"crops-{number:05d}.tar") as writer:
            for sample in samples[start:stop]:
                writer.write(sample)
    return len(samples)


# ---- the training, in each of its processes


class Told(NamedTuple):
    """What a process of a training is told."""

    shards: str
    out: str
    meeting: str
    rank: int
    world_size: int


def train(told: Told) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", init_method=told.meeting, rank=told.rank, world_size=told.world_size)
    loader = shardset.Loader(  # it finds its rank by itself
        shardset.discover_dataset(told.shards),
        GLOBAL_BATCH // told.world_size,
        shuffle=True,
        seed=7,
        fields={"image": "jpg", "label": "cls"},
        decode=shardset.Decode(size=SIZE, crop="random"),
    ).torch()
    network = make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    checkpoint = Path(told.out, "checkpoint.pt")
    if checkpoint.exists():
        found = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(found["network"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])
    model = torch.nn.parallel.DistributedDataParallel(network)

    with Path(told.out, f"rank-{told.rank}-of-{told.world_size}.jsonl").open("a") as log:
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                step = take_step(model, optimizer, batch)
                step["number"] = batch["__epoch__"] * len(loader) + batch["__position__"] // GLOBAL_BATCH
                print(json.dumps(step), file=log, flush=True)
                if step["number"] % CHECKPOINT_EVERY == 0 and told.rank == 0:
                    parts = {"network": network, "optimizer": optimizer, "loader": loader}
                    new = checkpoint.with_suffix(".new")
                    torch.save({name: part.state_dict() for name, part in parts.items()}, new)
                    new.replace(checkpoint)
    if told.rank == 0:
        Path(told.out, "metrics").write_text(str(loader.metrics))
    torch.distributed.destroy_process_group()


def make_network() -> torch.nn.Module:
    """Return a network of three convolutions."""
    from torch import nn

    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> dict[str, Any]:
    """Train on a batch; return its samples, with digests of their pixels, and the loss and accuracy of all ranks."""
    import torch

    images, labels = batch["image"], batch["label"]
    scores = model(images.permute(0, 3, 1, 2).float() / 127.5 - 1)
    loss = torch.nn.functional.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sums = torch.stack([loss.detach(), (scores.argmax(1) == labels).float().mean()])
    torch.distributed.all_reduce(sums)
    loss_here, accuracy = (sums / torch.distributed.get_world_size()).tolist()
    digests = [hashlib.sha256(image.numpy()).hexdigest()[:16] for image in images]
    samples = [f"{key} {digest}" for key, digest in zip(batch["__key__"], digests, strict=True)]
    return {"samples": samples, "loss": loss_here, "accuracy": accuracy}


# ---- the trainings


class Step(NamedTuple):
    """One step of all ranks.

    Attributes:
        samples: Keys and digests of pixels, sorted.
        loss: Mean over all ranks.
        accuracy: The same.
    """

    samples: tuple[str, ...]
    loss: float
    accuracy: float


class Training:
    """The processes of a training, and what they have written so far; none outlives the block that it stands for."""

    def __init__(self, shards: Path, out: Path, world_size: int) -> None:
        self.out, self.world_size = out, world_size
        meeting = out / f"meeting-of-{world_size}"
        self.processes = []
        for rank in range(world_size):
            told = Told(str(shards), str(out), meeting.as_uri(), rank, world_size)
            command = [sys.executable, "-W", "ignore", __file__, "--told", json.dumps(told)]
            self.processes.append(subprocess.Popen(command))  # noqa: S603 - this program

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return what a rank has written of its steps."""
        path = self.out / f"rank-{rank}-of-{self.world_size}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def watch(self, until: int | None = None) -> None:
        """Wait for the end, or for a step, and print some of the steps on the way.

        Raises:
            SystemExit: A process failed.
        """
        printed = 0
        while True:
            ended = all(process.poll() is not None for process in self.processes)
            lines = self.lines()
            for line in lines[printed:]:
                if line["number"] % 10 == 0:
                    print(f"     step {line['number']:>3}   loss {line['loss']:.3f}   right {line['accuracy']:4.0%}")
            printed = len(lines)
            if until is not None and lines and lines[-1]["number"] >= until:
                return
            if ended or any(process.poll() for process in self.processes):
                codes = [process.wait() for process in self.processes]
                if any(codes):
                    sys.exit(f"a training failed: its processes ended with {codes}")
                return
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what runs, in the middle of whatever it is at."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)  # nothing, to one that has ended
        for process in self.processes:
            process.wait()

    def steps(self) -> dict[int, Step]:
        """Return the steps by number, from 1, all ranks together."""
        found: dict[int, Step] = {}
        for shares in zip(*(self.lines(rank) for rank in range(self.world_size)), strict=True):
            samples = tuple(sorted(sample for share in shares for sample in share["samples"]))
            found[shares[0]["number"]] = Step(samples, shares[0]["loss"], shares[0]["accuracy"])
        return found


def load_loader_state(out: Path) -> dict[str, Any]:
    """Return the loader's state in a checkpoint."""
    import torch

    state: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)["loader"]
    return state


def digest(steps: dict[int, Step]) -> str:
    """Return what tells these steps, in this order, with these pixels, from any others."""
    lines = [f"{number} {' '.join(steps[number].samples)}" for number in sorted(steps)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plot(losses: list[float], marked: int) -> Iterator[str]:
    """Yield the lines of a plot of the loss over the steps, with a mark where one process became two."""
    rows, top = 10, max(losses)
    for row in range(rows):
        cells = []
        for number, loss in enumerate(losses, 1):
            level = loss / top * rows - (rows - 1 - row)  # how much of this cell is below the curve
            cells.append(" " if level <= 0 else "▁▂▃▄▅▆▇█"[min(7, int(level * 8))])
            if number == marked:
                cells.append("┊")
        scale = top * (rows - row) / rows
        yield f"  {scale:5.2f} │{''.join(cells)}".rstrip()
    yield "        └" + "─" * (len(losses) + 1)
    yield "         " + " " * marked + f"└ after step {marked}: two processes"


def run(out: Path) -> None:
    """Do all of it, and say so.

    Raises:
        SystemExit: The two streams of samples differ.
    """
    began = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    shards = out / "shards"
    shards.mkdir(parents=True)
    count = make_shards(shards)
    size = sum(path.stat().st_size for path in shards.iterdir())
    shardset.index_dataset(shards)
    steps = count // GLOBAL_BATCH
    print(f"Made {SHARDS} shards of {count} labelled crops of ten photographs, {size / 1e6:.1f} MB, in {shown(shards)}")

    interrupted, whole = out / "interrupted", out / "whole"
    interrupted.mkdir()
    whole.mkdir()
    kill_at = random.randint(steps + 3, 2 * steps)  # noqa: S311 - no secret
    print(f"\n  1  One process, {GLOBAL_BATCH} samples a step, {EPOCHS} epochs of {steps} steps")
    with Training(shards, interrupted, 1) as first:
        first.watch(until=kill_at)
    state = load_loader_state(interrupted)
    marked = state["epoch"] * steps + state["position"] // GLOBAL_BATCH
    done = max(first.steps())
    print(f"     killed with SIGKILL after step {done}; the last checkpoint is of step {marked}, with this state:")
    print(f"     {json.dumps(state)}")

    print(f"\n  2  On from there in two processes, {GLOBAL_BATCH // 2} samples of each step for either")
    with Training(shards, interrupted, 2) as second:
        second.watch()
    print("\n  3  The same training in one process, never interrupted")
    with Training(shards, whole, 1) as third:
        third.watch()

    kept = {number: step for number, step in first.steps().items() if number <= marked}
    resumed, uninterrupted = {**kept, **second.steps()}, third.steps()
    print("\nThe samples of each step, in order, down to the pixels of their random crops:")
    for name, found in (("killed and gone on", resumed), ("never interrupted", uninterrupted)):
        given = sum(len(step.samples) for step in found.values())
        print(f"  {name:<18}  {len(found)} steps, {given:,} samples, sha256 {digest(found)[:32]}")
    if digest(resumed) != digest(uninterrupted):
        sys.exit("they are not the same")
    apart = max(abs(step.loss - uninterrupted[number].loss) for number, step in resumed.items())
    print(f"  They are the same. The losses are at most {apart:.1e} apart: two processes add up in another order.")

    print("\nLoss, of the training that was killed:")
    print(*plot([resumed[number].loss for number in sorted(resumed)], marked), sep="\n")
    last = [step.accuracy for number, step in resumed.items() if number > (EPOCHS - 1) * steps]
    print(f"\n{sum(last) / len(last):.0%} of the crops were told right in the last epoch.")
    print(f"Loader of rank 0 of 2:  {(interrupted / 'metrics').read_text()}")
    print(f"Loader of the whole:    {(whole / 'metrics').read_text()}")
    print(f"All this took {time.perf_counter() - began:.0f} seconds.")


def shown(path: Path) -> str:
    """Return a path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "out" / "train", help="folder for all files, cleared first")
    parser.add_argument("--told", help=argparse.SUPPRESS)  # to a process of a training
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if arguments.told:
            train(Told(*json.loads(arguments.told)))
        else:
            run(arguments.out.resolve())
    except shardset.ShardsetError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
