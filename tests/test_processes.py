"""Several processes: what they send, how they meet, that they work as one, and that none is left when one is lost."""

import ast
import inspect
import json
import os
import queue
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import several
from test_llm import random_tensors, write_checkpoint, write_pair
from test_parallel import CONFIG
from test_server import PROGRAMS_WHEN_USED, Client, completion

from specjax import Capacities, cli, proposers, verifiers
from specjax.engine.slots import Slots
from specjax.models.decoder import decoder_model, init_params
from specjax.processes import connection, fingerprint, meeting, messages
from specjax.processes.connection import CALL, HELLO, Connection, Lost
from specjax.processes.follower import _Replay
from specjax.processes.leader import Calls, Leader
from specjax.processes.repeat import REPEATED, Repeated, sent
from specjax.types import Chunk, Context

DEPLOY = Path(__file__).parent.parent / "docs" / "deploy"


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


def round_trip(value):
    return messages.decode(messages.encode(value, lambda leaf: None), lambda *place: None)


class TestMessages:
    def test_values_come_as_they_were_sent(self):
        rng = np.random.default_rng(0)
        arrays = np.arange(6, dtype=np.int32).reshape(2, 3), rng.random(3).astype(jnp.bfloat16), np.uint32(7)
        context = Context(*arrays, np.bool(True), None, None)
        chunk = Chunk(arrays[0], arrays[0].T, np.zeros((1, 0), np.int32), np.ones(1, bool), previous=(context, {}))
        value = 3, "step", ("text", None, True, -1.5, [chunk]), {"use": 2, "more": (context, [])}
        same(round_trip(value), value)
        found = round_trip([Capacities(grammars=3, bad_words=7)])
        assert found == [Capacities(grammars=3, bad_words=7)]

    def test_numbers_with_a_dtype_keep_it(self):
        assert [getattr(each, "dtype", None) for each in round_trip([np.float64(0.5), 0.5])] == [np.float64, None]

    def test_results_are_named(self):
        array = jnp.arange(3)
        message = messages.encode([array, np.int32(1)], lambda leaf: (4, 2) if leaf is array else None)
        assert messages.decode(message, lambda *place: place) == [(4, 2), 1]

    @pytest.mark.parametrize("make", [lambda: print, lambda: np.array([print]), lambda: jnp.arange(2), object])
    def test_nothing_else_is_sent(self, make):
        value = [{1: make()}]
        with pytest.raises(ValueError, match="must have numbers and arrays of the host"):
            messages.encode(value, lambda leaf: None)

    @pytest.mark.parametrize("name", ["os:system", "builtins:eval", "specjax.cli:main", "specjax:LLM", "specjaxes:x"])
    def test_nothing_else_is_called(self, name):
        text = json.dumps(["record", name, "true"]).encode()
        with pytest.raises(ValueError, match="a record must be"):
            messages.decode(len(text).to_bytes(4, "big") + text, lambda *place: None)


class Adder:
    """As `Slots`, with a state and a call."""

    def __init__(self):
        self.state = jnp.zeros(2)

    def step(self, number, last=None):
        self.state = self.state + number + (0 if last is None else last)
        return jnp.ones(1), self.state * 2


class RepeatedAdder(Adder):
    step = sent(Adder.step)

    def __init__(self, calls):
        super().__init__()
        self.calls = calls


class Sent(list):
    """A connection that keeps sent bytes."""

    name = "process 1"

    def send(self, kind, content=b""):
        if kind == CALL:
            self.append(content)

    def receive(self):
        threading.Event().wait()


def test_calls_are_repeated():
    """Results of calls go into later ones, and are dropped when nobody has them."""
    frames, other = Sent(), Adder()
    adder = RepeatedAdder(Calls(Leader(0, 2, {1: frames}), 1))
    replay = _Replay(None, None, None)
    replay._slots[1] = other
    first = adder.step(np.float32(1.5))[1]
    adder.step(np.float32(2), last=first)
    for message in frames:
        replay.repeat(message)
    np.testing.assert_array_equal(other.state, [6.5, 6.5])
    assert set(replay._results) == {(1, 1), (2, 0), (2, 1)}  # the others were dropped before the second call
    del first
    adder.step(np.float32(0))
    replay.repeat(frames[-1])
    assert set(replay._results) == {(3, 0), (3, 1)}
    assert not adder.calls._leader._places


