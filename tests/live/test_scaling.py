"""Engines come and go under load, on Ray: nothing fails, and every answer is what it would have been."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cluster_processes import processes, wait_for

from quire.cluster.config import ENGINE, GATEWAY, QuireConfig
from quire.cluster.ray_local import free_ports
from quire.cluster.service_http import Service
from quire.engine.errors import QuireError

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("models", "unit")]

pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
APPLICATION, MODEL = "scaling", "tiny"
ENGINES, GATEWAYS = f"ray::ServeReplica:{APPLICATION}:Engine", f"ray::ServeReplica:{APPLICATION}:Gateway"
LONGEST = 32_768  # tokens of a context
NUM_STREAMS = 4
NUM_LONG_STREAMS = 3 * NUM_STREAMS + 4  # on three engines: one has more of them than there are others
PROMPT_TOKENS = 40
START_S = 90.0  # in which an engine starts beside one that works, on a slow machine too; the old one waits as long
NUM_LONG = 3000  # tokens of an answer that is still under way when something happens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights that starts in a second, and its tokenizer. It has sizes for which logits have the
    same bits however many rows are computed: answers to seeds that nobody has chosen are compared here.
    """
    from small_tokenizers import byte_level
    from tiny_llama import make_tiny_llama

    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, vocab_size=512, intermediate_size=80, max_position_embeddings=LONGEST)
    byte_level().backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def root(cluster: str) -> Iterator[str]:
    """Where Serve listens; it is started here unless another test has done so."""
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        yield f"http://127.0.0.1:{client.http_config.port}"
        return
    (port,) = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture
def deploy(root: str, model: Path) -> Iterator[Callable[..., str]]:
    """Deploys, or deploys anew, with these options of the engines; returns the URL of the service."""
    from ray import serve

    from quire.cluster.app import bind

    def run(engine: dict[str, Any], max_num_seqs: int = 32, num_gateways: int = 1) -> str:
        config = QuireConfig.model_validate(
            {
                "model": {"model": str(model), "served_model_name": MODEL, "device": "cpu", "num_threads": 1},
                "cache": {"num_kv_blocks": 4096},
                "scheduler": {"max_num_seqs": max_num_seqs},
            }
        )
        options = {ENGINE: {"health_check_period_s": 1.0, **engine}, GATEWAY: {"num_replicas": num_gateways}}
        serve.run(bind(config, options), name=APPLICATION, route_prefix=f"/{APPLICATION}")
        return f"{root}/{APPLICATION}"

    yield run
    serve.delete(APPLICATION)
    wait_for(lambda: not processes(ENGINES) and not processes(GATEWAYS), 30, lambda: processes("ray::"))


def body(index: int, **fields: object) -> dict[str, object]:
    """Greedy and seeded requests alternate."""
    prompt = [(7 * index + 3 * i) % 199 + 1 for i in range(PROMPT_TOKENS)]
    sampling = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    return {"model": MODEL, "prompt": prompt, "max_tokens": 300, "ignore_eos": True, **sampling, **fields}


def answer(url: str, index: int, until: threading.Event | None = None, at_least: int = 0, **fields: object) -> str:
    """The text of one streamed answer, whole or as far as it has come when `until` is set, but with `at_least` as many
    characters. Whatever else fails."""
    text, ended = "", False
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body(index, stream=True, **fields), timeout=httpx.Timeout(90)
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
            if until is not None and until.is_set() and len(text) >= at_least:
                return text
    assert ended
    return text


class Load:
    """Streams that follow one another, from several clients at a time, until `stop`; each is checked when it ends."""

    def __init__(self, url: str, expected: list[str]) -> None:
        self._url = url
        self._expected = expected
        self._stopping = threading.Event()
        self.num_answers = 0
        self._pool = ThreadPoolExecutor(len(expected))
        self._clients = [self._pool.submit(self._run, index) for index in range(len(expected))]

    def _run(self, index: int) -> None:
        while not self._stopping.is_set():
            assert answer(self._url, index) == self._expected[index]
            self.num_answers += 1

    def stop(self) -> None:
        """Raises what any client has met."""
        self._stopping.set()
        for client in self._clients:
            client.result(120)
        self._pool.shutdown()


def expected_answers(url: str) -> list[str]:
    """Undisturbed, one after the other."""
    found = [answer(url, index) for index in range(NUM_STREAMS)]
    assert len(set(found)) == NUM_STREAMS
    return found


def gateway_log() -> dict[Path, str]:
    """What the gateways of this Ray have said so far of their engines."""
    from ray._private.worker import global_worker

    folder = Path(global_worker.node.get_session_dir_path()) / "logs"
    logs = {path: path.read_text() for path in sorted(folder.rglob("*.err"))}
    return {path: text for path, text in logs.items() if "engine_links" in text}


