"""Options that `turngate run` and `turngate batch` have in common: what runs where, against which gateway, within which bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

Agent = Annotated[str, typer.Option(help="A name of `turngate agents`, or a file of your own: ./my-agent.toml.")]
Sandbox = Annotated[str, typer.Option(help="Where agents run: local, bubblewrap, docker, e2b, huggingface.")]
Image = Annotated[str, typer.Option(help="The container image or template to run in. [the task's]")]
Network = Annotated[str, typer.Option(help="none (only the gateway) or open.")]
Config = Annotated[Optional[Path], typer.Option(help="A TOML file with settings of the gateway.")]
Gateway = Annotated[str, typer.Option(help="Use a running gateway; its key comes from TURNGATE_ADMIN_KEY.")]
Data = Annotated[Optional[str], typer.Option(help="Folder for everything recorded. [turngate-data]")]
Engine = Annotated[
    Optional[str], typer.Option(help="vllm, sglang, local, scripted; to observe: openai, anthropic, gemini, responses.")
]
EngineUrl = Annotated[Optional[list[str]], typer.Option(help="Where the engine listens.")]
EngineKeyEnv = Annotated[Optional[str], typer.Option(help="Name of the environment variable with the engine's key.")]
Model = Annotated[Optional[str], typer.Option(help="The model's name, for agent and engine.")]
Tokenizer = Annotated[Optional[str], typer.Option(help="Folder with tokenizer.json and a chat template.")]
Script = Annotated[Optional[str], typer.Option(help="Scripted engine: a JSON list of replies.")]
MaxContext = Annotated[Optional[int], typer.Option(help="The model's context length.")]
Timeout = Annotated[Optional[float], typer.Option(help="Seconds that an agent has. [the task's, or 1800]")]
Grade = Annotated[bool, typer.Option("--grade/--no-grade", help="Have the tasks' graders decide.")]
OnTimeout = Annotated[str, typer.Option(help="An agent that ran out of time: grade, exclude or zero.")]
OnFailure = Annotated[str, typer.Option(help="One that ended with an error: grade, exclude or zero.")]
OnLimit = Annotated[str, typer.Option(help="One whose session met a limit: grade, exclude or zero.")]
OnLost = Annotated[str, typer.Option(help="One that left nothing to grade, by its own doing: exclude or zero.")]
MaxTurns = Annotated[Optional[int], typer.Option(help="Turns that a session may have.")]
MaxTokens = Annotated[Optional[int], typer.Option(help="Tokens that may be sampled in a session.")]
ContextTokens = Annotated[Optional[int], typer.Option(help="What agents are told that the model can take. [131072]")]
Cpus = Annotated[Optional[float], typer.Option(help="CPUs of a sandbox.")]
MemoryMb = Annotated[Optional[int], typer.Option(help="Memory of a sandbox, in megabytes.")]
Set = Annotated[
    Optional[list[str]], typer.Option("--set", help="An option of the agent's own, NAME=VALUE; repeat for more.")
]
LogFormat = Annotated[str, typer.Option(help="Log lines as text, or json: then stages and outcomes are told too.")]
Spans = Annotated[
    bool, typer.Option("--spans", help="OpenTelemetry spans (extra otel); on where OTEL_EXPORTER_OTLP_ENDPOINT is set.")
]
PublicUrl = Annotated[str, typer.Option(help="Where remote sandboxes reach the gateway.")]
Tunnel = Annotated[
    str, typer.Option(help="A command that makes a tunnel to {port} and prints its URL, instead of a public URL.")
]

# What `turngate doctor` has besides the settings of `turngate serve`: kind and default.
DOCTOR: dict[str, tuple[Any, Any]] = {
    "gateway": (
        Annotated[str, typer.Option(help="Examine a gateway that runs; its key comes from TURNGATE_ADMIN_KEY.")],
        "",
    ),
    "agent": (
        Annotated[
            Optional[list[str]], typer.Option(help="Agents that have to be there; repeat for more. [look at all]")
        ],
        None,
    ),
    "sandbox": (
        Annotated[
            Optional[list[str]],
            typer.Option(help="Sandboxes that have to work; repeat for more. [look at local, bubblewrap, docker]"),
        ],
        None,
    ),
    "image": (Annotated[str, typer.Option(help="The container image to try a docker sandbox with.")], ""),
    "only": (Annotated[Optional[list[str]], typer.Option(help="Only this check; repeat for more.")], None),
    "as_json": (Annotated[bool, typer.Option("--json", help="Machine-readable.")], False),
}


def with_settings_of(
    other: Callable[..., None], command: Callable[..., None], own: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """`command`, which takes whatever it is given, with the options of another command and some of its own: name, kind and default."""
    of_other = inspect.signature(other, eval_str=True).parameters.values()
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=kind)
        for name, (kind, d) in own.items()
    ]
    together = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in of_other] + more
    command.__signature__ = inspect.Signature(together, return_annotation=None)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in together}
    return command
