"""The commands of `turngate`. Each imports its dependencies when it runs, which keeps `--help` fast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, TypeVar

import typer

from turngate import __version__
from turngate.cli import options as flags
from turngate.errors import ConfigError, TurngateError

if TYPE_CHECKING:
    from turngate.config import ServeConfig

T = TypeVar("T")
app = typer.Typer(
    name="turngate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The token-exact gateway for training coding agents.",
)
agents_app = typer.Typer(help="List, install and check agents.")
app.add_typer(agents_app, name="agents")
tasks_app = typer.Typer(help="List and check tasks.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
engines_app = typer.Typer(help="List, add, drain and remove the engines of a running gateway.", no_args_is_help=True)
app.add_typer(engines_app, name="engines")
projects_app = typer.Typer(help="List and create the projects of a running gateway.", no_args_is_help=True)
app.add_typer(projects_app, name="projects")
keys_app = typer.Typer(help="List, create, rotate and revoke the API keys of projects.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The token-exact gateway for training coding agents."""


@app.command()
@flags.takes(flags.ServeOptions, flags.SERVE_SETTINGS)
def serve(options: flags.ServeOptions) -> None:
    """Start the gateway."""
    from turngate.cli.cell import load_serve_config

    _serve(_or_exit(lambda: load_serve_config(options)))


@app.command()
@flags.takes(flags.ServeOptions, flags.ALL_SETTINGS)
def cell(options: flags.ServeOptions) -> None:
    """Start a gateway that is one of many: a cell, which ships its sessions to a shared store (needs the `postgres` extra).

    A cell serves while it holds a lease in the shared store. See docs/cells.md.
    """
    from turngate.cli.cell import load_cell_config

    _serve(_or_exit(lambda: load_cell_config(options)))


def _serve(config: ServeConfig) -> None:
    from turngate.telemetry import logs

    if config.workers > 1:
        from turngate.server.workers.front import run
    else:
        from turngate.server.run import run

    with logs.log_to_stderr(config.log_format):
        _or_exit(lambda: run(config))


@app.command()
@flags.takes(flags.DoctorOptions, flags.ALL_SETTINGS)
def doctor(options: flags.DoctorOptions) -> None:
    """Check that everything is installed and configured, and suggest fixes.

    Accepts the settings of `turngate serve`. Use --gateway to check a running gateway instead.

    Exit codes:
    0 if no check failed (there may be warnings);
    1 if a check failed;
    2 if an option is invalid.
    """
    from turngate.cli.doctor import run_checks

    if not _or_exit(lambda: run_checks(options)):
        raise typer.Exit(1)