def handed_over(before: dict[Path, str]) -> bool:
    """Since then, streams have been handed over by engines that leave, and by none that was lost."""
    since = "".join(text[len(before.get(path, "")) :] for path, text in gateway_log().items())
    assert "was lost" not in since, since
    return "streams go on elsewhere" in since


def busiest(url: str) -> psutil.Process:
    """The engine with most streams: with more than those that may end just now, which are those of `Load` and one.

    How many each has is in the service's metrics, and where each listens in what the gateways say.
    """
    streams: dict[str, float] = {}

    def find() -> bool:
        samples = Service(url).samples().items()
        streams.clear()
        streams.update(
            {dict(of)["engine"]: value for (name, of), value in samples if name == "quire:num_requests_running"}
        )
        return max(streams.values(), default=0) > NUM_STREAMS + 1

    wait_for(find, 30, lambda: streams)
    engine_id = max(streams, key=lambda engine: streams[engine])
    port = re.findall(rf"Connected to engine {engine_id} at [^:]+:(\d+)", "".join(gateway_log().values()))[-1]
    return next(
        engine
        for engine in processes(ENGINES)
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == int(port) for c in engine.net_connections())
    )


def health(url: str) -> tuple[int, str]:
    response = httpx.get(f"{url}/health")
    return response.status_code, response.json()["status"]


def num_running_engines() -> int:
    from ray import serve

    deployments = serve.status().applications[APPLICATION].deployments
    return deployments[ENGINE].replica_states.get("RUNNING", 0)


def test_a_new_configuration_under_load(deploy: Callable[..., str]) -> None:
    """The old engine works on until the new one is there, and hands over. Then the new one, which is alone, gets a
    SIGTERM: its streams wait for the engine that Serve starts, and go on there.
    """
    options = {"num_replicas": 1, "graceful_shutdown_timeout_s": START_S}
    url = deploy(options)
    expected = expected_answers(url)
    load = Load(url, expected)
    wait_for(lambda: load.num_answers > 2, 60)
    before = gateway_log()
    is_enough = threading.Event()  # however fast the machine, this stream is there when the old engine leaves
    long = ThreadPoolExecutor(1).submit(answer, url, 1, is_enough, max_tokens=LONGEST - 100)
    (old,) = processes(ENGINES)
    started = time.monotonic()
    deploying = ThreadPoolExecutor(1).submit(deploy, options, max_num_seqs=24)  # it waits for the stream as well
    wait_for(lambda: handed_over(before), START_S)
    is_enough.set()
    assert long.result(90).startswith(expected[1])
    deploying.result(60)
    updated_s = time.monotonic() - started
    wait_for(lambda: not old.is_running() and len(processes(ENGINES)) == 1, 30)
    assert updated_s < START_S, updated_s
    count = load.num_answers
    wait_for(lambda: load.num_answers > count + NUM_STREAMS, 60)
    assert handed_over(before)  # and nothing was lost since
    (alone,) = processes(ENGINES)
    alone.terminate()
    wait_for(lambda: not alone.is_running() and num_running_engines() == 1, 60, lambda: processes("ray::"))
    count = load.num_answers
    wait_for(lambda: load.num_answers > count + NUM_STREAMS, 60)
    load.stop()


def test_one_to_three_engines_and_back_under_load(deploy: Callable[..., str]) -> None:
    """The policy asks for three as long as four streams run. One of them is told to end by SIGTERM, the others by Serve
    when less is to be done: all hand over.
    """
    scaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1.0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 1.0,
        "policy": {
            "policy_function": "quire.cluster.autoscaling:EngineLoadPolicy",
            "policy_kwargs": {"target_requests_per_engine": 1},
        },
    }
    url = deploy({"autoscaling_config": scaling})
    expected = expected_answers(url)
    load = Load(url, expected)
    wait_for(lambda: num_running_engines() == 3, 60, lambda: num_running_engines())
    count, before = load.num_answers, gateway_log()
    wait_for(lambda: load.num_answers > count + NUM_STREAMS, 60)
    is_enough = threading.Event()  # however slow the machine, streams are there when the engine is told to end
    pool = ThreadPoolExecutor(NUM_LONG_STREAMS)
    endless = [
        pool.submit(answer, url, 1, is_enough, len(expected[1]), max_tokens=LONGEST - 100)
        for _ in range(NUM_LONG_STREAMS)
    ]
    long = ThreadPoolExecutor(1).submit(answer, url, 1, max_tokens=4000)
    try:
        terminated = busiest(url)
        terminated.terminate()
        wait_for(lambda: not terminated.is_running(), 10)
        assert handed_over(before)
        count = load.num_answers
        wait_for(lambda: load.num_answers > count + 1, 60)  # not for many: streams without an end fill the caches
    finally:
        is_enough.set()
    load.stop()
    texts = sorted((each.result(90) for each in endless), key=len)
    assert texts[0].startswith(expected[1])
    assert all(texts[-1].startswith(text) for text in texts)  # those that stayed where they were, too
    wait_for(lambda: num_running_engines() == 1, 60, lambda: num_running_engines())
    assert long.result(90).startswith(expected[1])
    assert answer(url, 0) == expected[0]
    handed_over(before)  # nothing was lost; whether an engine that Serve stopped had a stream just then is chance


