"""The command line: what it says, what it passes on, how it fails."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import quire
from quire.cluster import cli
from quire.engine.errors import ConfigError
from quire.engine.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """Answers every prompt with its own text, in two pieces. `made` holds the arguments of each one made."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **engine: Any) -> None:
        self.made.append(engine)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def generate(self, prompts: list[str], params: Any, *, use_tqdm: bool) -> list[RequestOutput]:
        choices = [self._choice(i, prompts[0], params) for i in range(params.n)]
        return [
            RequestOutput(request_id="0", prompt=prompts[0], prompt_token_ids=[1, 2], outputs=choices, finished=True)
        ]

    def stream(self, prompt: Any, params: Any) -> Any:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        for piece in (text[:3], text[3:]):
            choice = self._choice(0, piece, params)
            yield RequestOutput(request_id="0", prompt=None, prompt_token_ids=[], outputs=[choice], finished=False)

    @staticmethod
    def _choice(index: int, text: str, params: Any) -> CompletionOutput:
        return CompletionOutput(index=index, text=text, token_ids=[7], finish_reason="length")

    def shutdown(self) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `quire ARGS...` in this process: status, stdout, stderr."""

    def run_command(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quire", *args])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: stdin, isatty=lambda: False))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    FakeLLM.made = []
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    return run_command


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the service, which is not started."""
    from quire.cluster.service import serve as real_serve

    calls: list[dict[str, Any]] = []

    def serve(config: Path | None, **options: Any) -> None:
        inspect.signature(real_serve).bind(config, **options)
        calls.append({"config": config, **options})

    monkeypatch.setitem(sys.modules, "quire.cluster.service", SimpleNamespace(serve=serve))
    return calls


def test_help_and_version_import_nothing_heavy() -> None:
    heavy = {"torch", "ray", "transformers", "fastapi", "aiohttp", "httpx", "numba", "numpy", "asyncio"}
    script = (
        "import sys\nfrom quire.cluster import cli\nsys.argv = ['quire', 'version']\n"
        "try: cli.main()\nexcept SystemExit as e: assert e.code == 0\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[0] == f"quire {quire.__version__}"
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("bench",),
        *[(c, "--help") for c in ("serve", "config", "deploy", "status", "top", "generate", "chat", "check", "bench")],
        ("bench", "serve", "-h"),
    ],
)
def test_help(run: Any, args: tuple[str, ...]) -> None:
    status, out, err = run(*args)
    assert status == 0
    assert out.startswith("Usage: quire")
    assert err == ""


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "check"])
def test_every_command_has_examples_and_the_engine_options(run: Any, command: str) -> None:
    _, out, _ = run(command, "--help")
    assert f"quire {command}" in out.split("Example", 1)[1]
    assert "--max-num-batched-tokens" in out
    assert "--no-enable-prefix-caching" in out
    assert "Most requests that run at the same time. (default: 128)" in " ".join(out.split())
    assert ("--served-model-name" in out) == (command == "serve")


@pytest.mark.parametrize("command", ["deploy", "status", "top"])
def test_commands_for_services_elsewhere_have_examples(run: Any, command: str) -> None:
    _, out, _ = run(command, "--help")
    assert out.split("Examples:", 1)[1].count(f"quire {command}") + out.count(f"quire\n  {command}") >= 2


def test_serve_without_options(run: Any, served: list[dict[str, Any]]) -> None:
    assert run("serve") == (0, "", "")
    assert served == [
        {"config": None, "overrides": {}, "host": None, "port": None, "grpc_port": None, "dashboard": False}
    ]


