"""`python -m tests.live.kill_table`: the kill test with several seeds, and what each fault costs."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.cluster.ray_local import LocalRay, environment, free_ports, make_folder

# `kill-engine` comes last: the engine that replaces it counts from zero.
FAULTS = [("kill-worker", 1), ("stop-worker", 0), ("drop-step", 1), ("kill-worker", 0), ("kill-engine", 0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python -m tests.live.kill_table --seeds 3")
    parser.add_argument("--seeds", type=int, default=3, help="How often to repeat it (default: 3).")
    num_seeds = parser.parse_args().seeds
    folder = make_folder()
    os.environ.update(environment(folder, haproxy=None))  # before anything imports Ray
    from kill_service import MODEL, deploy_tiny, make_model
    from kill_trial import Trial
    from ray import serve

    local = LocalRay.start(folder)
    try:
        (port,) = free_ports(1)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        with tempfile.TemporaryDirectory() as model:
            url = deploy_tiny(f"http://127.0.0.1:{port}", make_model(Path(model)))
            print("| seed | fault | detected in (s) | longest pause (s) | tokens recomputed | streams lost of 13 |")
            print("|---|---|---|---|---|---|")
            for seed in range(num_seeds):
                trial = Trial(url, MODEL, seed)
                for cost in trial.strike(FAULTS):
                    print(
                        f"| {seed} | {cost.fault} | {cost.detected_s:.2f} | {cost.pause_s:.1f} "
                        f"| {cost.recomputed_tokens} | {cost.streams_lost} |",
                        flush=True,
                    )
                trial.check_nothing_is_held()
        serve.shutdown()
    finally:
        local.stop()


if __name__ == "__main__":
    main()
