"""A private Ray on this machine: its own folder, its own ports, nothing of it left when it is stopped.

The one file that sets environment variables of Ray. `environment()` must be applied before Ray is first imported in a
process: it reads some of them then, and every process that it starts inherits them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

from quire.engine.errors import EngineError
from quire.workers.cgroup import usable_cores

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
GRPC_HOST = "QUIRE_GRPC_HOST"  # the variable that tells `grpc_listeners` where a port of somebody's choice is to be
OBJECT_STORE_BYTES = 128 << 20  # nothing of size travels as a Ray object
MIN_LOGICAL_CPUS = 8  # replicas and ranks ask for parts of a CPU; a small machine must not refuse them
RAYS_FOLDER = "r"  # below ours; Ray opens it to everybody
MAX_TEMP_DIR_LENGTH = 12  # HAProxy takes socket paths of 97 bytes, and Serve puts 70 behind our folder
STOP_TIMEOUT_S = 5.0
_PREFIX = "quire-"
_LOCK = "lock"  # held by the process whose folder it is
_locks: dict[Path, int] = {}  # descriptors, by the folder whose lock it is
_PORTS = range(20_000, 32_768)  # between those of Ray's workers and those that Linux gives to connections


def environment(folder: Path, *, haproxy: Path | None, grpc_host: str | None = None) -> dict[str, str]:
    """The variables for a private Ray in `folder`. `haproxy` starts the HTTP tier; None leaves it to Serve's proxy.
    `grpc_host` is where Serve is to listen to gRPC, if it is."""
    variables = {
        # Without these, Ray writes a token into the home directory and makes later clusters ask for it.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The loopback as the node's address: nothing of Ray listens to the network. (Ray knows this mode for desktop
        # systems; the name of the variable tells.) For Serve, see `grpc_listeners.py` and `haproxy_exec.py`.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray would hide the GPUs from an actor that asks for none, and warns that this will change.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray gives its workers a nice value of 15. On a machine with other work they would not come to theirs:
        # beside two busy processes on two cores, an engine was not ready after 300 s, instead of 21.
        "RAY_worker_niceness": os.environ.get("RAY_worker_niceness", "0"),  # noqa: SIM112 (Ray's own spelling)
        # Serve looks after its replicas ten times a second by default. With four times all processes of a service that
        # is at rest take 10 to 12% of a core instead of 15, and it is ready as soon.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": os.environ.get("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25"),
        # A proxy that dies is back in 6 s instead of 30.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }
    if grpc_host is not None:
        # Our deployments see to their own servers; this reaches Serve's proxies as well. Ray calls the function at the
        # start of each process. (Its official way is a runtime environment, for which no process is held ready.)
        hook = "quire.cluster.grpc_listeners.keep_off_the_network"
        variables |= {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": hook, GRPC_HOST: grpc_host}
    if haproxy is not None:
        tier = folder / "h"
        http, grpc, metrics, stats = free_ports(4)
        variables |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            # Four threads, its default, wake one after the other when a step's tokens come; one finds them all.
            # (What `deploy/` describes keeps the default: nodes have more cores.)
            "RAY_SERVE_HAPROXY_NBTHREAD": os.environ.get("RAY_SERVE_HAPROXY_NBTHREAD", "1"),
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(tier / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(tier / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(tier / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(tier),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(tier / "server-state"),
            # By default these are fixed, and taken when another Serve runs on this machine.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(grpc),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        }
    return variables


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now.

    Not those that the system would choose: it gives the same ones to connections, of which Ray opens hundreds before
    whoever asked for a port listens on it.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                ports.append(port)
        if len(ports) < count:
            raise OSError(errno.EADDRINUSE, f"{count} free ports from {_PORTS[0]} to {_PORTS[-1]} are not to be had")
        return ports


def make_folder() -> Path:
    """A new folder for one Ray, at a path that is short and plain enough for its sockets and HAProxy's configuration.

    Nobody else may look into it. Removes those of processes that were killed, and so could not.
    """
    base = Path(tempfile.gettempdir())
    if len(str(base)) > MAX_TEMP_DIR_LENGTH or len(str(base).split()) > 1:
        base = Path("/tmp")
    _remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    # Locked before it has its name, or another process could find it abandoned.
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    _locks[folder] = lock  # open as long as the process lives, or the folder: the lock tells that
    with contextlib.suppress(OSError):  # a file system without locks: what is left there stays
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(folder / _LOCK)
    return folder


def remove_folder(folder: Path) -> None:
    """That of a Ray that has ended, with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                with (folder / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


class LocalRay:
    """A Ray that this process has started, and ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def start(cls, folder: Path | None = None, *, dashboard: bool = False) -> LocalRay:
        """Start a private Ray. Another Ray on the machine is neither used nor touched.

        Raises `EngineError` when it does not start.
        """
        folder = folder or make_folder()
        rays = folder / RAYS_FOLDER
        rays.mkdir(exist_ok=True)
        for name, value in environment(folder, haproxy=None).items():
            os.environ.setdefault(name, value)
        import ray

        try:
            ray.init(
                address="local",
                num_cpus=max(usable_cores(), MIN_LOGICAL_CPUS),
                include_dashboard=dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(rays),
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        except BaseException as error:
            cls(folder).stop()
            if not isinstance(error, Exception):
                raise
            last_line = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise EngineError(f"Ray could not start: {last_line}") from error
        return cls(folder)

    def stop(self) -> None:
        """End it and remove its folder. Harmless when called twice."""
        import ray

        ray.shutdown()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._folder.exists():
            # Its last processes may still be writing their logs.
            remove_folder(self._folder)
            if time.monotonic() > deadline:
                logger.warning("%s could not be removed.", self._folder)
                return
            time.sleep(0.05)
