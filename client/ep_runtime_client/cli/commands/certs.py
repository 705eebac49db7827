"""`ep-runtime certs`: makes a lab's certificate authority, and a certificate per node."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ep_runtime_client import cli
from ep_runtime_client.cli import render

if TYPE_CHECKING:
    from ep_runtime_client.daemons import certificates

DEFAULT_DAYS = 365


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="directory of the files, made with mode 0700")
    add(
        "nodes",
        nargs="+",
        metavar="NODE[=HOST,...]",
        help="a node's name, and the DNS names and IP addresses at which others reach it",
    )
    add(
        "--days",
        type=int,
        default=DEFAULT_DAYS,
        help=f"days until they expire (default {DEFAULT_DAYS})",
    )
    add("--force", action="store_true", help="replace files of these nodes; the CA always stays")
    add("-o", "--output", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("cryptography") is None:
        render.err("ep-runtime certs needs cryptography: pip install 'ep-runtime[certs]'")
        return cli.PARTIAL
    from ep_runtime_client.daemons import certificates

    nodes = [certificates.parse_node(text) for text in args.nodes]
    made = certificates.make(args.directory.absolute(), nodes, days=args.days, force=args.force)
    if args.output == "json":
        items = [
            {"name": name, "certificate": str(place.certificate), "key": str(place.key)}
            for name, place in made.items()
        ]
        render.write_json("certs", {"items": items})
    else:
        _tell(made, certificates.AUTHORITY)
    return cli.OK


def _tell(made: dict[str, certificates.Paths], authority: str) -> None:
    ca = made[authority]
    render.out("Copy to each node its two files and the authority's certificate:")
    for name, place in made.items():
        if name != authority:
            render.out(f"  {name}: {place.certificate} {place.key} {ca.certificate}")
            render.out(
                f"    ep-runtime serve --node {name} --tls-cert {place.certificate.name} "
                f"--tls-key {place.key.name} --tls-ca {ca.certificate.name}"
                " --coordinator HOST:PORT | --join HOST:PORT | --cluster FILE"
            )
    render.out(f"Keep {ca.key} here: who has it can make nodes. It is needed to add more.")