def test_nothing_but_calls_of_slots_is_repeated():
    replay = _Replay(None, None, None)
    replay._slots[1] = Adder()
    message = messages.encode((1, "__class__", (), {}, [], []), lambda leaf: None)
    with pytest.raises(ValueError, match="must send a call of slots that is to be repeated, got '__class__'"):
        replay.repeat(message)


def sets_state(node):
    """Return whether a node is the target `self.state` of an assignment."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "state"


def test_every_call_that_changes_the_state_is_sent():
    """A call that process 0 made alone would leave the others with another state."""
    methods = [node for node in ast.parse(inspect.getsource(Slots)).body[0].body if isinstance(node, ast.FunctionDef)]
    changing = {method.name for method in methods for node in ast.walk(method) if sets_state(node)}
    assert changing | {"kept"} == {*REPEATED, "_make_state"}  # whose result is another's argument
    assert {name for name in vars(Repeated) if name in vars(Slots)} >= changing


def meet(check=lambda hello, number: None, hellos=(), num_processes=3, timeout=20.0):
    """The result or error of `accept`, and the answer to each other process that says a hello of `hellos`."""
    listener = connection.listen("127.0.0.1", 0)
    port, answers = listener.getsockname()[1], {}

    def come(index, hello):
        try:
            other, answers[index] = connection.connect("127.0.0.1", port, hello, timeout)
            other.close()
        except (ValueError, Lost) as error:
            answers[index] = str(error)

    threads = [threading.Thread(target=come, args=each) for each in enumerate(hellos)]
    for thread in threads:
        thread.start()
    try:
        with listener:
            found = connection.accept(listener, num_processes, check, timeout)
        for other in found.values():
            other.send(HELLO, b"17")
            other.close()
    except (ValueError, Lost) as error:
        found = error
    for thread in threads:
        thread.join()
    return found, answers


class TestMeeting:
    def test_all_come(self):
        found, answers = meet(hellos=[{"process_id": 2}, {"process_id": 1}])
        assert sorted(found) == [1, 2]
        assert answers == {0: 17, 1: 17}

    def test_one_does_not_come(self):
        start = time.monotonic()
        found, answers = meet(hellos=[{"process_id": 2}], timeout=0.5)
        assert "process 1 of 3 did not come within 0.5 seconds" in str(found)
        assert answers == {0: str(found)}
        assert time.monotonic() - start < 10

    def test_two_of_one_number(self):
        found, answers = meet(hellos=[{"process_id": 2}] * 2, timeout=5)
        assert "two with process_id = 2" in str(found)
        assert set(answers.values()) == {str(found)}

    def test_different_arguments_are_named(self):
        own, theirs = (fingerprint.of_start("1.0", 2, {"--dtype": dtype}) for dtype in ("float32", "bfloat16"))

        def check(hello, number):
            fingerprint.check_same(own, hello["fingerprint"], number)

        found, answers = meet(check, [{"process_id": 1, "fingerprint": theirs}], 2)
        message = "--dtype must be the same in every process, got 'float32' in process 0 and 'bfloat16' in process 1"
        assert str(found) == answers[0] == message

    def test_strangers_are_turned_away(self):
        listener = connection.listen("127.0.0.1", 0)
        address = listener.getsockname()
        texts = b'{"process_id": "1"}', b"[" * 100_000
        with socket.create_connection(address) as stranger, ExitStack() as others, listener:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for text in texts:
                other = others.enter_context(socket.create_connection(address))
                other.sendall(connection._HEAD.pack(HELLO, len(text)) + text)
            come, met = ({"process_id": 1}, 20.0), []
            thread = threading.Thread(target=lambda: met.append(connection.connect(*address, *come)))
            thread.start()
            found = connection.accept(listener, 2, lambda *_: None, 20.0)
            found[1].send(HELLO, b"0")
            thread.join()
        for each in (found[1], met[0][0]):
            each.close()
        assert list(found) == [1]

    @pytest.mark.parametrize("part", [b"x", connection._HEAD.pack(connection.ALIVE, 0)], ids=["bytes", "signs of life"])
    def test_a_stranger_does_not_hold_up_the_others(self, part):
        """One that sends a little at a time is turned away when its time is over, whatever it sends."""
        with (
            connection.listen("127.0.0.1", 0) as listener,
            socket.create_connection(listener.getsockname()) as stranger,
        ):
            stranger.sendall(connection._HEAD.pack(HELLO, 1000) if part == b"x" else part)

            def trickle():
                with suppress(OSError):  # when it is turned away
                    for _ in range(1000):  # 50 seconds
                        time.sleep(0.05)
                        stranger.sendall(part)

            thread, start = threading.Thread(target=trickle), time.monotonic()
            thread.start()
            with pytest.raises(Lost, match=r"process 1 of 2 did not come within 0\.5 seconds"):
                connection.accept(listener, 2, lambda *_: None, 0.5)
            seconds = time.monotonic() - start
            thread.join()
        assert seconds < 25  # on a machine under load, too

    def test_nobody_is_there(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(Lost, match=f"process 0 cannot be reached at 127.0.0.1:{port} within 0.3 seconds"):
            connection.connect("127.0.0.1", port, {}, 0.3)

    def test_port_in_use(self):
        with connection.listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(OSError, match=f"cannot listen at port {port}"):
                connection.listen("127.0.0.1", port)


class TestLoss:
    @pytest.fixture
    def ends(self):
        with connection.listen("127.0.0.1", 0) as listener:
            links = socket.create_connection(listener.getsockname()), listener.accept()[0]
        ends = [Connection(link, f"process {1 - i}") for i, link in enumerate(links)]
        yield ends
        for each in ends:
            each.close()

    def test_a_process_that_has_gone(self, ends):
        ends[1].close()
        with pytest.raises(Lost, match="process 1 has gone"):
            ends[0].receive()

    def test_a_silent_process(self, ends):
        ends[0].limit(0.2)
        with pytest.raises(Lost, match="process 1 has given no sign of life for 0 seconds"):
            ends[0].receive()

    def test_signs_of_life_are_no_frames(self, ends):
        ends[1].send(connection.ALIVE)
        ends[1].send(CALL, b"x" * 100_000)
        assert ends[0].receive() == (CALL, b"x" * 100_000)

    def test_a_process_that_does_not_read(self, ends):
        ends[0].limit(0.2)
        with pytest.raises(Lost, match="no sign of life"):
            while True:
                ends[0].send(CALL, bytes(2**20))

    def test_what_cannot_be_read(self, ends, capfd, monkeypatch):
        """A frame that does not fit into memory ends the process, which would not notice a loss any more."""
        codes = queue.SimpleQueue()
        monkeypatch.setattr(os, "_exit", codes.put)
        leader = Leader(0, 2, {1: ends[0]})
        ends[1]._link.sendall(connection._HEAD.pack(CALL, 2**62))
        assert codes.get(timeout=10) == 1
        leader._is_ending = True
        assert "what process 1 sends cannot be read: MemoryError" in capfd.readouterr().err


class TestFingerprints:
    def model(self, norm=1.0, **changes):
        config = replace(CONFIG, **changes)
        return decoder_model(config, init_params(config, 0) | {"norm": jnp.full(config.hidden_size, norm)})

    @pytest.mark.parametrize(
        "changes, name",
        [({"num_layers": 1}, "num_layers of the model"), ({"norm": 1.5}, "the values of ['norm'] of the model")],
    )
    def test_models(self, changes, name):
        own, theirs = (fingerprint.of_model(self.model(**each), verifiers.block) for each in ({}, changes))
        fingerprint.check_same(own, own, 1)
        with pytest.raises(ValueError) as error:
            fingerprint.check_same(own, theirs, 1)
        assert str(error.value).startswith(f"{name} must be the same in every process, got ")

    def test_verifiers_and_proposers(self):
        model = self.model()
        own, theirs = (fingerprint.of_model(model, verifier) for verifier in (verifiers.block, verifiers.match))
        with pytest.raises(
            ValueError, match=r"the verifier must be the same .* got .*block in process 0 and .*match in"
        ):
            fingerprint.check_same(own, theirs, 1)
        own, theirs = (fingerprint.of_proposer(proposers.draft_model(model, number)) for number in (2, 3))
        with pytest.raises(
            ValueError, match=r"num_draft_tokens must be the same .* got 2 in process 0 and 3 in process 4"
        ):
            fingerprint.check_same(own, theirs, 4)
        own, theirs = (fingerprint.of_proposer(proposers.draft_model(model, 2, tree=number)) for number in (5, 6))
        with pytest.raises(ValueError, match=r"tree must be the same .* got 5 in process 0 and 6 in process 1"):
            fingerprint.check_same(own, theirs, 1)

    def test_settings(self, monkeypatch):
        own = fingerprint.of_start("1", 2, {})
        monkeypatch.setenv("XLA_FLAGS", "--xla_other")
        with pytest.raises(ValueError, match=r"XLA_FLAGS must be the same"):
            fingerprint.check_same(own, fingerprint.of_start("1", 2, {}), 1)
        with pytest.raises(ValueError, match=r"version of specjax must be the same .* got nothing in process 0"):
            fingerprint.check_same({}, {"version of specjax": "2"}, 1)


class TestArguments:
    @pytest.mark.parametrize("names", meeting.VARIABLES, ids=lambda names: names[0])
    def test_launchers(self, names, monkeypatch):
        for others in meeting.VARIABLES:
            for name in others:
                monkeypatch.delenv(name, raising=False)
        with pytest.raises(ValueError, match="num_processes must be an integer >= 2, got None"):
            meeting._numbers(None, None)
        for name, number in zip(names, "31", strict=True):
            monkeypatch.setenv(name, number)
        assert meeting._numbers(None, None) == (3, 1)
        assert meeting._numbers(4, 2) == (4, 2)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--coordinator", "host"], "coordinator must be host:port, got 'host'"),
            (["--coordinator", "h:70000"], "coordinator must be host:port"),
            (["--coordinator", "h:1", "--num-processes", "1"], "num_processes must be an integer >= 2, got 1"),
            (["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "process_id must be in .* got 2"),
            (["--coordinator", "h:1", "--num-processes", "2"], "process_id must be in .* got None"),
            (["--coordinator", "h:1", "--join-timeout", "0"], "timeout must be positive and finite, got 0.0"),
            (["--num-processes", "2"], "--num-processes needs --coordinator"),
            (["--process-id", "0"], "--process-id needs --coordinator"),
        ],
    )
    def test_bad_ones(self, arguments, message, capsys):
        assert cli.main(["generate", "hi", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def started(*commands, **environment):
    """Processes with a CPU device each, that are gone afterwards."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(DEPLOY.parents[1])} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ | own}
    running = [subprocess.Popen([sys.executable, *map(str, command)], **pipes) for command in commands]
    try:
        yield running
    finally:
        for each in running:
            each.kill()
            each.communicate()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), num_layers=1)


