"""Log lines of Quire's own processes."""

from __future__ import annotations

import logging


def configure_logging(name: str) -> None:
    """Send Quire's log lines of this actor to its stderr, which Ray keeps in a file per worker and shows in the
    dashboard. (Serve's own log file is buffered for throughput: its last lines are lost when a process dies.)"""
    logger = logging.getLogger("quire")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s {name} %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