@app.command()
def certify(
    tokenizer: Annotated[
        str, typer.Argument(help="Folder with tokenizer.json and a chat template, or a name in the Hugging Face cache.")
    ],
    model: Annotated[str, typer.Option(help="Model name, used to choose the renderer family.")] = "",
    family: Annotated[
        str, typer.Option(help="Renderer family: auto, template, or a family from the `renderers` package.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that extending sampled ids yields the same prompt as rendering the whole conversation with the chat template.

    Exit codes:
    0 if the prompts are the same;
    1 if they differ;
    2 if an option is invalid.
    """
    from turngate.cli.certify import certify_tokenizer

    if not _or_exit(lambda: certify_tokenizer(tokenizer, model, family, as_json)):
        raise typer.Exit(1)


@app.command()
def show(
    session: Annotated[str, typer.Argument(help="Session id, a unique prefix of one, or `last`.")] = "last",
    data: Annotated[str, typer.Option(help="Data folder with the recorded session.")] = "turngate-data",
    gateway: Annotated[
        str,
        typer.Option(
            help="URL of a running gateway to read from instead of the data folder. Set TURNGATE_ADMIN_KEY to its key."
        ),
    ] = "",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print tokens instead of text, coloured by log-probability.")
    ] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer to decode the ids with, if the recorded one is not on this machine.")
    ] = "",
    full: Annotated[bool, typer.Option("--full", help="Print long messages in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a session's conversation, roles, branches and training rows."""
    from turngate.cli.show import show_session

    _or_exit(lambda: show_session(session, data, gateway, tokens, tokenizer, full, as_json))


@app.command()
@flags.takes(flags.RunOptions, flags.RUN_SETTINGS)
def run(options: flags.RunOptions) -> None:
    """Run an agent on one task in a sandbox, record every token, and grade the result.

    Exit codes:
    0 if the agent finished, regardless of its reward;
    1 if it failed, timed out or reached a limit;
    2 if an option is invalid;
    3 if something other than the agent failed;
    130 if stopped by Ctrl-C.
    """

    def action() -> int:
        from turngate.cli.run import run_rollout

        with _telemetry(options.log_format, options.spans):
            return run_rollout(options)

    raise typer.Exit(_or_exit(action))


@app.command(cls=flags.ClusterCommand)
@flags.takes(flags.BatchOptions, flags.RUN_SETTINGS)
def batch(options: flags.BatchOptions) -> None:
    """Run n rollouts of each task, resuming the batch if it already exists.

    Exit codes:
    0 if every rollout finished, regardless of its outcome;
    2 if an option is invalid;
    3 if the batch stopped early;
    130 if stopped by Ctrl-C.
    """

    def action() -> int:
        from turngate.cli.batch import run_batch

        with _telemetry(options.log_format, options.spans):
            return run_batch(options)

    raise typer.Exit(_or_exit(action))


@app.command(cls=flags.ClusterCommand)
@flags.takes(flags.TrainOptions)
def train(options: flags.TrainOptions) -> None:
    """Train a model with GRPO on the rewards of an agent's rollouts (needs the `local` extra).

    The trainer, the gateway and the engine run in this process. With --ray, the agents run on the nodes of a Ray cluster.

    Exit codes:
    0 if training reached the last step;
    2 if an option is invalid;
    3 if no rollout was graded;
    130 if stopped by Ctrl-C.
    """

    def action() -> int:
        from turngate.cli.train import train_model

        with _telemetry(options.log_format, options.spans):
            return train_model(options)

    raise typer.Exit(_or_exit(action))


@app.command()
@flags.takes(flags.VerifyCommandOptions)
def verify(options: flags.VerifyCommandOptions) -> None:
    """Prove that recorded sessions are exact, independently of the code that recorded them.

    Exit codes:
    0 if no errors were found;
    1 if errors were found;
    2 if a session could not be read or a requested check could not be performed.
    """
    from turngate.cli.verify import verify_sessions

    if not _or_exit(lambda: verify_sessions(options)):
        raise typer.Exit(1)


@app.command("mark-restored")
def mark_restored(
    data: Annotated[
        str, typer.Option(help="Data folder, or postgresql:// address of a shared store.")
    ] = "turngate-data",
) -> None:
    """Note that a store was restored from a backup, so that nothing is trained twice.

    Cells do this themselves if the shared store lacks a session that they have shipped.
    """
    from turngate.cli.restored import mark_restored

    _or_exit(lambda: mark_restored(data))


@app.command()
@flags.takes(flags.ExportOptions)
def export(options: flags.ExportOptions) -> None:
    """Export recorded rollouts to training files.

    A gateway may be serving the data folder at the same time.
    """
    from turngate.cli.export import export_rollouts

    _or_exit(lambda: export_rollouts(options))


@app.command()
@flags.takes(flags.McpOptions)
def mcp(options: flags.McpOptions) -> None:
    """Serve rollouts as MCP tools over stdin and stdout, or over HTTP (needs the `mcp` extra).

    HTTP clients need a key: the value of TURNGATE_MCP_KEY, or else the key written to DATA/mcp-key on first start.
    """

    def action() -> None:
        from turngate.cli.mcp import serve_mcp

        with _telemetry(options.log_format, options.spans):
            serve_mcp(options)

    _or_exit(action)


@agents_app.callback(invoke_without_command=True)
def agents(context: typer.Context) -> None:
    """List the available agents: the presets and your own files."""
    if context.invoked_subcommand is None:
        from turngate.cli.agents import list_agents

        _or_exit(list_agents)


@agents_app.command("install")
def agents_install(
    names: Annotated[list[str], typer.Argument(help="Names of the agents to install.")],
) -> None:
    """Install agents into the cache ahead of a run."""
    from turngate.cli.agents import install_agents

    _or_exit(lambda: install_agents(names))


@agents_app.command("check")
def agents_check(
    name: Annotated[str, typer.Argument(help="Name from `turngate agents`, or path of your own file.")],
    sandbox: Annotated[
        str, typer.Option(help="Sandbox to run the agent in, such as local, bubblewrap or docker.")
    ] = "local",
    image: Annotated[str, typer.Option(help="Container image for the sandbox.")] = "",
    keep: Annotated[
        Optional[Path], typer.Option(help="Folder in which to keep the recording and the agent's files.")
    ] = None,
    settings: Annotated[
        Optional[list[str]], typer.Option("--set", help="Set an option of the agent, as NAME=VALUE; repeatable.")
    ] = None,
) -> None:
    """Run an agent against the scripted engine and check that everything was recorded.

    Exit codes:
    0 if every check passed;
    1 if a check failed;
    2 if an option is invalid.
    """
    from turngate.cli.agents import check_agent

    if not _or_exit(lambda: check_agent(name, sandbox, image, keep, settings or [])):
        raise typer.Exit(1)


@agents_app.command("new")
def agents_new(
    name: Annotated[str, typer.Argument(help="Name of the new agent; its description is written to NAME.toml.")],
    command: Annotated[
        list[str], typer.Argument(help="The agent's command, after --. It may contain placeholders such as {prompt}.")
    ],
    env: Annotated[
        Optional[list[str]],
        typer.Option(help="NAME=VALUE, a variable that the command needs, such as LLM_URL={base_url}/v1. Repeatable."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the command may take.")] = 60.0,
) -> None:
    """Run a command once against the scripted engine, and write a first description of it as an agent.

    The command runs on this machine with an empty HOME, and gets the prompt on standard input unless it contains {prompt} or
    {prompt_file}. Check the result with `turngate agents check ./NAME.toml`.

    Exit codes:
    0 if the description was written;
    2 if an option is invalid or the command did not reach the model.
    """
    from turngate.cli.agents import create_agent

    _or_exit(lambda: create_agent(name, command, env or [], timeout_s))


_GatewayFlag = Annotated[str, typer.Option(help="URL of the gateway. Set TURNGATE_ADMIN_KEY to its key.")]
_EngineArgument = Annotated[str, typer.Argument(metavar="URL", help="URL of the engine.")]
_JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_GATEWAY_URL = "http://127.0.0.1:8700"


@engines_app.command("list")
def list_engines(gateway: _GatewayFlag = _GATEWAY_URL, as_json: _JsonFlag = False) -> None:
    """List the engines and their load: calls that run and wait there, and the use of the KV cache."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.engines(), as_json))


@engines_app.command("add")
def add_engine(
    url: _EngineArgument,
    version: Annotated[
        Optional[int],
        typer.Option(help="Current policy version, if the engine already has its weights.", min=0),
    ] = None,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Add an engine. It loads the current weights before its first call."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.add_engine(url, version), as_json))


@engines_app.command("drain")
def drain_engine(url: _EngineArgument, gateway: _GatewayFlag = _GATEWAY_URL, as_json: _JsonFlag = False) -> None:
    """Give an engine no new calls. Its running calls end, and its sessions move to other engines."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.drain_engine(url), as_json))


@engines_app.command("remove")
def remove_engine(
    url: _EngineArgument,
    limit_s: Annotated[float, typer.Option(help="Wait up to this many seconds for its calls to end.")] = 600.0,
    force: Annotated[bool, typer.Option("--force", help="Do not wait; its running calls fail.")] = False,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Drain an engine, and remove it when its calls have ended."""
    from turngate.cli.engines import change_engines

    _or_exit(
        lambda: change_engines(gateway, lambda client: client.remove_engine(url, limit_s=limit_s, force=force), as_json)
    )


_ProjectFlag = Annotated[str, typer.Option(help="Name of the project.")]
_WeightFlag = Annotated[Optional[float], typer.Option(help="Share of crowded engines, relative to other projects.")]
_LiveFlag = Annotated[Optional[int], typer.Option(help="Quota: open sessions at the same time; 0 for no limit.", min=0)]
_TokensFlag = Annotated[Optional[int], typer.Option(help="Quota: sampled tokens per day; 0 for no limit.", min=0)]
_PrefixArgument = Annotated[str, typer.Argument(metavar="PREFIX", help="Prefix of the key, such as tgp-1a2b3c4d.")]
_OutFlag = Annotated[
    Optional[Path], typer.Option(help="Write the key to this new file, readable only by you, instead of printing it.")
]


@projects_app.command("list")
def list_projects(gateway: _GatewayFlag = _GATEWAY_URL, as_json: _JsonFlag = False) -> None:
    """List the projects with their weights and quotas."""
    from turngate.cli.projects import ask, print_projects

    print_projects(_or_exit(lambda: ask(gateway, lambda client: client.projects())), as_json)


@projects_app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Lowercase letters, digits and hyphens.")],
    weight: _WeightFlag = None,
    live_sessions: _LiveFlag = None,
    tokens_per_day: _TokensFlag = None,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Create a project with its own store, which only its keys and the admin key can open."""
    from turngate.cli.projects import ask, parse_quotas, print_projects

    settings = {"weight": weight or 1.0, "quotas": parse_quotas(live_sessions, tokens_per_day) or {}}
    new = _or_exit(lambda: ask(gateway, lambda client: client.create_project(name, **settings)))
    print_projects([new], as_json)


@projects_app.command("change")
def change_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    weight: _WeightFlag = None,
    live_sessions: _LiveFlag = None,
    tokens_per_day: _TokensFlag = None,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Change the weight of a project, or replace its quotas. If you pass one quota, the others are removed."""
    from turngate.cli.projects import ask, parse_quotas, print_projects

    settings = {"weight": weight, "quotas": parse_quotas(live_sessions, tokens_per_day)}
    changed = _or_exit(lambda: ask(gateway, lambda client: client.change_project(name, **settings)))
    print_projects([changed], as_json)


@keys_app.command("list")
def list_keys(project: _ProjectFlag = "", gateway: _GatewayFlag = _GATEWAY_URL, as_json: _JsonFlag = False) -> None:
    """List the keys of one project, or of all. The keys themselves are not stored."""
    from turngate.cli.projects import ask, print_keys

    print_keys(_or_exit(lambda: ask(gateway, lambda client: client.keys(project))), as_json)


@keys_app.command("create")
def create_key(
    scope: Annotated[list[str], typer.Option(help="What the key may do: sessions, traces, feed or admin. Repeatable.")],
    project: _ProjectFlag = "",
    note: Annotated[str, typer.Option(help="Note for the list of keys, such as who uses this one.")] = "",
    days: Annotated[Optional[float], typer.Option(help="Days until the key expires. Default: never.")] = None,
    out: _OutFlag = None,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    from turngate.cli.projects import create_key, show_new_key

    seconds = None if days is None else days * 86400
    new = _or_exit(
        lambda: create_key(gateway, lambda client: client.create_key(scope, project, note=note, expires_s=seconds), out)
    )
    show_new_key(new, out, as_json)


@keys_app.command("rotate")
def rotate_key(
    prefix: _PrefixArgument,
    grace_hours: Annotated[float, typer.Option(help="Hours for which the old key stays valid.", min=0)] = 24.0,
    out: _OutFlag = None,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Replace a key with a new one that has the same scopes, and print the new one."""
    from turngate.cli.projects import create_key, show_new_key

    new = _or_exit(lambda: create_key(gateway, lambda client: client.rotate_key(prefix, grace_hours * 3600), out))
    show_new_key(new, out, as_json)


@keys_app.command("revoke")
def revoke_key(prefix: _PrefixArgument, gateway: _GatewayFlag = _GATEWAY_URL, as_json: _JsonFlag = False) -> None:
    """Revoke a key. It stops working within a second, or within five seconds in cells."""
    from turngate.cli.projects import ask, print_keys

    print_keys([_or_exit(lambda: ask(gateway, lambda client: client.revoke_key(prefix)))], as_json)


@app.command()
def audit(
    project: _ProjectFlag = "",
    after: Annotated[int, typer.Option(help="Show only entries after this number.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="Maximum number of entries.", min=1, max=1000)] = 100,
    gateway: _GatewayFlag = _GATEWAY_URL,
    as_json: _JsonFlag = False,
) -> None:
    """Show who created, rotated or revoked keys, changed projects, deleted sessions, loaded weights or exported data."""
    from turngate.cli.projects import ask, print_audit

    print_audit(_or_exit(lambda: ask(gateway, lambda client: client.audit(project, after, limit))), as_json)


@tasks_app.command("list")
@flags.takes(flags.ListTasksOptions)
def tasks_list(options: flags.ListTasksOptions) -> None:
    """List tasks.

    Exit codes:
    0 if every task could be read;
    1 if a task could not be read;
    2 if an option is invalid.
    """
    from turngate.cli.tasks import list_tasks

    if not _or_exit(lambda: list_tasks(options)):
        raise typer.Exit(1)


@tasks_app.command("check")
@flags.takes(flags.CheckTasksOptions)
def tasks_check(options: flags.CheckTasksOptions) -> None:
    """Check that tasks are valid and that their graders work.

    A task is proven if its solution scores 1 and doing nothing scores 0.

    Exit codes:
    0 if every task passed;
    1 if a task failed;
    2 if an option is invalid.
    """
    from turngate.cli.tasks import check_tasks

    if not _or_exit(lambda: check_tasks(options)):
        raise typer.Exit(1)


@contextmanager
def _telemetry(log_format: str, with_spans: bool) -> Iterator[None]:
    """Set up logs and spans for a command that runs rollouts."""
    from turngate.telemetry import logs, spans

    if log_format not in ("text", "json"):
        raise ConfigError(f"log_format must be text or json, not {log_format!r}", param="log_format")
    with (
        logs.log_to_stderr("json", logging.INFO)
        if log_format == "json"
        else logs.log_to_stderr("text", logging.WARNING)
    ):
        if spans.is_enabled(with_spans):
            spans.start_tracing("turngate-runner")
        try:
            yield
        finally:
            spans.stop_tracing()


def _or_exit(action: Callable[[], T]) -> T:
    """Run an action. Print an error in one line and exit with code 2, or exit with code 130 after Ctrl-C."""
    try:
        return action()
    except TurngateError as error:
        typer.echo(f"turngate: {error.message}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("turngate: stopped", err=True)
        raise typer.Exit(130) from None