@pytest.mark.slow
def test_text_of_one_process(pair):
    pytest.importorskip("outlines_core")
    address = f"127.0.0.1:{free_port()}"
    with (
        started(*([several.__file__, address, number, *pair] for number in range(2))) as running,
        started([several.__file__, *pair], JAX_NUM_CPU_DEVICES="2") as (alone,),
    ):
        (out, error), _, (expected, error_alone) = (each.communicate(timeout=120) for each in [*running, alone])
    assert [each.returncode for each in [*running, alone]] == [0, 0, 0], (error, error_alone)
    assert json.loads(out.splitlines()[-1]) == json.loads(expected.splitlines()[-1])


@pytest.mark.slow
def test_different_arguments():
    command = "-m", "specjax", "generate", "hi", "--tensor-parallel", 2, "--coordinator", f"127.0.0.1:{free_port()}"
    numbers = [["--num-processes", 2, "--process-id", number, "--num-draft-tokens", 3 + number] for number in range(2)]
    with started(*([*command, *each] for each in numbers)) as running:
        errors = [each.communicate(timeout=60)[1] for each in running]
    assert [each.returncode for each in running] == [2, 2]
    for error in errors:
        assert "--num-draft-tokens must be the same in every process, got 3 in process 0 and 4 in process 1" in error


