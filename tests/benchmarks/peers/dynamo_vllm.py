"""Starts Dynamo with vLLM on CPU; run by the Python that has both: MODEL CHECKPOINT DTYPE MAX_MODEL_LEN PORT.

A frontend and one engine, which meet in a folder of their own: no etcd, no NATS. Both end with this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

STOP_TIMEOUT_S = 15.0


def main(model: str, checkpoint: str, dtype: str, max_model_len: str, port: str) -> int:
    """0 after an interrupt; else one of the two has ended by itself."""
    folder = tempfile.mkdtemp(prefix="dynamo-")
    environment = {
        **os.environ,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": folder,
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    }
    frontend = ("dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port)
    engine = (
        "dynamo.vllm", "--model", checkpoint, "--served-model-name", model, "--dtype", dtype,
        "--max-model-len", max_model_len, "--enable-prefix-caching",
    )  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            subprocess.Popen((sys.executable, "-m", *each), env=environment) for each in (frontend, engine)
        )
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
