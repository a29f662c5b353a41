"""The `quire` command. Imports that take time happen in the command that needs them, so that help answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire import __version__
from quire.engine.errors import QuireError

from . import cli_cluster
from .bench.commands import app as bench_app
from .cli_options import (
    SERVICE_OPTIONS,
    EngineOverrides,
    flatten,
    header_value,
    help_without_command,
    in_a_file,
    takes_engine_options,
)

if TYPE_CHECKING:
    from quire import RequestOutput

app = typer.Typer(
    name="quire",
    add_completion=False,
    rich_markup_mode=None,  # its tables cut the names of long options at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(
    invoke_without_command=True,
    epilog="Start with:  quire serve   ·   then, in another terminal:  quire chat --url http://127.0.0.1:8000",
)(help_without_command("Serve large language models from a Ray cluster, through OpenAI's API."))
app.add_typer(bench_app, name="bench")

MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this total probability.")]
TopK = Annotated[int, typer.Option(min=-1, help="Keep this many tokens; 0 keeps all.")]
MinP = Annotated[float, typer.Option(help="Keep tokens of at least this share of the likeliest one's probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; can be repeated.")]


@app.command(
    epilog="Examples:  quire serve   ·   quire serve --model /models/my-llama --port 9000   ·   "
    "quire serve configs/smollm2-cpu.yaml --max-num-seqs 32"
)
@takes_engine_options(SERVICE_OPTIONS)
def serve(
    config: Annotated[Path | None, typer.Argument(help="A Ray Serve config file, as those in configs/.")] = None,
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 is every one. (default: CONFIG's, or 127.0.0.1)")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on. (default: CONFIG's, or 8000)")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for gRPC. (default: CONFIG's, or none)")
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard as well.")] = False,
    engine: EngineOverrides,
) -> None:
    """Serve a model on this machine until Ctrl-C. Options override what CONFIG says."""
    from .service import serve as serve_until_interrupted

    serve_until_interrupted(config, overrides=engine, host=host, port=port, grpc_port=grpc_port, dashboard=dashboard)


app.command(
    epilog="Examples:  quire deploy configs/llama-3.1-8b.yaml   ·   "
    "quire deploy --address http://head:8265 --timeout-s 1800 configs/llama-3.1-70b-tp8.yaml"
)(cli_cluster.deploy)
app.command(
    epilog="Examples:  quire status   ·   quire status --address http://127.0.0.1:8265   ·   "
    "quire status --url http://10.0.0.5:8000 --json"
)(cli_cluster.status)
app.command(
    epilog="Examples:  quire top   ·   quire top --url http://10.0.0.5:8000 --interval 1   ·   quire top --once"
)(cli_cluster.top)
app.command(
    epilog="Examples:  quire chaos kill-worker --rank 1   ·   quire chaos drop-step   ·   quire chaos kill-engine"
)(cli_cluster.chaos)


@app.command(
    epilog="Examples:  quire generate 'The capital of France is'   ·   "
    "quire generate --temperature 0.8 --seed 7 -n 3 'Once upon a time'   ·   cat prompt.txt | quire generate -"
)
@takes_engine_options()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    *,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Answers to the prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print tokens and finish reasons as JSON.")] = False,
    engine: EngineOverrides,
) -> None:
    """Continue a prompt in this process, without a server."""
    from quire import LLM, SamplingParams

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise typer.BadParameter("is not text in UTF-8", param_hint="PROMPT") from error
    params = SamplingParams(
        n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        stop=tuple(stop or ()),
    )  # fmt: skip
    with LLM(**flatten(engine)) as llm:
        if as_json or n > 1:
            (output,) = llm.generate([text], params, use_tqdm=False)
            print(_as_json(output) if as_json else "\n".join(f"--- {c.index}\n{c.text}" for c in output.outputs))
            return
        for piece in llm.stream(text, params):
            print(piece.outputs[0].text, end="", flush=True)
        print()


def _as_json(output: RequestOutput) -> str:
    fields = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    choices = [{field: getattr(choice, field) for field in fields} for choice in output.outputs]
    return json.dumps({"prompt_token_ids": output.prompt_token_ids, "outputs": choices})


@app.command(epilog="Examples:  quire chat   ·   quire chat --url http://127.0.0.1:8000 --system 'Answer in rhymes.'")
@takes_engine_options()
def chat(
    *,
    url: Annotated[
        str | None, typer.Option(help="A running server; without it the model runs in this process.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", callback=header_value, help="For --url: a bearer token.")
    ] = None,
    engine: EngineOverrides,
) -> None:
    """Talk to a model in the terminal. /reset forgets the conversation, /exit or Ctrl-D ends it."""
    from .cli_chat import ChatOptions, converse, offline_answers, server_answers

    options = ChatOptions(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if url is None:
        with offline_answers(flatten(engine), options) as answer:
            converse(answer, system)
    else:
        with server_answers(url, engine.get("model", {}).get("model"), api_key, options) as answer:
            converse(answer, system)


@app.command(epilog="Examples:  quire check /models/my-llama   ·   quire check my-model.gguf --tensor-parallel-size 2")
@takes_engine_options()
def check(
    path: Annotated[str | None, typer.Argument(help="A model, as for --model: a directory or a GGUF file.")] = None,
    *,
    engine: EngineOverrides,
) -> None:
    """Say what a model needs, and whether it fits here.

    Nothing is loaded. Status 1 when it does not fit this machine.
    """
    from quire.engine.config import EngineConfig
    from quire.engine.model_source import load_model_info
    from quire.workers.model_check import check_model

    given = {"model": path} if path is not None else {}
    config = EngineConfig.model_validate({**engine, "model": {**engine.get("model", {}), **given}})
    result = check_model(config, load_model_info(config.model))
    print(result)
    if result.capacity is None:
        raise typer.Exit(1)


@app.command(epilog="Examples:  quire config > quire.yaml   ·   quire serve quire.yaml")
def config() -> None:
    """Print a config file with every setting."""
    from .config_template import config_template

    print(config_template(), end="")


@app.command()
def version() -> None:
    """Print the version of Quire and of what it runs on."""
    from .bench.machine import package_versions

    print(f"quire {__version__}")
    for name, number in package_versions().items():
        if name != "quire":
            print(f"{name} {number}")
    print(f"python {sys.version.split()[0]}")


def _said(error: OSError) -> str:
    try:
        os.getcwd()
    except FileNotFoundError:
        return "The working directory is not there any more."
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _forget_output() -> None:
    """What cannot be written must not fail once more when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point. An error that a person can do something about is one line on stderr and a non-zero status.

    Status 2: the command line is wrong. 1: everything else. 130: Ctrl-C.
    """
    try:
        os.getcwd()  # where it is gone, some libraries end the process
        status = app(prog_name="quire", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        status = error.exit_code
        if text := " ".join(error.format_message().split()):
            print(f"quire: {text}{in_a_file(error)}", file=sys.stderr)
    except QuireError as error:
        status = 1
        print(f"quire: {error.message}", file=sys.stderr)
    except OSError as error:  # a full disk, a working directory that is gone
        status = 1
        if not isinstance(error, BrokenPipeError):  # whoever read has seen enough
            print(f"quire: {_said(error)}", file=sys.stderr)
        _forget_output()
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status if isinstance(status, int) else 0)