@pytest.mark.slow
def test_process_0_is_lost():
    code = """if True:
        import os, sys, time
        from specjax.processes import join
        with join(sys.argv[1], 2, int(sys.argv[2]), timeout=60) as group:
            if group.is_leader:
                os.kill(os.getpid(), 9)
            time.sleep(600)
    """
    address = f"127.0.0.1:{free_port()}"
    with started(*(["-c", code, address, number] for number in range(2))) as running:
        _, error = running[1].communicate(timeout=60)
    assert running[1].returncode == 1
    assert "specjax: error: process 0 has gone" in error


SRUN = """#!/usr/bin/env bash
export SLURM_NTASKS=2
SLURM_PROCID=1 "$@" 2> "$FOLDER/error" &
echo $! > "$FOLDER/follower"
SLURM_PROCID=0 exec "$@"
"""


@pytest.mark.slow
class TestSlurm:
    """docs/deploy/specjax.slurm with an srun that starts two processes here."""

    @pytest.fixture
    def folder(self, tmp_path):
        programs = {
            "scontrol": "echo 127.0.0.1\necho other",
            "srun": SRUN,
            "specjax": f'exec {shlex.join([sys.executable, *PROGRAMS_WHEN_USED])} "$@"',
        }
        for name, text in programs.items():
            path = tmp_path / name
            path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path

    def test_serves_until_a_process_is_lost(self, folder, tmp_path_factory):
        model = write_checkpoint(folder / "model", random_tensors(0, num_layers=1), num_layers=1)
        script = (
            (DEPLOY / "specjax.slurm")
            .read_text()
            .replace(":8476", f":{free_port()}")
            .replace("0.0.0.0 --port 8000", "127.0.0.1 --port 0")
        )
        (folder / "script").write_text(script)
        variables = {
            "SLURM_JOB_NODELIST": "a[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "1",
            "SLURM_CPUS_PER_TASK": "1",
            "FOLDER": str(folder),
        }
        environment = (
            os.environ
            | variables
            | {
                "PATH": f"{folder}:{os.environ['PATH']}",
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "1",
            }
        )
        command = ["bash", folder / "script", "--model", model, "--name", "small", "--num-slots", "2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        with subprocess.Popen(command, **pipes) as leader:
            try:
                line = next((line for line in leader.stdout if "ready" in line), None)
                assert line is not None, leader.stderr.read()
                status, _, text = Client(int(line.rsplit(":", 1)[1]), None).call(
                    "POST", "/v1/completions", completion(max_tokens=8)
                )
                assert status == 200, text
                start = time.monotonic()
                os.kill(int((folder / "follower").read_text()), signal.SIGKILL)
                _, error = leader.communicate(timeout=60)
                assert time.monotonic() - start < 30
            finally:
                leader.kill()
        assert leader.returncode == 1
        assert re.search(r"specjax: error: process 1 \(127\.0\.0\.1\) has gone(: [^;]+)?; process 0 ends", error), error


def test_manifest():
    yaml = pytest.importorskip("yaml")
    group, service = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
    templates = group["spec"]["leaderWorkerTemplate"]
    pods = [templates[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    containers = [pod["containers"][0] for pod in pods]
    for name in ("image", "command", "args", "resources"):
        assert containers[0][name] == containers[1][name]
    assert containers[0]["command"] == ["specjax"]
    args = cli._parser().parse_args(containers[0]["args"])
    assert args.coordinator == "$(LWS_LEADER_ADDRESS):8476"
    gpus = int(containers[0]["resources"]["limits"]["nvidia.com/gpu"])
    assert args.tensor_parallel == templates["size"] * gpus
    assert service["spec"]["selector"] == templates["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["ports"] == [{"port": args.port}] and containers[0]["ports"] == [
        {"containerPort": args.port}
    ]
    for pod in pods:
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
            each["name"] for each in pod["volumes"]
        }


def test_script_of_slurm():
    text = (DEPLOY / "specjax.slurm").read_text()
    done = subprocess.run(["bash", "-n", DEPLOY / "specjax.slurm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in text.replace("\\\n", "").splitlines() if line.startswith("exec srun"))
    arguments = shlex.split(command.replace("$((SLURM_NNODES * SLURM_GPUS_ON_NODE))", "16").replace('"$@"', ""))
    assert cli._parser().parse_args(arguments[3:]).tensor_parallel == 16
