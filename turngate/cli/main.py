"""The commands of `turngate`. Each command imports its dependencies only when it runs, so that `--help` is fast."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional

import typer

from turngate import __version__
from turngate.cli import options as flags
from turngate.cli.command import CommandGroup, Group
from turngate.cli.exit_codes import or_exit as _or_exit
from turngate.cli.option_command import ClusterCommand, takes
from turngate.cli.project_commands import audit, keys_app, projects_app
from turngate.errors import ConfigError

if TYPE_CHECKING:
    pass


class TurngateCommands(Group):
    """All commands, grouped into the panels that the help shows."""

    panels: ClassVar[Mapping[str, Sequence[str]]] = {
        "Run agents": ("run", "show", "batch", "train", "verify", "export"),
        "Agents and tasks": ("agents", "tasks"),
        "Gateway": ("serve", "cell", "mcp", "engines", "projects", "keys", "audit"),
        "Check the setup": ("doctor", "certify"),
        "Recorded data": ("prune", "load-archive", "mark-restored"),
    }

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in self.panels.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = next(panel for panel, names in self.panels.items() if cmd_name in names)
        return command


app = CommandGroup(
    name="turngate",
    cls=TurngateCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The token-exact gateway for training coding agents.",
)
agents_app = CommandGroup(help="List, install, check and create agents.")
app.add_typer(agents_app, name="agents")
tasks_app = CommandGroup(help="List, check and make tasks.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
make_app = CommandGroup(help="Make tasks.", no_args_is_help=True)
tasks_app.add_typer(make_app, name="make")
engines_app = CommandGroup(help="List, add, drain and remove the engines of a running gateway.", no_args_is_help=True)
app.add_typer(engines_app, name="engines")
app.add_typer(projects_app, name="projects")
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
@takes(flags.ServeOptions, flags.SERVE_SETTINGS)
def serve(options: flags.ServeOptions) -> None:
    """Start the gateway."""
    from turngate.cli.serve import load_serve_config, run_gateway

    _or_exit(lambda: run_gateway(load_serve_config(options)))


@app.command()
@takes(flags.ServeOptions, flags.ALL_SETTINGS)
def cell(options: flags.ServeOptions) -> None:
    """Start a cell: one of several gateways that ship their sessions to a shared store (needs the `postgres` extra).

    A cell serves only while it holds a lease in the shared store. See docs/cells.md.
    """
    from turngate.cli.serve import load_cell_config, run_gateway

    _or_exit(lambda: run_gateway(load_cell_config(options)))


@app.command()
@takes(flags.DoctorOptions, flags.ALL_SETTINGS)
def doctor(options: flags.DoctorOptions) -> None:
    """Check that everything is installed and configured, and suggest fixes.

    The settings of `turngate serve` and `turngate cell` can be passed as flags. To check a running gateway instead, pass --gateway.

    Exit codes:
    0 if no check failed (there may be warnings);
    1 if a check failed;
    2 if an option is invalid or the command could not run.
    """
    from turngate.cli.doctor import run_checks

    if not _or_exit(lambda: run_checks(options)):
        raise typer.Exit(1)


@app.command()
def certify(
    tokenizer: Annotated[
        str,
        typer.Argument(help="Folder with tokenizer.json and a chat template, or a model in the Hugging Face cache."),
    ],
    model: Annotated[str, typer.Option(help="Model name, used to choose the renderer family.")] = "",
    family: Annotated[
        str, typer.Option(help="Renderer family: auto, template, or a family from the `renderers` package.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that extending sampled ids yields the same prompt as rendering the whole conversation with the chat template.

    Exit codes:
    0 if every transition between turns is certified;
    1 if a transition is not certified;
    2 if an option is invalid or the command could not run.
    """
    from turngate.cli.certify import certify_tokenizer

    if not _or_exit(lambda: certify_tokenizer(tokenizer, model, family, as_json)):
        raise typer.Exit(1)


