"""The commands. Heavy imports wait until a command needs them, so that `--help` is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional, TypeVar

import typer

from turngate import __version__
from turngate.errors import TurngateError

T = TypeVar("T")
app = typer.Typer(
    name="turngate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The token-exact gateway for training coding agents.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The token-exact gateway for training coding agents."""


@app.command()
def serve(
    config: Annotated[
        Optional[Path], typer.Option(help="A TOML file with any of these settings; flags win over it.")
    ] = None,
    host: Annotated[Optional[str], typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[Optional[int], typer.Option(help="Port to listen on; 0 takes a free one. [8700]")] = None,
    data: Annotated[Optional[str], typer.Option(help="Folder for everything recorded. [turngate-data]")] = None,
    engine: Annotated[
        Optional[str], typer.Option(help="vllm, sglang, scripted, or openai (observe mode). [scripted]")
    ] = None,
    engine_url: Annotated[
        Optional[list[str]], typer.Option(help="Where the engine listens; repeat for more replicas.")
    ] = None,
    engine_api: Annotated[Optional[str], typer.Option(help="vLLM: completions or generate. [completions]")] = None,
    engine_key_env: Annotated[
        Optional[str], typer.Option(help="Name of the environment variable with the engine's key.")
    ] = None,
    engine_ranks: Annotated[Optional[int], typer.Option(help="Data-parallel ranks behind each URL. [1]")] = None,
    engine_silence_s: Annotated[
        Optional[float], typer.Option(help="Seconds without a byte from the engine that are an error. [600]")
    ] = None,
    script: Annotated[Optional[str], typer.Option(help="Scripted engine: a JSON list of replies.")] = None,
    capture: Annotated[Optional[str], typer.Option(help="Observe mode: auto, tokens, logprobs or text. [auto]")] = None,
    model: Annotated[Optional[str], typer.Option(help="The model's name, for agents and engine.")] = None,
    tokenizer: Annotated[Optional[str], typer.Option(help="Folder with tokenizer.json and a chat template.")] = None,
    family: Annotated[
        Optional[str], typer.Option(help="auto, template, or a family of the `renderers` package. [auto]")
    ] = None,
    max_context: Annotated[
        Optional[int], typer.Option(help="The model's context length; asked of the engine if not given.")
    ] = None,
    durability: Annotated[
        Optional[str], typer.Option(help="process or disk: what kind of crash a recorded turn survives. [process]")
    ] = None,
    idle_s: Annotated[Optional[float], typer.Option(help="Seal sessions unused for this long. [86400]")] = None,
    alive_s: Annotated[Optional[float], typer.Option(help="Seconds of silence before a sign of life. [10]")] = None,
    max_body_mb: Annotated[Optional[float], typer.Option(help="Largest request. [64]")] = None,
    open_loopback: Annotated[
        Optional[bool],
        typer.Option("--open-loopback/--no-open-loopback", help="prime-rl API: loopback clients need no key."),
    ] = None,
    log_turns: Annotated[
        Optional[bool], typer.Option("--log-turns/--no-log-turns", help="One log line per turn.")
    ] = None,
    echo_prompt: Annotated[
        Optional[bool],
        typer.Option("--echo-prompt/--no-echo-prompt", help="Have the engine repeat each prompt, and compare."),
    ] = None,
) -> None:
    """Start the gateway."""
    overrides = {name: value for name, value in locals().items() if name != "config"}
    overrides["engine_url"] = engine_url or None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    from turngate.config import load
    from turngate.server.run import run

    _or_exit(lambda: run(load(config, overrides)))


@app.command()
def certify(
    tokenizer: Annotated[
        str, typer.Argument(help="Folder with tokenizer.json and a chat template, or a name in the Hugging Face cache.")
    ],
    model: Annotated[str, typer.Option(help="The model's name, to find its family.")] = "",
    family: Annotated[str, typer.Option(help="auto, template, or a family of the `renderers` package.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Try whether extending sampled ids says what the whole chat template would say, case by case. Exit code 1 if not."""
    from turngate.cli.certify import report

    if not _or_exit(lambda: report(tokenizer, model, family, as_json)):
        raise typer.Exit(1)


@app.command()
def show(
    session: Annotated[str, typer.Argument(help="A session's id, the beginning of it, or `last`.")] = "last",
    data: Annotated[str, typer.Option(help="The data folder that it was recorded in.")] = "turngate-data",
    gateway: Annotated[
        str, typer.Option(help="Ask a running gateway instead; its key comes from TURNGATE_ADMIN_KEY.")
    ] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Tokens, coloured by log-probability.")] = False,
    tokenizer: Annotated[str, typer.Option(help="Read ids with this one, if the recorded one is not here.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Long messages as a whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print a session's conversation, roles, branches and rows."""
    from turngate.cli.show import report

    _or_exit(lambda: report(session, data, gateway, tokens, tokenizer, full, as_json))


def _or_exit(action: Callable[[], T]) -> T:
    try:
        return action()
    except TurngateError as error:
        typer.echo(f"turngate: {error.message}", err=True)
        raise typer.Exit(2) from None