def test_scale_to_zero_and_wake(deploy: Callable[..., str]) -> None:
    """Also from the start: the first requests wait in the gateway, and wake an engine; nobody is refused."""
    scaling = {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_delay_s": 1.0,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 1.0,
        "policy": {"policy_function": "quire.cluster.autoscaling:EngineLoadPolicy"},
    }
    url = deploy({"autoscaling_config": scaling})
    assert processes(ENGINES) == []
    wait_for(lambda: health(url) == (200, "asleep"), 10, lambda: health(url))
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        started = time.monotonic()
        first = list(pool.map(lambda index: answer(url, index), range(NUM_STREAMS)))
        woken_s = time.monotonic() - started
        wait_for(lambda: not processes(ENGINES), 60, lambda: processes("ray::"))
        wait_for(lambda: health(url) == (200, "asleep"), 10, lambda: health(url))
        assert list(pool.map(lambda index: answer(url, index), range(NUM_STREAMS))) == first
    assert woken_s < 60, woken_s


def test_gateways_die(deploy: Callable[..., str]) -> None:
    url = deploy({"num_replicas": 1}, num_gateways=2)
    one_of_two_dies(url)
    wait_for(lambda: len(processes(GATEWAYS)) == 2, 60, lambda: processes("ray::"))
    a_stream_goes_on_when_all_have_died(url)


def one_of_two_dies(url: str) -> None:
    """kill -9: its streams break, and the engine ends their work at once. Those of the other gateway are unharmed."""
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(answer, url, index, max_tokens=NUM_LONG) for index in range(6)]
        wait_for(lambda: gauge(url, "num_requests_running") == 6, 30)
        processes(GATEWAYS)[0].kill()

        def num_going_on() -> int:
            return sum(not stream.done() for stream in streams)

        wait_for(lambda: 0 < num_going_on() < 6 and gauge(url, "num_requests_running") == num_going_on(), 10)
        unharmed = [index for index, stream in enumerate(streams) if stream.exception() is None]
        assert 0 < len(unharmed) < 6
        again = {index: pool.submit(answer, url, index, max_tokens=NUM_LONG) for index in unharmed}
    for index in unharmed:
        assert streams[index].result() == again[index].result()
    wait_for(lambda: gauge(url, "num_used_kv_blocks") == 0, 10)


def gauge(url: str, name: str) -> float | None:
    """What the engine says in the service's metrics. None where the gateway that was asked has just died."""
    try:
        return sum(value for (sample, _), value in Service(url).samples().items() if sample == f"quire:{name}")
    except QuireError:
        return None


def whole_events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Id, if there is one, and data of each event. One that is cut off has no empty line behind it: it did not come."""
    event_id, data = "", ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            yield event_id, data
            event_id, data = "", ""


def a_stream_goes_on_when_all_have_died(url: str) -> None:
    """kill -9 of every gateway there is: the client asks again until one is back, and gets the rest. The engine has
    not worked for nobody meanwhile.
    """
    request = {**body(0, max_tokens=1500, stream=True), "seed": None}  # nobody but the engine knows the seed
    headers = {"x-request-id": "a-stream-of-mine"}
    text, last, ended = "", "", False
    gateways = processes(GATEWAYS)
    assert len(gateways) == 2
    deadline = time.monotonic() + 60
    while not ended:
        assert time.monotonic() < deadline, text
        resume = {"Last-Event-ID": last} if last else {}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=request, headers=headers | resume) as response:
                if response.status_code != 200:
                    time.sleep(0.2)
                    continue
                for event_id, data in whole_events(response):
                    last = event_id or last
                    if data == "[DONE]":
                        ended = True
                        continue
                    event = json.loads(data)
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    if last.startswith("20-"):
                        while gateways:
                            gateways.pop().kill()
                        engine = processes(ENGINES)[0]
                        wait_for(lambda engine=engine: engine.cpu_percent(0.5) < 20, 30)
        except httpx.TransportError:
            time.sleep(0.2)
    assert last.startswith("1500e-")
    # The same from the beginning, with the seed that the engine had drawn: it is remembered once more.
    again = {**headers, "Last-Event-ID": last.replace("1500e", "1", 1)}
    response = httpx.post(f"{url}/v1/completions", json=request, headers=again, timeout=60)
    rest = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    assert text.endswith("".join(event["choices"][0]["text"] for event in rest))
    assert len(rest) > 100
