"""What Serve runs as HAProxy: it puts right what Serve's configuration has no setting for, and becomes HAProxy.

    python haproxy_exec.py PARENT BINARY HOST PORTS [HAProxy's own arguments]

- HOST is where the PORTS listen, those of the front door; all others are for this machine alone. (Serve gives the pages
  with statistics to every interface.)
- Serve's configuration splices bodies inside the kernel. When a body arrives in a later packet than its headers,
  HAProxy (2.8) then never sees that the client leaves, and the engine works on for nobody: `-dS` turns splicing off.
- When the actor that runs HAProxy, of the process PARENT, dies without a chance to stop it, HAProxy gives its ports
  free, and ends with its last stream.

It stays the same process, as Serve looks for the one that it has started. Only the standard library, to start at once.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG, see prctl(2): of the thread, here that of an actor's event loop
_BIND = re.compile(r"^(\s*bind\s+)\S*:(\d+)(?=\s|$)", re.MULTILINE)


def bind_to(text: str, host: str, ports: set[str]) -> str:
    """HAProxy's configuration with the `ports` on `host`, and all others on the loopback."""
    return _BIND.sub(lambda bind: f"{bind[1]}{host if bind[2] in ports else '127.0.0.1'}:{bind[2]}", text)


def main(parent: str, binary: str, host: str, ports: str, *arguments: str) -> None:
    for argument in arguments:
        if argument.endswith(".cfg"):
            config = Path(argument)
            config.write_text(bind_to(config.read_text(), host, set(ports.split(","))))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGUSR1, 0, 0, 0)
        if os.getppid() != int(parent):
            return  # it has died before that
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