def test_serve_passes_only_what_was_given(run: Any, served: list[dict[str, Any]]) -> None:
    args = "serve x.yaml --host 0.0.0.0 --port 81 --model m --dtype bfloat16 --tensor-parallel-size 2 --max-num-seqs 4"
    assert run(*args.split(), "--no-enable-prefix-caching", "--block-size", "32")[0] == 0
    (call,) = served
    assert call["config"] == Path("x.yaml")
    assert (call["host"], call["port"]) == ("0.0.0.0", 81)
    assert call["overrides"] == {
        "model": {"model": "m", "dtype": "bfloat16"},
        "parallel": {"tensor_parallel_size": 2},
        "scheduler": {"max_num_seqs": 4},
        "cache": {"block_size": 32, "enable_prefix_caching": False},
    }


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("srve",), "Did you mean 'serve'?"),
        (("serve", "--prot", "1"), "--port"),
        (("serve", "--max-nun-seqs", "1"), "--max-num-seqs"),
        (("serve", "--port", "0"), "--port"),
        (("serve", "--port", "x"), "--port"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs"),
        (
            ("serve", "--policy", "priority"),
            "It is set in a config file, as scheduler.policy (`quire config` prints one).",
        ),
        (("generate", "--chat-template", "x", "hi"), "as model.chat_template"),
        (("serve", "--gpu-memory-utilization", "2"), "--gpu-memory-utilization: Input should be less than"),
        (("serve", "--block-size", "999"), "--block-size: Input should be less than or equal to 256"),
        (("serve", "--dtype", "float31"), "'float32'"),
        (("generate",), "prompt"),
        (("bench", "serve", "--concurrency", "1,x"), "--concurrency"),
        (("bench", "serve", "--concurrency", "0"), "--concurrency"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    run: Any, served: list[dict[str, Any]], args: tuple[str, ...], named: str
) -> None:
    status, out, err = run(*args)
    assert (status, out, served) == (2, "", [])
    assert err.startswith("quire: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_known_error_is_one_line_and_status_1(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**engine: Any) -> None:
        raise ConfigError("model: there is no directory 'x'.")

    monkeypatch.setattr(quire, "LLM", refuse)
    assert run("generate", "hello", "--model", "x") == (1, "", "quire: model: there is no directory 'x'.\n")


def test_sampling_options_are_judged_by_the_sampling_parameters(run: Any) -> None:
    status, _, err = run("generate", "hello", "--top-p", "1.5")
    assert status == 1
    assert err == "quire: top_p: must be a number > 0 and <= 1, got 1.5.\n"


def test_interrupt_is_status_130_without_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**engine: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quire, "LLM", interrupt)
    assert run("generate", "hello") == (130, "", "")


def test_generate_streams_the_answer(run: Any) -> None:
    assert run("generate", "once upon", "--max-num-seqs", "2") == (0, "once upon\n", "")
    assert FakeLLM.made == [{"max_num_seqs": 2}]


def test_generate_reads_standard_input(run: Any) -> None:
    assert run("generate", "-", stdin="from a file") == (0, "from a file\n", "")


def test_generate_many_answers(run: Any) -> None:
    assert run("generate", "hi", "-n", "2") == (0, "--- 0\nhi\n--- 1\nhi\n", "")


def test_generate_json(run: Any) -> None:
    _, out, _ = run("generate", "hi", "--json")
    choice = {"index": 0, "text": "hi", "token_ids": [7], "finish_reason": "length", "stop_reason": None}
    assert json.loads(out) == {"prompt_token_ids": [1, 2], "outputs": [choice]}


def test_chat_offline_keeps_and_resets_the_conversation(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["first", "", "second", "/reset", "third"])
    asked: list[list[dict[str, str]]] = []
    stream = FakeLLM.stream

    def remember(self: FakeLLM, prompt: Any, params: Any) -> Any:
        asked.append(prompt)
        return stream(self, prompt, params)

    def read(_prompt: str = "") -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(FakeLLM, "stream", remember)
    monkeypatch.setattr("builtins.input", read)
    assert run("chat", "--system", "S") == (0, "first\nsecond\nthird\n", "")
    system = {"role": "system", "content": "S"}
    first = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "first"}]
    assert asked == [
        [system, first[0]],
        [system, *first, {"role": "user", "content": "second"}],
        [system, {"role": "user", "content": "third"}],
    ]


def test_chat_without_a_server(run: Any) -> None:
    status, out, err = run("chat", "--url", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err.startswith("quire: No model answers at http://127.0.0.1:1/v1")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "scheduler", "router", "kernels", "offline"])
def test_results_that_could_not_be_written_are_not_measured(run: Any, command: str, tmp_path: Path) -> None:
    status, _, err = run("bench", command, "--json", str(tmp_path / "no" / "result.json"))
    assert status == 2
    assert f"{tmp_path}/no/result.json cannot be written (No such file or directory)" in err
    assert len(err.splitlines()) == 1


def test_a_file_for_results_is_not_made_before_there_are_any(run: Any, tmp_path: Path) -> None:
    (old := tmp_path / "old.json").write_text("{}")
    for path in (old, tmp_path / "new.json"):
        assert run("bench", "scheduler", "--running", "no", "--json", str(path))[0] == 2
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"old.json": "{}"}


@pytest.mark.parametrize("command", [("chat",), ("bench", "serve"), ("status",), ("top",), ("chaos", "kill-engine")])
@pytest.mark.parametrize("key", ["schl\u00fcssel", "two\nlines"])
def test_an_api_key_that_no_header_can_carry(run: Any, command: tuple[str, ...], key: str) -> None:
    status, out, err = run(*command, "--api-key", key)
    assert (status, out) == (2, "")
    option = "'--api-key' (env var: 'OPENAI_API_KEY')"
    assert err == f"quire: Invalid value for {option}: must be of printable ASCII characters\n"


def in_a_process(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    code = "from quire.cluster.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, timeout=60, **options)


def test_a_prompt_that_is_no_text() -> None:
    done = in_a_process("generate", "-", input=b"\xff\xfe")
    assert (done.returncode, done.stderr) == (2, b"quire: Invalid value for PROMPT: is not text in UTF-8\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("command", ["config", "version"])
def test_a_full_disk(command: str) -> None:
    with open("/dev/full", "wb") as full:
        done = in_a_process(command, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"quire: No space left on device\n")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); from quire.cluster.cli import main; main()"
    command = [sys.executable, "-c", code, "check", "some-model"]
    done = subprocess.run(command, cwd=gone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "quire: The working directory is not there any more.\n")
