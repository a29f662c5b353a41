"""Starts Ray Serve LLM on CPU; run by the Python that has it: MODEL CHECKPOINT DTYPE MAX_MODEL_LEN PORT.

A Ray of its own, with its own folder; it ends with this process.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main(model: str, checkpoint: str, dtype: str, max_model_len: str, port: str) -> None:
    folder = tempfile.mkdtemp(prefix="ray-llm-")
    try:
        # Ray gives each actor a core or more of those it is told of: as many as all of its parts may ask for.
        ray.init(address="local", num_cpus=8, include_dashboard=False, _temp_dir=folder)
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        config = LLMConfig(
            model_loading_config={"model_id": model, "model_source": checkpoint},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
            accelerator_config={"kind": "cpu"},
            engine_kwargs={
                "dtype": dtype,
                "max_model_len": int(max_model_len),
                "enable_prefix_caching": True,
                "enable_prompt_tokens_details": True,
            },
        )
        serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
