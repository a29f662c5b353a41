"""Models of `transformers` over our paged KV cache, for architectures that our own decoder does not know.

`transformers` computes everything but attention; `interface` takes over its attention calls. `probe` runs the model
once on the meta device to see what those calls look like, and refuses models that cannot work this way; `model` is the
model as the worker sees it; `weights` fills it; `self_check` looks at what can only be seen with weights.
"""

from .blueprint import FallbackBlueprint

__all__ = ["FallbackBlueprint"]
