"""The command `specjax batch`."""

import argparse
import logging
from pathlib import Path
from typing import Any

import specjax
from specjax.cli.models import add_engine_arguments, load

logger = logging.getLogger(__name__)


def add_batch(commands: Any) -> None:
    """Add the command `specjax batch`."""
    batch = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests in OpenAI's batch format, a line of JSON each. Where the file of "
        "results has some already, the others are answered.",
    )
    batch.set_defaults(run=_batch, command="batch", extra="cli")
    add_engine_arguments(batch)
    add = batch.add_argument
    add("requests", type=Path, metavar="REQUESTS", help="file of requests, JSON Lines")
    add("--num-slots", type=int, metavar="N", help="samples that run at a time; default: 16")
    add("--out", type=Path, required=True, metavar="RESULTS", help="file of results; it is appended to")


def _batch(args: argparse.Namespace) -> int:
    """Run `specjax batch` and return its exit code."""
    from specjax.engine.sizes import default_sizes
    from specjax.server import batch_files
    from specjax.server.served import name_of, served

    if args.out.exists() and not args.out.is_file():
        raise ValueError(f"--out must be a file, which later runs read again, got {args.out}")
    if args.out.exists() and args.out.samefile(args.requests):
        raise ValueError(f"--out must be another file than that of the requests, got {args.out}")
    batch_files.check_ids(args.requests)  # before models are loaded
    llm = load(args)
    name, *aliases = args.names or [name_of(args.model)]
    known = served(llm, name, aliases, takes_any_name=args.any_model_name)
    sizes = default_sizes("batch")
    num_slots = sizes.slots if args.num_slots is None else args.num_slots
    with specjax.Engine.of(
        llm,
        num_slots=num_slots,
        capacities=specjax.Capacities(grammars=batch_files.GRAMMARS),
        step_sizes=sizes.step_sizes,
    ) as engine:
        files = args.requests, args.out
        numbers = batch_files.run(engine, known, *files, num_slots=num_slots, progress=not args.quiet)
    counts = numbers.answered, numbers.errors, numbers.known
    logger.info("%d answered, %d of them with an error, %d before", *counts)
    return 0
