"""The command `specjax serve`."""

import argparse
import os
from typing import Any

from specjax.cli.models import add_engine_arguments, load


def add_serve(commands: Any) -> None:
    """Add the command `specjax serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve clients of OpenAI's protocol, and a page to look at",
        description="Serve a model by HTTP to clients of OpenAI's protocol, and a page that shows how it decodes.",
    )
    serve.set_defaults(run=_serve, command="serve", extra="serve")
    add_engine_arguments(serve)
    add = serve.add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at; default: this machine alone")
    add("--port", type=int, default=8000, metavar="N", help="port to listen at, 0 takes a free one; default: 8000")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="key that clients must send; may be repeated; default: those in SPECJAX_API_KEY, with spaces between them",
    )
    add(
        "--allowed-origin",
        dest="allowed_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="site whose pages may use the server in a browser, as https://chat.example:8080, or * for all; may be "
        "repeated; default: none but the server's own",
    )
    add("--num-slots", type=int, metavar="N", help="samples that run at a time; default: 16, on CPUs 8")
    add(
        "--step-sizes",
        type=int,
        nargs="*",
        metavar="N",
        help="slots that a step computes where few are active; none: always all; default: 1 8 32, on CPUs 1",
    )
    add("--max-waiting", type=int, default=256, metavar="N", help="requests that may wait for a slot; default: 256")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="seconds of a request; default: 600")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests may take after SIGTERM; default: 30",
    )
    add("--no-access-log", dest="access_log", action="store_false", help="log no requests, only the load")


def _serve(args: argparse.Namespace) -> int:
    """Run `specjax serve` and return its exit code."""
    from specjax.server.run import serve
    from specjax.server.served import name_of

    llm = load(args)
    name, *aliases = args.names or [name_of(args.model)]
    return serve(
        llm,
        name,
        aliases,
        takes_any_name=args.any_model_name,
        host=args.host,
        port=args.port,
        num_slots=args.num_slots,
        step_sizes=args.step_sizes,
        max_waiting=args.max_waiting,
        api_keys=args.api_key or os.environ.get("SPECJAX_API_KEY", "").split(),
        allowed_origins=args.allowed_origins,
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
        access_log=args.access_log and not args.quiet,
    )
