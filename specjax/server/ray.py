"""Many replicas of a server by Ray Serve: an engine in each, and a front that sends them the requests of clients."""

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from specjax import verifiers
from specjax.engine.llm import LLM
from specjax.validation import is_integer
from specjax.validation.extras import needs

with needs("ray"):
    from starlette.types import ASGIApp, Message, Scope

    from specjax.server.connections import MAX_CONNECTIONS
    from specjax.server.errors import ApiError
    from specjax.server.replicas import Front, ReplicaLost, replies
    from specjax.server.run import check, make_app, start_engine
    from specjax.server.served import name_of, served

    serve: Any = import_module("ray.serve")  # by its name: type checkers take the package ray for this file
    from ray.exceptions import RayActorError, TaskCancelledError  # pyright: ignore[reportMissingImports]
    from ray.serve.exceptions import (  # pyright: ignore[reportMissingImports]
        BackPressureError,
        DeploymentUnavailableError,
    )

HEALTH_SECONDS = 2.0  # between two checks of a replica's health, and between its reports
FRONT = "Front"  # name of its deployment
VERIFIERS = ("rejection", "block", "match", "typical")


def application(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    name: str | Sequence[str] | None = None,
    any_model_name: bool = False,
    verifier: str = "rejection",
    num_slots: int = 16,
    step_sizes: Sequence[int] | None = None,
    num_replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    resources: Mapping[str, Any] | None = None,
    max_waiting: int = 256,
    api_keys: Sequence[str] | None = None,
    request_timeout: float = 600.0,
    shutdown_timeout: float = 30.0,
    **options: Any,
) -> Any:
    """Return an application of Ray Serve with the routes of `specjax serve`, for `ray.serve.run`.

    Each replica has a separate engine. A request goes to the replica with the shorter queue of two; requests that no
    replica has room for wait at the front. Where a replica ends, requests of which nothing has been sent go to another
    one, the others end with an error, and Ray starts a new replica.

    Args:
        model: the target, as in `LLM`; every node must find it there.
        draft: the draft, as in `LLM`.
        name: names of the model for clients, one or several; None is the name of its directory, specjax for the
            embedded family.
        any_model_name: whether clients may use any other name, too.
        verifier: "rejection", "block", "match" or "typical", which is lossy.
        num_slots: number of samples that run at a time in each replica.
        step_sizes: as `Engine` takes them.
        num_replicas: number of replicas, where `autoscaling` is None.
        autoscaling: the `autoscaling_config` of Ray Serve, with `min_replicas` and `max_replicas`. The requests that
            each replica should have, waiting ones among them, `target_ongoing_requests`, are `num_slots` unless it says
            otherwise.
        resources: the `ray_actor_options` of a replica; None is as many GPUs as `tensor_parallel` says.
        max_waiting: the most requests that wait at the front, at least 1.
        api_keys: keys of clients; None takes those in SPECJAX_API_KEY, with spaces between them.
        request_timeout: seconds that a request may take, its wait among them.
        shutdown_timeout: seconds that the requests of a replica may still take when Ray ends it.
        **options: `num_draft_tokens`, `step_times`, `tree`, `dtype`, `quantization`, `draft_quantization`,
            `cache_dtype`, `max_length`, `tensor_parallel` and `compilation_cache` of `LLM`.

    Raises:
        ValueError: an argument is out of its range. The arguments of `LLM` are checked where the replicas start.
        TypeError: `LLM` has no such option.
    """
    signature(LLM).bind(model, draft, verifier=None, **options)
    api_keys = os.environ.get("SPECJAX_API_KEY", "").split() if api_keys is None else api_keys
    _check_types(
        {"num_slots": num_slots, "num_replicas": num_replicas, "max_waiting": max_waiting},
        {"request_timeout": request_timeout, "shutdown_timeout": shutdown_timeout},
        api_keys,
    )
    least = {"num_slots": (num_slots, 1), "num_replicas": (num_replicas, 1), "max_waiting": (max_waiting, 1)}
    check(least | {"shutdown_timeout": (shutdown_timeout, 0)}, request_timeout, api_keys)
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    names = [name or name_of(model)] if name is None or isinstance(name, str) else name
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) for each in names):
        raise ValueError(f"name must be a string or a list of strings, got {name!r}")
    if autoscaling is None:
        number: dict[str, Any] = {"num_replicas": num_replicas}
    else:
        number = {"autoscaling_config": {"target_ongoing_requests": num_slots, **autoscaling}}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        **number,
        ray_actor_options=dict({"num_gpus": options.get("tensor_parallel", 1)} if resources is None else resources),
        max_ongoing_requests=num_slots + math.ceil(num_slots / 4),  # a few wait there, so that no slot stays vacant
        max_queued_requests=max_waiting,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
    ).bind(
        model, draft, names, any_model_name, verifier=verifier, num_slots=num_slots, step_sizes=step_sizes, **options
    )
    front = serve.deployment(
        serve.ingress()(FrontReplica),
        name=FRONT,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_CONNECTIONS,
        logging_config={"enable_access_log": False},  # it would have a line for every report
        graceful_shutdown_timeout_s=shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return front.bind(replicas, list(api_keys), request_timeout)


def build(arguments: dict[str, Any]) -> Any:
    """Return `application(**arguments)`, as `import_path: specjax.server.ray:build` in a file of Ray Serve asks for."""
    return application(**arguments)


def _check_types(integers: Mapping[str, Any], numbers: Mapping[str, Any], api_keys: Any) -> None:
    """Raise ValueError for arguments that are no integers, numbers or list of strings, as a file may give them."""
    for name, value in integers.items():
        if not is_integer(value):
            raise ValueError(f"{name} must be an integer, got {value!r}")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
    if not isinstance(api_keys, list | tuple) or not all(isinstance(key, str) for key in api_keys):
        raise ValueError("api_keys must be a list of strings")  # the message does not show them


class Replica:
    """An engine and its routes. It takes the arguments of `application`; `names` has one name or more."""

    def __init__(
        self,
        model: str | Path | None,
        draft: str | Path | None,
        names: Sequence[str],
        any_model_name: bool,
        *,
        verifier: str,
        num_slots: int,
        step_sizes: Sequence[int] | None = None,
        **options: Any,
    ):
        llm = LLM(model, draft, verifier=getattr(verifiers, verifier), **options)
        self._engine = start_engine(llm, num_slots, None, step_sizes)  # Ray bounds the requests that wait
        self._app = make_app(self._engine, llm, served(llm, names[0], names[1:], takes_any_name=any_model_name))

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        """Yield the messages of an answer; none where the engine has failed, so that another replica gets the request.

        Args:
            scope: ASGI's description of the request.
            body: its body.
        """
        if self._engine.is_running:
            async for message in replies(self._app.routes, scope, body):
                yield message

    async def process_id(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    async def check_health(self) -> None:
        """Report to the front. Raise RuntimeError where the engine has failed, on which Ray starts another replica."""
        if not self._engine.is_running:
            raise RuntimeError("the engine has failed")
        context = serve.get_replica_context()
        front = serve.get_deployment_handle(FRONT, context.app_name)
        # Nobody waits for the answer: a replica is well without a front.
        self._reported = front.report.remote(context.replica_id.unique_id, self._app.metrics().decode())

    def __del__(self):
        if hasattr(self, "_engine"):
            self._engine.close()


class FrontReplica:
    """The process that clients reach.

    Args:
        replicas: the handle of the replicas.
        api_keys: the keys of clients; none lets everybody in.
        request_timeout: seconds after which a request ends.
    """

    def __init__(self, replicas: Any, api_keys: Sequence[str], request_timeout: float):
        self._answers = replicas.options(method_name="answer", stream=True)
        self._front = Front(self._ask, api_keys=api_keys, request_timeout=request_timeout)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._front

    async def _ask(self, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        response = self._answers.remote(scope, body)
        try:
            async for message in response:
                yield message
        except BackPressureError as error:
            text = "too many requests: all replicas are busy, and others wait already"
            raise ApiError(429, text, code="queue_full", headers={"retry-after": "1"}) from error
        except (RayActorError, DeploymentUnavailableError, TaskCancelledError) as error:
            raise ReplicaLost from error
        except (asyncio.CancelledError, GeneratorExit):  # the client has left
            response.cancel()
            raise

    async def report(self, replica: str, metrics: str) -> None:
        """Take the report of a replica, as `Front.report`."""
        self._front.report(replica, metrics)
