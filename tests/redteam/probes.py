"""The probes of a hostile agent. `intruder.py` has the code of each, a function with the same name.

Each probe must get nothing in every sandbox. A probe that `local` cannot stop, by design, says so in `open_in_local`: what the agent gets
there, as `docs/sandboxes.md` lists it. The control runs the same code in `local` and must get something, so that its failure elsewhere
proves a wall and not a broken probe. Where the gateway is the wall, the control has what the wall withholds: `control` replaces what the
attacker is given by other values of the test.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# What opens the admin API: its key, and a way to the gateway that leads around the door.
ADMIN = {"url": "gateway", "key": "admin_key"}
OTHER = {"url": "gateway", "key": "other_key"}


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a hostile agent."""

    name: str  # of the function in `intruder.py`
    goal: str  # what the attacker wants
    asset: str  # what must be kept from it
    open_in_local: str = ""  # what `local` does not protect, as docs/sandboxes.md says it; empty: it does
    control: Mapping[
        str, str
    ] = {}  # what the control is given: a field of the intruder, and the name of the test's value
    needs_root: bool = False  # it can succeed only for root, so the tests without a wall do not run for others
    isolates: bool = True  # False: the stand-ins of remote services do not isolate, so they cannot be tested


PROBES = (
    Probe(
        name="read_host_files",
        goal="read private files of the host: passwords, the admin key, keys in the home folder and the cache",
        asset="host files",
        open_in_local="read access to host files",
        isolates=False,
    ),
    Probe(
        name="read_rewards_in_store",
        goal="read rewards in the data folder",
        asset="rewards",
        open_in_local="the data folder, with rewards and other sessions",
        isolates=False,
    ),
    Probe(
        name="read_traces_in_store",
        goal="read other conversations in the data folder",
        asset="other sessions",
        open_in_local="the data folder, with rewards and other sessions",
        isolates=False,
    ),
    Probe(
        name="read_hidden_tests",
        goal="read the tests and the reference solution of the task",
        asset="hidden tests",
        open_in_local="hidden tests, if the task is a folder of this machine",
        isolates=False,
    ),
    Probe(
        name="read_other_sandbox",
        goal="read the files of another rollout",
        asset="other sandboxes",
        open_in_local="the files of other local sandboxes",
        isolates=False,
    ),
    Probe(
        name="write_host_files",
        goal="write files of the host, such as a cron job that outlives the sandbox",
        asset="host files",
        open_in_local="write access to host files",
        isolates=False,
    ),
    Probe(
        name="reach_devices",
        goal="make or open devices: the memory of the machine, its disks, loop devices",
        asset="the host",
        open_in_local="devices, if Turngate runs as root",
        needs_root=True,
        isolates=False,
    ),
    Probe(
        name="read_environments",
        goal="read keys in the environment of other processes",
        asset="keys",
        open_in_local="the environments, arguments and memory of your processes",
        isolates=False,
    ),
    Probe(
        name="read_command_lines",
        goal="read secrets in the arguments of other processes",
        asset="keys",
        open_in_local="the environments, arguments and memory of your processes",
        isolates=False,
    ),
    Probe(
        name="read_memory",
        goal="read the memory of the gateway",
        asset="keys, rewards",
        open_in_local="the environments, arguments and memory of your processes",
        isolates=False,
    ),
    Probe(
        name="signal_host_process",
        goal="stop or kill processes of the host",
        asset="other rollouts",
        open_in_local="signals to your processes",
        isolates=False,
    ),
    Probe(
        name="find_host_variables",
        goal="find variables of the host in its own environment",
        asset="keys",
        control={"host_variable": "spec_variable"},
    ),
    Probe(
        name="find_key_in_command_lines",
        goal="find a session's secret in a command line, which every user can read",
        asset="session secrets",
        control={"argument": "program_name"},
    ),
    Probe(
        name="use_admin_api",
        goal="list, read and open sessions with its own secret",
        asset="the admin API",
        control=ADMIN,
    ),
    Probe(name="read_rewards", goal="read the grade of a rollout", asset="rewards", control=ADMIN),
    Probe(
        name="use_page",
        goal="read rollouts through the page's API",
        asset="the page",
        control={"url": "gateway", "cookie": "page_cookie"},
    ),
    Probe(name="read_metrics", goal="read the metrics", asset="metrics", control=ADMIN),
    Probe(
        name="find_secrets_on_public_routes",
        goal="find secrets in what the gateway tells anyone",
        asset="keys, other sessions",
        control={"public_paths": "admin_paths", "key": "admin_key"},
    ),
    Probe(
        name="call_as_other_session",
        goal="make model calls in another session",
        asset="other transcripts",
        control=OTHER,
    ),
    Probe(
        name="continue_other_conversation",
        goal="continue another session's stored response",
        asset="other transcripts",
        control=OTHER,
    ),
    Probe(
        name="read_other_response",
        goal="read another session's stored response by its id",
        asset="other sessions",
        control=OTHER,
    ),
    Probe(
        name="call_other_tool",
        goal="call a host tool of another session",
        asset="host tools",
        control=OTHER,
    ),
    Probe(
        name="delete_other_response",
        goal="delete another session's stored response",
        asset="other transcripts",
        control=OTHER,
    ),
    Probe(
        name="see_token_data",
        goal="get token ids or log-probabilities",
        asset="training data",
        control={"url": "gateway", "key": "shown_key"},
    ),
    Probe(
        name="make_gateway_fetch",
        goal="make the gateway fetch a URL: images, files, tools, model names, forwarded hosts",
        asset="the host's network",
        control={"fetches": "yes"},
    ),
    Probe(
        name="make_host_tool_fetch",
        goal="make the gateway fetch a URL in the arguments of a host tool, or in the schema of one",
        asset="the host's network",
        control={"fetches": "yes"},
    ),
    Probe(
        name="reach_gateway_directly",
        goal="reach the gateway around the door: names, IPv6, decimal, hexadecimal and short addresses",
        asset="the admin API",
        open_in_local="the network, including services of this machine",
        isolates=False,
    ),
    Probe(
        name="ask_daemons",
        goal="ask a daemon of the host to run a program: Docker, D-Bus, systemd, abstract sockets",
        asset="the host",
        open_in_local="daemons such as Docker and systemd, which can start programs that outlive the sandbox",
        isolates=False,
    ),
)
