"""`ep-runtime top`: shows what every rank does, and the rank that the others wait for."""

from __future__ import annotations

import argparse
from typing import Any

from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.ranks import board_samples, rows
from ep_runtime_client.readers import tallies

_ABOUT_KEYS = (
    "On a terminal it runs until q. Keys: s sorts by the next column, r reverses the order, l "
    "lists layers, up and down choose one, enter opens it, escape goes back, g shows the next "
    "group. Without a terminal, or with --samples or --since, it prints once and ends."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--link",
        type=reading.positive,
        metavar="GB/S",
        help="link bandwidth that LINK is a share of, instead of NVML's",
    )
    since = "print once, instead of a live screen, the rates"
    board_samples.add_arguments(
        parser, "seconds of one sample", since, interval_s=2.0, samples=None
    )
    shown = {"ranks": rows.RANKS, "layers (key l)": rows.LAYERS}
    reading.explain(parser, shown, f"{_ABOUT_KEYS} {board_samples.ABOUT_SINCE}")


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    with source.open_source(args.address, timeout_s=args.timeout) as daemon:
        seen = board_samples.begin(args, daemon)
        links = rows.Links(args.link)
        if args.samples is None and args.since is None and args.output == "table":
            from ep_runtime_client.cli.ranks import screen

            if screen.possible():
                shown = screen.Screen(seen, links)
                screen.run(shown.lines, shown.press, seen.again, args.interval)
                return seen.exit_code
        for _ in range(args.samples or 1):
            seen.wait()
            if args.output == "json":
                groups = [_document(seen, key, links) for key in seen.groups]
                seen.write_json("top", groups, compact=args.samples is not None)
            else:
                _write_tables(args, seen, links)
        return seen.exit_code


def _write_tables(
    args: argparse.Namespace, seen: board_samples.BoardSamples, links: rows.Links
) -> None:
    if not seen.groups:
        render.out("no ranks")
    for key, _ in seen.apart(seen.groups):
        for line in seen.heading(key):
            render.write_text(line)
        found = seen.ranks(key, links)
        shown = board_samples.columns(found, rows.RANKS)
        render.write_table(shown, found, wide=args.output == "wide", empty="no ranks")


def _document(
    seen: board_samples.BoardSamples, key: tallies.GroupName, links: rows.Links
) -> dict[str, Any]:
    found = seen.ranks(key, links)
    return {
        **seen.about(key),
        "slow": seen.slow(key),
        "ranks": [{k: v for k, v in row.items() if k != "waits"} for row in found],
        "layers": seen.layers(key),
    }
