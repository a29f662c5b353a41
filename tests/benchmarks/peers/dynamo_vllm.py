"""Starts Dynamo with vLLM on CPU; run by the Python that has both: MODEL CHECKPOINT DTYPE MAX_MODEL_LEN PORT.

A frontend and one engine, which meet in a folder of their own: no etcd, no NATS. Both end with this process, at SIGINT
or SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

STOP_TIMEOUT_S = 15.0  # less than whoever started this waits for it


def main(model: str, checkpoint: str, dtype: str, max_model_len: str, port: str) -> int:
    """0 after a signal; 1 where one of the two ended by itself, which is told."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="dynamo-")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    environment |= {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": folder,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    }
    commands = {
        "frontend": ("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port),
        "engine": (
            "dynamo.vllm", "--model", checkpoint, "--served-model-name", model, "--dtype", dtype,
            "--max-model-len", max_model_len, "--enable-prefix-caching",
        ),
    }  # fmt: skip
    processes: dict[str, subprocess.Popen[bytes]] = {}
    ended: dict[str, int] = {}
    try:
        for name, command in commands.items():
            processes[name] = subprocess.Popen((sys.executable, "-m", *command), env=environment)
        while not ended:
            time.sleep(0.2)
            ended = {name: each.returncode for name, each in processes.items() if each.poll() is not None}
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(list(processes.values()))
        shutil.rmtree(folder, ignore_errors=True)
    for name, status in ended.items():
        print(f"Dynamo's {name} ended with status {status}.", file=sys.stderr)
    return 1


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
