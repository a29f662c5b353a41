"""What Serve runs as HAProxy: it puts right what Serve's configuration has no setting for, and becomes HAProxy.

    python haproxy_exec.py PARENT BINARY HOST PORTS [HAProxy's own arguments]

- HOST is where the PORTS listen, those of the front door; all others are for this machine alone. (Serve gives the pages
  with statistics to every interface.) HOST is - where all stay as they are: on a cluster, whose network others close.
- Who opens connections and sends half a request would have them for an hour, until nobody else gets one: headers must
  come within HEADERS_S; the next request, more of a body, and whoever is to read an answer, within IDLE_S.
- Where no gateway answers, or one dies, a client gets 503 with OpenAI's error body. Serve would have 500 and text; and
  where a connection to the gateway had been used before, HAProxy would just close the client's.
- Serve reads some headers as UTF-8 before the API sees them: those that are not printable are dropped, as is what would
  have a model loaded, or nobody look whether the client leaves.
- Serve's configuration splices bodies inside the kernel. When a body arrives in a later packet than its headers,
  HAProxy (2.8) then never sees that the client leaves, and the engine works on for nobody: `-dS` turns splicing off.
- When the actor that runs HAProxy, of the process PARENT, dies without a chance to stop it, HAProxy gives its ports
  free, and ends with its last stream.

It stays the same process, as Serve looks for the one that it has started. Only the standard library, to start at once.
"""

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG, see prctl(2): of the thread, here that of an actor's event loop
HEADERS_S = 10
IDLE_S = 120
RETRY_AFTER_S = 5  # a gateway that has died is there again about then

_READ_BY_SERVE = ("x-request-id", "x-session-id", "x-request-timeout-seconds")
_NOT_FOR_CLIENTS = ("serve_multiplexed_model_id", "serve-multiplexed-model-id", "x-request-disconnect-disabled")
_FRONT_DOOR_RULES = (
    *(f"http-request del-header {each} if {{ req.hdr({each}) -m reg '[^ -~]' }}" for each in _READ_BY_SERVE),
    *(f"http-request del-header {each}" for each in _NOT_FOR_CLIENTS),
)
_BIND = re.compile(r"^(\s*bind\s+)\S*:(\d+)(?=\s|$)", re.MULTILINE)
_OURS = re.compile(r"^\s*(errorfile|timeout (client|http-request|http-keep-alive)|http-reuse)\b.*\n", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults\b.*$", re.MULTILINE)
_FRONT_DOOR = re.compile(r"^frontend http_frontend\b.*\n.*$", re.MULTILINE)


def bind_to(text: str, host: str, ports: set[str]) -> str:
    """HAProxy's configuration with the `ports` on `host`, and all others on the loopback."""
    return _BIND.sub(lambda bind: f"{bind[1]}{host if bind[2] in ports else '127.0.0.1'}:{bind[2]}", text)


def no_gateway() -> str:
    """A whole answer, as HAProxy has them in files."""
    message = "No gateway can answer this request now. Try again."
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}})
    return (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER_S}\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n{body}"
    )


def put_right(text: str, folder: Path) -> str:
    """HAProxy's configuration with bounds on who waits, an answer of ours, which is written to `folder`, and without
    headers that Serve fails on."""
    answer = folder / "no_gateway.http"
    unfinished = folder / f"no_gateway.http.{os.getpid()}"
    unfinished.write_text(no_gateway())
    unfinished.replace(answer)  # another HAProxy may be reading it
    ours = [f"timeout client {IDLE_S}s", f"timeout http-request {HEADERS_S}s", f"timeout http-keep-alive {IDLE_S}s"]
    # Without a word to who connects ahead of time; and with a connection of its own for each request to a gateway, as
    # HAProxy tells nobody of an error of one that had another request before.
    ours += ["option http-ignore-probes", "option http-server-close"]
    ours += [f"errorfile {status} {answer}" for status in (502, 503, 504)]
    text = _DEFAULTS.sub(lambda found: "\n    ".join([found[0], *ours]), _OURS.sub("", text))
    return _FRONT_DOOR.sub(lambda found: "\n    ".join([found[0], *_FRONT_DOOR_RULES]), text)


def main(parent: str, binary: str, host: str, ports: str, *arguments: str) -> None:
    for argument in arguments:
        if argument.endswith(".cfg"):
            config = Path(argument)
            text = put_right(config.read_text(), config.parent)
            config.write_text(text if host == "-" else bind_to(text, host, set(ports.split(","))))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGUSR1, 0, 0, 0)
        if os.getppid() != int(parent):
            return  # it has died before that
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
