"""What is known of a dataset's shards as numbers, in the shapes that webshart gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .shards import Shards

_MEBI: Final = 1 << 20
_GIBI: Final = 1 << 30
_RULE: Final = 50


def known_totals(shards: Shards) -> tuple[int | None, int | None]:
    """Return bytes and files of all shards as far as they are known without reading; (None, None) of local ones."""
    if not shards.is_remote:
        return None, None
    numbers = range(shards.num_shards)
    loaded = [files.index.num_files for number in numbers if (files := shards.loaded_files(number)) is not None]
    return shards.total_size, sum(loaded) if len(loaded) == len(numbers) else None


def known_stats(shards: Shards) -> dict[str, Any]:
    """Return what `Shards.get_stats` does."""
    size, files = known_totals(shards)
    stats: dict[str, Any] = {"total_shards": shards.num_shards}
    if size is not None:
        stats |= {"total_size": size, "total_size_gb": size / _GIBI}
    if files is not None:
        stats |= {"total_files": files, "average_files_per_shard": files / max(1, shards.num_shards)}
    return stats | {
        "from_cache": size is not None,
        "shard_details": [_detail(shards, number) for number in range(shards.num_shards)],
    }


def _detail(shards: Shards, number: int) -> dict[str, Any]:
    files = shards.loaded_files(number)
    detail = {"index": number, "name": shards.info(number).name, "metadata_loaded": files is not None}
    return detail if files is None else detail | {"num_files": files.index.num_files, "size": files.index.size}


def detailed_stats(shards: Shards) -> dict[str, Any]:
    """Return what `Shards.get_detailed_stats` does.

    Raises:
        As `Shards.files`.
    """
    details: list[dict[str, Any]] = []
    shards.load_files(range(shards.num_shards))
    for number in range(shards.num_shards):
        index, name = shards.files(number).index, shards.info(number).name
        details.append(
            {
                "index": number,
                "name": name,
                "num_files": index.num_files,
                "size": index.size,
                "size_mb": index.size / _MEBI,
            }
        )
    counts, size = [detail["num_files"] for detail in details], sum(detail["size"] for detail in details)
    average = size / max(1, len(details))
    return {
        "total_shards": len(details),
        "total_files": sum(counts),
        "total_size": size,
        "total_size_gb": size / _GIBI,
        "average_files_per_shard": sum(counts) / max(1, len(details)),
        "average_size_per_shard": average,
        "average_size_per_shard_mb": average / _MEBI,
        "min_files_in_shard": min(counts, default=0),
        "max_files_in_shard": max(counts, default=0),
        "shard_details": details,
        "from_cache": False,
    }


def summary_text(shards: Shards, *, detailed: bool) -> str:
    """Return what `Shards.print_summary` prints."""
    stats = detailed_stats(shards) if detailed else known_stats(shards)
    lines = ["", f"Dataset Summary: {shards.name}", "=" * _RULE, f"Total shards: {stats['total_shards']}"]
    if "total_files" in stats:
        lines.append(f"Total files: {stats['total_files']:,}")
    if "total_size" in stats:
        lines.append(f"Total size: {stats['total_size_gb']:.2f} GiB")
    if detailed:
        lines += ["", "Shard Details:", "-" * _RULE, f"{'Shard Name':<30} {'Size (MB)':<12} {'Files':<10}", "-" * _RULE]
        lines += [
            f"{detail['name']:<30} {detail['size_mb']:<12.2f} {detail['num_files']:<10}"
            for detail in stats["shard_details"]
        ]
    return "\n".join(lines)