@app.command()
def show(
    session: Annotated[str, typer.Argument(help="Session id, a unique prefix of one, or `last`.")] = "last",
    data: Annotated[
        str, typer.Option(help="Data folder, or postgresql:// address of a shared store.")
    ] = "turngate-data",
    gateway: Annotated[
        str,
        typer.Option(
            help="URL of a running gateway to read from instead of --data. Set TURNGATE_ADMIN_KEY to its key."
        ),
    ] = "",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Print tokens instead of text, colored by log-probability.")
    ] = False,
    tokenizer: Annotated[
        str,
        typer.Option(help="Tokenizer to decode the ids with, if the session's own tokenizer is not on this machine."),
    ] = "",
    full: Annotated[bool, typer.Option("--full", help="Print long messages in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a session's conversation, roles, branches and training rows."""
    from turngate.cli.show import show_session

    _or_exit(lambda: show_session(session, data, gateway, tokens, tokenizer, full, as_json))


@app.command()
@takes(flags.RunOptions, flags.RUN_SETTINGS)
def run(options: flags.RunOptions) -> None:
    """Run an agent on one task in a sandbox, record every token, and grade the result.

    Exit codes:
    0 if the agent finished, regardless of its reward;
    1 if it failed, timed out or reached a limit;
    2 if an option is invalid or the command could not run;
    3 if something other than the agent failed, even if the agent finished;
    130 if the command was stopped by Ctrl-C or because its output was closed, or if the session was ended at the gateway.
    """

    def action() -> int:
        from turngate.cli.run import run_rollout

        with _telemetry(options.log_format, options.spans):
            return run_rollout(options)

    raise typer.Exit(_or_exit(action))


@app.command(cls=ClusterCommand)
@takes(flags.BatchOptions, flags.RUN_SETTINGS)
def batch(options: flags.BatchOptions) -> None:
    """Run n rollouts of each task, resuming the batch if it already exists.

    Exit codes:
    0 if every rollout finished, regardless of its outcome;
    2 if an option is invalid or the command could not run;
    3 if the batch stopped early;
    130 if the command was stopped by Ctrl-C or because its output was closed.
    """

    def action() -> int:
        from turngate.cli.batch import run_batch

        with _telemetry(options.log_format, options.spans):
            return run_batch(options)

    raise typer.Exit(_or_exit(action))


@app.command(cls=ClusterCommand)
@takes(flags.TrainOptions)
def train(options: flags.TrainOptions) -> None:
    """Train a model with GRPO on the rewards of an agent's rollouts (needs the `local` extra).

    The trainer and the engine run in this process. The agents and their gateway run on this machine or, with --ray, on the nodes of a Ray
    cluster (one gateway per node).

    Exit codes:
    0 if training reached the last step and at least one rollout was graded;
    2 if an option is invalid, or if training could not start or failed;
    3 if no rollout was graded;
    130 if the command was stopped by Ctrl-C or because its output was closed.
    """

    def action() -> int:
        from turngate.cli.train import train_model

        with _telemetry(options.log_format, options.spans):
            return train_model(options)

    raise typer.Exit(_or_exit(action))


@app.command()
@takes(flags.VerifyCommandOptions)
def verify(options: flags.VerifyCommandOptions) -> None:
    """Prove that recorded sessions are exact, independently of the code that recorded them.

    Exit codes:
    0 if no errors were found;
    1 if errors were found or, with --all, a session could not be read;
    2 if an option is invalid, the requested session could not be read, or a requested check could not be performed.
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
    """Mark a store as restored from a backup, so that no session is trained on twice.

    A cell marks the shared store automatically if the last session that it shipped is missing there.
    """
    from turngate.cli.restored import mark_restored

    _or_exit(lambda: mark_restored(data))


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option(help="Remove sessions that ended at least this long ago, such as 30d, 12h or 2w.")
    ],
    data: Annotated[
        str, typer.Option(help="Data folder that no gateway is serving, or postgresql:// address of a shared store.")
    ] = "turngate-data",
    archive: Annotated[
        Optional[Path],
        typer.Option(
            help="Folder in which to save the sessions as Parquet files before they are removed (needs the `parquet` extra)."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Remove old sessions that are no longer needed. A shared store can be pruned while gateways and cells are using it.

    A session is kept if it is open, unshipped or needed by a feed, if --archive cannot save it, or if another rollout of its group is kept.
    """
    from turngate.cli.prune import prune_stores

    _or_exit(lambda: prune_stores(data, older_than, archive, dry_run, as_json))


@app.command("load-archive")
def load_archive(
    archive: Annotated[Path, typer.Argument(help="Folder that `turngate prune --archive` wrote.")],
    data: Annotated[str, typer.Option(help="Data folder to add the sessions to; created if necessary.")],
    session: Annotated[
        Optional[list[str]], typer.Option(help="Id of a session to load; repeatable. Default: all.")
    ] = None,
) -> None:
    """Add archived sessions to a data folder, so that they can be shown, verified or exported."""
    from turngate.cli.prune import load_sessions

    _or_exit(lambda: load_sessions(archive, data, session or []))


@app.command()
@takes(flags.ExportOptions)
def export(options: flags.ExportOptions) -> None:
    """Export recorded rollouts to training files.

    A gateway may be serving the data folder at the same time.
    """
    from turngate.cli.export import export_rollouts

    _or_exit(lambda: export_rollouts(options))


@app.command()
@takes(flags.McpOptions)
def mcp(options: flags.McpOptions) -> None:
    """Serve rollouts as MCP tools (needs the `mcp` extra), over stdin and stdout or over HTTP.

    HTTP clients need the key that TURNGATE_MCP_KEY or TURNGATE_MCP_KEY_FILE sets or, if neither is set, the key that is written to
    DATA/mcp-key on first start.
    """

    def action() -> None:
        from turngate.cli.mcp import serve_mcp

        with _telemetry(options.log_format, options.spans):
            serve_mcp(options)

    _or_exit(action)


@agents_app.callback(invoke_without_command=True)
def agents(context: typer.Context) -> None:
    """List the available agents: the presets and your own."""
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
    name: Annotated[
        str,
        typer.Argument(
            help="Agent to check: a name from `turngate agents`, or the path to an agent file such as ./my-agent.toml."
        ),
    ],
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
    2 if an option is invalid or the command could not run.
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
        typer.Option(
            help="Environment variable that the command needs, as NAME=VALUE, such as LLM_URL={base_url}/v1. Repeatable."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the command may take.")] = 60.0,
) -> None:
    """Run an agent's command once against the scripted engine, and write a first description of the agent.

    The command runs on this machine with an empty home folder. It gets the prompt on standard input, unless the command or --env contains
    {prompt} or {prompt_file}. Check the result with `turngate agents check ./NAME.toml`.

    Exit codes:
    0 if the description was written;
    2 if it was not, for example because NAME.toml already exists or none of the command's model calls succeeded.
    """
    from turngate.cli.agents import create_agent

    _or_exit(lambda: create_agent(name, command, env or [], timeout_s))


_EngineArgument = Annotated[str, typer.Argument(metavar="URL", help="URL of the engine.")]


@engines_app.command("list")
def list_engines(gateway: flags.GatewayFlag = flags.GATEWAY_URL, as_json: flags.JsonFlag = False) -> None:
    """List the engines and their load: running and waiting calls, and how full the KV cache is."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.engines(), as_json))


@engines_app.command("add")
def add_engine(
    url: _EngineArgument,
    version: Annotated[
        Optional[int],
        typer.Option(help="Current policy version, if the engine already has the weights of that version.", min=0),
    ] = None,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Add an engine, or stop draining one. The engine loads the current weights before its next call, unless it already has them."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.add_engine(url, version), as_json))


@engines_app.command("drain")
def drain_engine(
    url: _EngineArgument, gateway: flags.GatewayFlag = flags.GATEWAY_URL, as_json: flags.JsonFlag = False
) -> None:
    """Stop sending new calls to an engine. Its running calls finish, and its sessions move to other engines."""
    from turngate.cli.engines import change_engines

    _or_exit(lambda: change_engines(gateway, lambda client: client.drain_engine(url), as_json))


@engines_app.command("remove")
def remove_engine(
    url: _EngineArgument,
    limit_s: Annotated[
        float, typer.Option(help="Wait up to this many seconds for the engine's calls to finish.")
    ] = 600.0,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove the engine without waiting. Running calls that have produced tokens fail; the others move to another engine.",
        ),
    ] = False,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Drain an engine, and remove it when its calls have finished."""
    from turngate.cli.engines import change_engines

    _or_exit(
        lambda: change_engines(gateway, lambda client: client.remove_engine(url, limit_s=limit_s, force=force), as_json)
    )


app.command()(audit)


@tasks_app.command("list")
@takes(flags.ListTasksOptions)
def tasks_list(options: flags.ListTasksOptions) -> None:
    """List tasks.

    Exit codes:
    0 if every task could be read;
    1 if a task could not be read;
    2 if an option is invalid or the command could not run.
    """
    from turngate.cli.tasks import list_tasks

    if not _or_exit(lambda: list_tasks(options)):
        raise typer.Exit(1)


@tasks_app.command("check")
@takes(flags.CheckTasksOptions)
def tasks_check(options: flags.CheckTasksOptions) -> None:
    """Check that tasks are valid and that their graders work.

    A task is proven if its solution scores 1 and doing nothing scores 0. A task without a grader or a solution cannot be proven. Such
    a task passes if no other problem is found.

    Exit codes:
    0 if every task passed;
    1 if a task failed;
    2 if an option is invalid or the command could not run.
    """
    from turngate.cli.tasks import check_tasks

    if not _or_exit(lambda: check_tasks(options)):
        raise typer.Exit(1)


@make_app.command("repairs")
@takes(flags.MakeRepairsOptions)
def tasks_make_repairs(options: flags.MakeRepairsOptions) -> None:
    """Make repair tasks: inject bugs into packages, and keep the bugs that the packages' tests catch.

    The tests run in the sandbox.

    Exit codes:
    0 if every source produced tasks;
    1 if a source produced no tasks, for example because its tests did not run;
    2 if an option is invalid or the command could not run.
    """
    from turngate.cli.repairs import make_repair_tasks

    if not _or_exit(lambda: make_repair_tasks(options)):
        raise typer.Exit(1)


@contextmanager
def _telemetry(log_format: str, with_spans: bool) -> Iterator[None]:
    """Set up logging, and optionally spans, for a command that runs rollouts."""
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
