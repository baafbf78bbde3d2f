"""What was found in a shard, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .text import clean, counted, one_line

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset


def faults_document(dataset: Dataset) -> list[dict[str, Any]]:
    """Return what ``--json`` prints of what is wrong or odd in a shard."""
    return [
        {
            "code": fault.code,
            "is_error": fault.is_error,
            "offset": fault.offset,
            "member": None if fault.member is None else clean(fault.member),
            "message": clean(fault.message),
        }
        for _, fault in dataset.faults()
    ]


def print_faults(dataset: Dataset, nothing: str = "no findings") -> None:
    """Print what is wrong or odd in a shard, or that there is nothing."""
    faults = [fault for _, fault in dataset.faults()]
    click.echo(f"\n{counted(len(faults), 'finding') if faults else nothing}")
    for fault in faults:
        member = "" if fault.member is None else f", {fault.member}"
        click.echo(one_line(f"{fault.code} at byte {fault.offset}{member}"))
        if fault.message:
            click.echo(f"    {one_line(fault.message)}")
