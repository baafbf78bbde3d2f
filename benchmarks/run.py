"""Run the benchmarks: `make bench`, or this file with an interpreter that has the peers.

Every topic runs in a process of its own. With ``--write`` the figures are kept in ``results/`` and the tables of
``docs/benchmarks.md`` are made anew from all that is kept there.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from measure import conditions

HERE: Final = Path(__file__).parent
DOCUMENT: Final = HERE.parent / "docs" / "benchmarks.md"
TOPICS: Final = (
    *("columns", "extraction", "iteration", "random_samples", "catalog", "index_loading", "aspect_buckets"),
    *("remote", "buckets", "editing", "records", "examples", "record_access", "salvage"),
    *("pipeline", "pipeline_decoding", "shard_writing", "order", "loading", "loader_reading", "batch_decoding"),
)
_START: Final = "<!-- What follows is made by: make bench ARGS=--write -->\n"
_END: Final = "<!-- What stands above is made. -->\n"


def run_topic(topic: str, root: Path, *, quick: bool) -> list[dict[str, Any]]:
    return [result.as_json() for result in import_module(topic).run(root, quick=quick)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"which to run (default: all): {', '.join(TOPICS)}")
    parser.add_argument("--data", type=Path, default=HERE.parent / "build" / "bench-data", help="folder of the shards")
    parser.add_argument("--quick", action="store_true", help="fewer shards; the figures are not kept")
    parser.add_argument("--write", action="store_true", help="keep the figures and write docs/benchmarks.md")
    chosen = parser.parse_args()
    if unknown := set(chosen.topics) - set(TOPICS):
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    if chosen.quick and chosen.write:
        parser.error("--quick and --write do not go together")
    chosen.data.mkdir(parents=True, exist_ok=True)
    missed = 0
    for topic in chosen.topics or TOPICS:
        print(topic, flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            results = fresh.submit(run_topic, topic, chosen.data.absolute(), quick=chosen.quick).result()
        missed += sum(not result["met"] for result in results)
        if chosen.write:
            today = dt.datetime.now(dt.UTC).date().isoformat()
            kept = {"topic": topic, "date": today, "conditions": conditions(), "results": results}
            (HERE / "results").mkdir(exist_ok=True)
            (HERE / "results" / f"{topic}.json").write_text(json.dumps(kept, indent=1) + "\n")
    if chosen.write:
        write_document()
    print(f"{missed} goals missed" if missed else "all goals met")


def write_document() -> None:
    """Put a table of every topic that is kept into the document, between its two marks."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    tables = "".join(
        as_table(json.loads(path.read_text()))
        for path in sorted((HERE / "results").glob("*.json"), key=lambda path: TOPICS.index(path.stem))
    )
    DOCUMENT.write_text(f"{before}{_START}{tables}\n{_END}{after}")


def as_table(kept: dict[str, Any]) -> str:
    """Return the section of one topic: its conditions, and a row for each result."""
    conditions = "; ".join(f"{name} {value}" for name, value in kept["conditions"].items())
    rows = ["| | shardset | beside | ratio | goal |", "|---|---|---|---|---|"]
    for result in kept["results"]:
        what = f"**{result['what']}**<br>{result['delivers']}"
        rows.append(f"| {what} | {' | '.join(_cells(result))}{'' if result['met'] else ', missed'} |")
    return f"\n### {kept['topic']}\n\n{kept['date']}: {conditions}.\n\n" + "\n".join(rows) + "\n"


def _cells(result: dict[str, Any]) -> list[str]:
    if result["kind"] == "limit":
        low, high = min(result["values"]), max(result["values"])
        figure = f"{result['median']:.3g} {result['unit']} ({low:.3g} to {high:.3g})"
        return [f"{figure}<br>`{result['ours']}`", "", "", f"below {result['limit']:g} {result['unit']}"]
    sides = [
        f"{result['count'] / statistics.median(result[f'{side}_seconds']):,.0f} {result['unit']}/s<br>`{result[side]}`"
        for side in ("ours", "peer")
    ]
    ratio = f"{result['ratio']:.1f} ({result['ratio_min']:.1f} to {result['ratio_max']:.1f})"
    return [*sides, ratio, "none" if result["goal"] is None else f"{result['goal']:g}"]


if __name__ == "__main__":
    main()
