"""JSON schema of the part of KubeRay's RayService (ray.io/v1) that our manifest uses.

No Python package carries KubeRay's CRDs, so this is written from the documented fields of its API types
(RayServiceSpec, RayClusterSpec, HeadGroupSpec, WorkerGroupSpec, AutoscalerOptions) and of Kubernetes' pod template.
Strict: what is not named here is a typo, or has to be looked up and added.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_STRING = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}  # rayStartParams: numbers must be quoted
_QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|[KMGT]i?)?$"}}
_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}

_CONTAINER = _object(
    ["name", "image", "resources"],
    name=_NAME,
    image=_STRING,
    ports=_list(
        _object(
            ["name", "containerPort"], name=_NAME, containerPort={"type": "integer", "minimum": 1, "maximum": 65535}
        )
    ),
    env=_list(_object(["name", "value"], name=_STRING, value={"type": "string"})),
    resources=_object(["requests", "limits"], requests=_QUANTITIES, limits=_QUANTITIES),
)
_POD_TEMPLATE = _object(
    ["spec"],
    spec=_object(["containers"], containers=_list(_CONTAINER), terminationGracePeriodSeconds=_COUNT),
)
_HEAD_GROUP = _object(
    ["rayStartParams", "template"],
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    rayStartParams=_STRINGS,
    template=_POD_TEMPLATE,
)
_WORKER_GROUP = _object(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName=_NAME,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts=_COUNT,
    rayStartParams=_STRINGS,
    template=_POD_TEMPLATE,
)
_RAY_CLUSTER = _object(
    ["headGroupSpec", "workerGroupSpecs", "rayVersion"],
    rayVersion=_STRING,
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=_object(
        [], upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]}, idleTimeoutSeconds=_COUNT
    ),
    headGroupSpec=_HEAD_GROUP,
    workerGroupSpecs=_list(_WORKER_GROUP),
)

RAY_SERVICE = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object(["name"], name=_NAME, namespace=_NAME, labels=_STRINGS),
    spec=_object(["serveConfigV2", "rayClusterConfig"], serveConfigV2=_STRING, rayClusterConfig=_RAY_CLUSTER),
)
