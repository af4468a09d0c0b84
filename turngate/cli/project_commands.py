"""The commands `turngate projects`, `turngate keys` and `turngate audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from turngate.cli import options as flags
from turngate.cli.command import CommandGroup
from turngate.cli.exit_codes import or_exit

projects_app = CommandGroup(
    help="List, create, change and delete the projects of a running gateway.", no_args_is_help=True
)
keys_app = CommandGroup(help="List, create, rotate and revoke the API keys of projects.", no_args_is_help=True)

_ProjectFlag = Annotated[str, typer.Option(help="Name of the project.")]
_WeightFlag = Annotated[
    Optional[float],
    typer.Option(
        help="Weight for sharing the engines with other projects while calls have to wait. Default for a new project: 1."
    ),
]
_LiveFlag = Annotated[Optional[int], typer.Option(help="Quota: open sessions at the same time; 0 for no limit.", min=0)]
_TokensFlag = Annotated[Optional[int], typer.Option(help="Quota: sampled tokens per day; 0 for no limit.", min=0)]
_BytesFlag = Annotated[Optional[int], typer.Option(help="Quota: bytes of recorded data; 0 for no limit.", min=0)]
_PrefixArgument = Annotated[str, typer.Argument(metavar="PREFIX", help="Prefix of the key, such as tgp-1a2b3c4d.")]
_OutFlag = Annotated[
    Optional[Path], typer.Option(help="Write the key to this new file, readable only by you, instead of printing it.")
]


@projects_app.command("list")
def list_projects(gateway: flags.GatewayFlag = flags.GATEWAY_URL, as_json: flags.JsonFlag = False) -> None:
    """List the projects with their weights and quotas."""
    from turngate.cli.projects import ask, print_projects

    print_projects(or_exit(lambda: ask(gateway, lambda client: client.projects())), as_json)


@projects_app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Name of the new project: lowercase letters, digits and hyphens.")],
    weight: _WeightFlag = None,
    live_sessions: _LiveFlag = None,
    tokens_per_day: _TokensFlag = None,
    stored_bytes: _BytesFlag = None,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Create a project with its own store, which only its keys and the admin key can open."""
    from turngate.cli.projects import ask, parse_quotas, print_projects

    quotas = parse_quotas(live_sessions=live_sessions, tokens_per_day=tokens_per_day, stored_bytes=stored_bytes)
    settings = {"weight": 1.0 if weight is None else weight, "quotas": quotas}
    new = or_exit(lambda: ask(gateway, lambda client: client.create_project(name, **settings)))
    print_projects([new], as_json)


@projects_app.command("change")
def change_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    weight: _WeightFlag = None,
    live_sessions: _LiveFlag = None,
    tokens_per_day: _TokensFlag = None,
    stored_bytes: _BytesFlag = None,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Change the weight or quotas of a project. Values that you do not pass stay unchanged."""
    from turngate.cli import projects
    from turngate.cli.projects import ask, print_projects

    quotas = {"live_sessions": live_sessions, "tokens_per_day": tokens_per_day, "stored_bytes": stored_bytes}
    changed = or_exit(lambda: ask(gateway, lambda client: projects.change_project(client, name, weight, **quotas)))
    print_projects([changed], as_json)


@projects_app.command("delete")
def delete_project(
    name: Annotated[str, typer.Argument(help="Name of the project.")],
    force: Annotated[
        bool, typer.Option("--force", help="Delete the project even if it has open or unshipped sessions.")
    ] = False,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
) -> None:
    """Delete a project with its keys, sessions, feeds and all other data. Its entries in the audit log are kept."""
    from turngate.cli.projects import ask

    or_exit(lambda: ask(gateway, lambda client: client.delete_project(name, force=force)))
    typer.echo(f"Deleted project {name}. Gateways and cells remove its data within a few seconds.")


@keys_app.command("list")
def list_keys(
    project: _ProjectFlag = "", gateway: flags.GatewayFlag = flags.GATEWAY_URL, as_json: flags.JsonFlag = False
) -> None:
    """List the keys of one project, or of all projects. Only their prefixes are shown, because the keys themselves are not stored."""
    from turngate.cli.projects import ask, print_keys

    print_keys(or_exit(lambda: ask(gateway, lambda client: client.keys(project))), as_json)


@keys_app.command("create")
def create_key(
    scope: Annotated[list[str], typer.Option(help="What the key may do: sessions, traces, feed or admin. Repeatable.")],
    project: _ProjectFlag = "",
    note: Annotated[str, typer.Option(help="Note to show in the list of keys, such as who uses the key.")] = "",
    days: Annotated[Optional[float], typer.Option(help="Days until the key expires. Default: never.")] = None,
    out: _OutFlag = None,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Create a key, and print it or write it to a file. The key cannot be shown again."""
    from turngate.cli.projects import create_key, show_new_key

    seconds = None if days is None else days * 86400
    new = or_exit(
        lambda: create_key(gateway, lambda client: client.create_key(scope, project, note=note, expires_s=seconds), out)
    )
    show_new_key(new, out, as_json)


@keys_app.command("rotate")
def rotate_key(
    prefix: _PrefixArgument,
    grace_hours: Annotated[
        float, typer.Option(help="Maximum number of hours for which the old key stays valid.", min=0)
    ] = 24.0,
    out: _OutFlag = None,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Replace a key with a new key that has the same scopes, and print the new key or write it to a file."""
    from turngate.cli.projects import create_key, show_new_key

    new = or_exit(lambda: create_key(gateway, lambda client: client.rotate_key(prefix, grace_hours * 3600), out))
    show_new_key(new, out, as_json)


@keys_app.command("revoke")
def revoke_key(
    prefix: _PrefixArgument, gateway: flags.GatewayFlag = flags.GATEWAY_URL, as_json: flags.JsonFlag = False
) -> None:
    """Revoke a key. It stops working within one second, and in cells within five seconds.

    A cell that cannot reach the shared store accepts the key until the cell's lease lapses.
    """
    from turngate.cli.projects import ask, print_keys

    print_keys([or_exit(lambda: ask(gateway, lambda client: client.revoke_key(prefix)))], as_json)


def audit(
    project: _ProjectFlag = "",
    after: Annotated[
        Optional[int],
        typer.Option(
            help="Show the entries that follow the one with this number, instead of the newest entries.", min=0
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of entries.", min=1, max=1000)] = 100,
    gateway: flags.GatewayFlag = flags.GATEWAY_URL,
    as_json: flags.JsonFlag = False,
) -> None:
    """Show who made changes to projects or keys, deleted sessions, loaded weights, or exported data on the web page."""
    from turngate.cli.projects import ask, print_audit

    print_audit(or_exit(lambda: ask(gateway, lambda client: client.audit(project, after, limit))), as_json)
