"""The commands. Heavy imports wait until a command needs them, so that `--help` is quick."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer

from turngate import __version__
from turngate.cli import options
from turngate.errors import ConfigError, TurngateError

T = TypeVar("T")
app = typer.Typer(
    name="turngate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The token-exact gateway for training coding agents.",
)


agents_app = typer.Typer(help="The agents that can be run.")
app.add_typer(agents_app, name="agents")
tasks_app = typer.Typer(help="The tasks that agents are given.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")


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
        Optional[str],
        typer.Option(
            help="vllm, sglang, local, gate (the trainer), scripted; to observe: openai, anthropic, gemini, responses. [scripted]"
        ),
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
    model_folder: Annotated[
        Optional[str], typer.Option(help="Local engine: folder with config.json and model.safetensors. [--tokenizer]")
    ] = None,
    engine_device: Annotated[Optional[str], typer.Option(help="Local engine: auto, cpu or cuda. [auto]")] = None,
    engine_dtype: Annotated[Optional[str], typer.Option(help="Local engine: float32 or bfloat16. [auto]")] = None,
    engine_slots: Annotated[Optional[int], typer.Option(help="Local engine: calls sampled at once. [auto]")] = None,
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
    workers: Annotated[Optional[int], typer.Option(help="Processes that share the sessions. [1]")] = None,
    durability: Annotated[
        Optional[str], typer.Option(help="process or disk: what kind of crash a recorded turn survives. [process]")
    ] = None,
    idle_s: Annotated[Optional[float], typer.Option(help="Seal sessions unused for this long. [86400]")] = None,
    rest_s: Annotated[
        Optional[float],
        typer.Option(help="Sessions unused for this long leave memory, until their next call; 0: never. [60]"),
    ] = None,
    event_days: Annotated[Optional[float], typer.Option(help="Remove events older than this. [0: keep them]")] = None,
    alive_s: Annotated[Optional[float], typer.Option(help="Seconds of silence before a sign of life. [10]")] = None,
    max_body_mb: Annotated[Optional[float], typer.Option(help="Largest request. [64]")] = None,
    open_loopback: Annotated[
        Optional[bool],
        typer.Option("--open-loopback/--no-open-loopback", help="prime-rl API: loopback clients need no key."),
    ] = None,
    log_turns: Annotated[
        Optional[bool], typer.Option("--log-turns/--no-log-turns", help="One log line per turn.")
    ] = None,
    log_format: Annotated[Optional[str], typer.Option(help="Log lines as text or json. [text]")] = None,
    spans: Annotated[
        Optional[bool],
        typer.Option(
            "--spans/--no-spans",
            help="OpenTelemetry spans (extra otel); on where OTEL_EXPORTER_OTLP_ENDPOINT is set.",
        ),
    ] = None,
    verify_every: Annotated[
        Optional[int], typer.Option(help="Prove every n-th session that ends, beside the serving. [0: none]")
    ] = None,
    echo_prompt: Annotated[
        Optional[bool],
        typer.Option("--echo-prompt/--no-echo-prompt", help="Have the engine repeat each prompt, and compare."),
    ] = None,
) -> None:
    """Start the gateway."""
    overrides = {name: value for name, value in locals().items() if name != "config"}
    overrides["engine_url"] = engine_url or None
    from turngate.config import load_config
    from turngate.telemetry import logs

    settings = _or_exit(lambda: load_config(config, overrides))
    if settings.workers > 1:
        from turngate.server.workers.front import run
    else:
        from turngate.server.run import run

    with logs.log_to_stderr(settings.log_format):
        _or_exit(lambda: run(settings))


def _doctor(**given: Any) -> None:
    """Look whether everything that `turngate serve` and its rollouts need is there and fits together, and say how to mend it.

    Takes the settings of `turngate serve`; with --gateway, a gateway that runs is examined instead. Exit codes: 0 nothing failed
    (there may be warnings), 1 something did, 2 something that was given is wrong.
    """
    from turngate.cli.doctor import examined

    if not _or_exit(lambda: examined(given)):
        raise typer.Exit(1)


app.command("doctor")(options.with_settings_of(serve, _doctor, options.DOCTOR))


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


@app.command()
def run(
    agent: options.Agent,
    task: Annotated[str, typer.Option(help="A folder with an instruction.md, or a text file.")] = "",
    prompt: Annotated[str, typer.Option(help="What is asked, instead of a task.")] = "",
    sandbox: options.Sandbox = "local",
    image: options.Image = "",
    network: options.Network = "none",
    config: options.Config = None,
    gateway: options.Gateway = "",
    data: options.Data = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    engine_key_env: options.EngineKeyEnv = None,
    model: options.Model = None,
    tokenizer: options.Tokenizer = None,
    script: options.Script = None,
    max_context: options.MaxContext = None,
    timeout: options.Timeout = None,
    grade: options.Grade = True,
    on_timeout: options.OnTimeout = "grade",
    on_failure: options.OnFailure = "grade",
    on_limit: options.OnLimit = "grade",
    on_lost: options.OnLost = "zero",
    max_turns: options.MaxTurns = None,
    max_tokens: options.MaxTokens = None,
    context_tokens: options.ContextTokens = None,
    cpus: options.Cpus = None,
    memory_mb: options.MemoryMb = None,
    option: options.Set = None,
    public_url: options.PublicUrl = "",
    tunnel: options.Tunnel = "",
    out: Annotated[Optional[Path], typer.Option(help="Folder for what the agent left. [DATA/rollouts]")] = None,
    log_format: options.LogFormat = "text",
    spans: options.Spans = False,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as JSON.")] = False,
) -> None:
    """Run one rollout: an agent on a task, in a sandbox, recorded token by token and graded.

    Exit codes: 0 the agent finished, whatever its reward; 1 it failed, or met its time or a limit; 2 something that was given is
    wrong; 3 something else than the agent failed; 130 stopped by Ctrl-C.
    """
    given = dict(locals())

    def ran() -> int:
        from turngate.cli.run import ordered

        with _told(log_format, spans):
            return ordered(given)

    raise typer.Exit(_or_exit(ran))


@app.command()
def batch(
    agent: options.Agent,
    tasks: Annotated[
        str,
        typer.Option(
            help="A task folder or a folder of them, a .jsonl or .parquet file, hf://org/name, file.py:function."
        ),
    ],
    n: Annotated[int, typer.Option("--n", help="Rollouts of each task.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often the tasks come round; more may be asked for later.")] = 1,
    name: Annotated[
        str, typer.Option(help="What the names of its groups begin with, for a feed that takes only those.")
    ] = "",
    concurrency: Annotated[int, typer.Option(help="Agents that run at once.")] = 8,
    starting: Annotated[
        Optional[int], typer.Option(help="Sandboxes that are started at once. [twice the cores]")
    ] = None,
    grading: Annotated[Optional[int], typer.Option(help="Rollouts that are graded at once. [the cores]")] = None,
    warm: Annotated[
        Optional[int], typer.Option(help="Sandboxes that are prepared ahead of a free place. [the cores]")
    ] = None,
    retries: Annotated[int, typer.Option(help="Further attempts after faults that are not the agent's.")] = 2,
    stale_retries: Annotated[
        int, typer.Option(help="Further attempts after the policy moved on too far; 0 leaves such rollouts out.")
    ] = 2,
    only: Annotated[
        Optional[list[str]], typer.Option(help="Ids of tasks, with * for anything; repeat for more.")
    ] = None,
    limit: Annotated[Optional[int], typer.Option(help="At most so many tasks.")] = None,
    seed: Annotated[
        Optional[int], typer.Option(help="The order of the tasks, and each rollout's sampling, follow from it.")
    ] = None,
    sandbox: options.Sandbox = "local",
    image: options.Image = "",
    network: options.Network = "none",
    config: options.Config = None,
    gateway: options.Gateway = "",
    data: options.Data = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    engine_key_env: options.EngineKeyEnv = None,
    model: options.Model = None,
    tokenizer: options.Tokenizer = None,
    script: options.Script = None,
    max_context: options.MaxContext = None,
    timeout: options.Timeout = None,
    grade: options.Grade = True,
    on_timeout: options.OnTimeout = "grade",
    on_failure: options.OnFailure = "grade",
    on_limit: options.OnLimit = "grade",
    on_lost: options.OnLost = "zero",
    max_turns: options.MaxTurns = None,
    max_tokens: options.MaxTokens = None,
    context_tokens: options.ContextTokens = None,
    cpus: options.Cpus = None,
    memory_mb: options.MemoryMb = None,
    option: options.Set = None,
    public_url: options.PublicUrl = "",
    tunnel: options.Tunnel = "",
    out: Annotated[Optional[Path], typer.Option(help="Folder of the batch. [DATA/batches/…, by what it is]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Refuse to begin a new batch.")] = False,
    keep_work: Annotated[
        bool, typer.Option("--keep-work", help="Keep agents' working folders after they are graded.")
    ] = False,
    log_format: options.LogFormat = "text",
    spans: options.Spans = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Run n rollouts of each task, through failures; the same command again goes on with what is left.

    Exit codes: 0 every rollout is finished, whatever its class; 2 something that was given is wrong; 3 it had to stop early; 130
    stopped by Ctrl-C.
    """
    given = dict(locals())

    def ran() -> int:
        from turngate.cli.batch import ordered

        with _told(log_format, spans):
            return ordered(given)

    raise typer.Exit(_or_exit(ran))


@app.command()
def train(
    tasks: Annotated[str, typer.Option(help="What to train on: a folder, a file of rows, file.py:function.")],
    model_folder: Annotated[Path, typer.Option(help="The model: a Hugging Face folder (Llama, Qwen2, Qwen3).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; a run that is there is gone on with.")],
    agent: options.Agent = "mini-swe-agent",
    held_out: Annotated[
        Optional[str], typer.Option(help="Tasks that are only tried, before training and after.")
    ] = None,
    held_out_n: Annotated[int, typer.Option(help="Rollouts of each held-out task.")] = 1,
    steps: Annotated[int, typer.Option(help="Updates.")] = 100,
    n: Annotated[int, typer.Option("--n", "-n", help="Rollouts of each task: a group.")] = 8,
    groups: Annotated[int, typer.Option(help="Groups that make an update.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-5,
    temperature: Annotated[float, typer.Option(help="With which agents sample.")] = 1.0,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    concurrency: Annotated[int, typer.Option(help="Agents that run at the same time.")] = 8,
    seed: Annotated[
        Optional[int], typer.Option(help="The order of the tasks, and the sampling, follow from it.")
    ] = None,
    tokenizer: Annotated[Optional[str], typer.Option(help="Another tokenizer folder than the model's.")] = None,
    sandbox: options.Sandbox = "bubblewrap",
    data: Annotated[str, typer.Option(help="Folder for everything recorded. [OUT/data]")] = "",
    timeout: options.Timeout = None,
    max_turns: options.MaxTurns = None,
    context_tokens: Annotated[Optional[int], typer.Option(help="Tokens of context that the engine reserves.")] = None,
    option: options.Set = None,
    log_format: options.LogFormat = "text",
    spans: options.Spans = False,
) -> None:
    """Train a model with an agent, in this process: GRPO on what the tasks' graders decide (extra `local`).

    Exit codes: 0 trained to the last step; 2 something that was given is wrong; 130 stopped by Ctrl-C.
    """
    given = dict(locals())

    def trained() -> int:
        from turngate.cli.train import ordered

        with _told(log_format, spans):
            return ordered(given)

    raise typer.Exit(_or_exit(trained))


@app.command()
def verify(
    session: Annotated[str, typer.Argument(help="A session's id, the beginning of it, or `last`.")] = "last",
    every: Annotated[bool, typer.Option("--all", help="Every session of the folder.")] = False,
    data: Annotated[str, typer.Option(help="The data folder that it was recorded in.")] = "turngate-data",
    engine: Annotated[str, typer.Option(help="Score the sampled tokens again with: vllm, scripted.")] = "",
    engine_url: Annotated[str, typer.Option(help="Where it listens.")] = "",
    engine_key_env: Annotated[str, typer.Option(help="Name of the environment variable with its key.")] = "",
    model: Annotated[str, typer.Option(help="The model's name there.")] = "",
    policy_version: Annotated[Optional[int], typer.Option(help="Score only turns of this policy version.")] = None,
    tolerance: Annotated[float, typer.Option(help="By how much a log-probability may differ.")] = 0.02,
    tokenizer: Annotated[str, typer.Option(help="Render with this one, if the recorded one is not here.")] = "",
    family: Annotated[
        str, typer.Option(help="template, or a family of the `renderers` package; as it was served.")
    ] = "",
    rollouts: Annotated[
        str, typer.Option(help="Where agents left their logs: here or in rollouts below, as --out of `train`. [DATA]")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Prove that recorded sessions are exact, independently of what recorded them.

    Exit codes: 0 nothing is wrong; 1 something is; 2 it could not be looked at, or what was asked for could not be done.
    """
    given = dict(locals())
    from turngate.cli.verify import Asked, report

    given["version"] = given.pop("policy_version")
    if not _or_exit(lambda: report(Asked(**given))):
        raise typer.Exit(1)


@app.command()
def export(
    format: Annotated[str, typer.Argument(help="rows, sft, rejection, dpo, verl, slime or atif.")],
    out: Annotated[
        str, typer.Option(metavar="PATH", help="The file to write: .jsonl or .parquet; for atif also a folder.")
    ],  # a Path would lose the / at the end, by which a folder is meant
    data: Annotated[str, typer.Option(help="The data folder that was recorded in.")] = "turngate-data",
    group: Annotated[Optional[list[str]], typer.Option(help="Groups, with * for anything; repeat for more.")] = None,
    task: Annotated[Optional[list[str]], typer.Option(help="Tasks, likewise.")] = None,
    session: Annotated[Optional[list[str]], typer.Option(help="Sessions, likewise.")] = None,
    min_reward: Annotated[
        Optional[float], typer.Option(help="Only rollouts with at least this reward. [rejection: 1]")
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Only rollouts that their grader calls resolved.")
    ] = False,
    unscored: Annotated[str, typer.Option(help="Rollouts whose reward is not known: keep (as null) or drop.")] = "keep",
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also sessions that are open, or were cancelled.")
    ] = False,
    form: Annotated[
        str, typer.Option("--as", help="sft, rejection: messages, completions, tokens. dpo: messages, tokens.")
    ] = "",
    advantage: Annotated[str, typer.Option(help="rows: normalised, leave_one_out or none.")] = "normalised",
    imitate: Annotated[
        bool,
        typer.Option("--imitate", help="sft, rejection: also turns without log-probabilities or with biased sampling."),
    ] = False,
    keep: Annotated[str, typer.Option(help="rejection: all of a group, or the best.")] = "all",
    margin: Annotated[float, typer.Option(help="dpo: by how much the rewards of a pair differ at least.")] = 0.0,
    pairs: Annotated[int, typer.Option(help="dpo: pairs of a group at most, the widest first.")] = 4,
    prompt_ids: Annotated[
        bool, typer.Option("--prompt-ids", help="atif: the ids of every step's whole prompt.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Write recorded rollouts as files that trainers read, also while a gateway serves the folder."""
    given = dict(locals())
    from turngate.cli.export import ordered

    _or_exit(lambda: ordered(given))


@app.command()
def mcp(
    config: Annotated[
        Optional[Path], typer.Option(help="A TOML file with the endpoints and any other setting; flags win over it.")
    ] = None,
    data: Annotated[Optional[str], typer.Option(help="Folder for everything recorded. [turngate-data]")] = None,
    sandbox: Annotated[
        Optional[str], typer.Option(help="Where agents run: local, bubblewrap, docker … [bubblewrap]")
    ] = None,
    running: Annotated[Optional[int], typer.Option(help="Rollouts that run at once. [8]")] = None,
    http: Annotated[
        Optional[str],
        typer.Option(metavar="HOST:PORT", help="Serve streamable HTTP there, at /mcp, instead of stdin and stdout."),
    ] = None,
    allow_host: Annotated[
        Optional[list[str]],
        typer.Option(help="HTTP: a further name of this machine, or of a page that may call it; repeat for more."),
    ] = None,
    log_format: options.LogFormat = "text",
    spans: options.Spans = False,
) -> None:
    """Serve rollouts as MCP tools to agents and programs (extra `mcp`): on stdin and stdout, or over HTTP.

    Over HTTP clients need a key: that of TURNGATE_MCP_KEY, or else the one that is made on first start and kept in DATA/mcp-key.
    """
    given = dict(locals())

    def served() -> None:
        from turngate.cli.mcp import ordered

        with _told(log_format, spans):
            ordered(given)

    _or_exit(served)


@agents_app.callback(invoke_without_command=True)
def agents(context: typer.Context) -> None:
    """List the agents that are known: presets, and your own files."""
    if context.invoked_subcommand is None:
        from turngate.cli.agents import listing

        _or_exit(listing)


@agents_app.command("install")
def agents_install(
    names: Annotated[list[str], typer.Argument(help="Names of agents.")],
) -> None:
    """Put agents into the cache, so that a run need not."""
    from turngate.cli.agents import install

    _or_exit(lambda: install(names))


@agents_app.command("check")
def agents_check(
    name: Annotated[str, typer.Argument(help="A name of `turngate agents`, or a file of your own.")],
    sandbox: Annotated[str, typer.Option(help="Where it runs: local, bubblewrap, docker …")] = "local",
    image: Annotated[str, typer.Option(help="The container image to run in.")] = "",
    keep: Annotated[Optional[Path], typer.Option(help="Keep the recording and what the agent left here.")] = None,
) -> None:
    """Run an agent against the scripted engine, and say whether it was captured whole. Exit code 1 if not."""
    from turngate.cli.agents import check

    if not _or_exit(lambda: check(name, sandbox, image, keep)):
        raise typer.Exit(1)


_WHERE = "A task folder, a folder of them, a .jsonl or .parquet file, hf://org/name@split, or module:function."


@tasks_app.command("list")
def tasks_list(
    where: Annotated[str, typer.Argument(help=_WHERE)],
    only: Annotated[Optional[list[str]], typer.Option(help="Only ids like this pattern; repeat for more.")] = None,
    limit: Annotated[Optional[int], typer.Option(help="At most so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the tasks of a place. Exit code 1 if one of them cannot be read."""
    from turngate.cli.tasks import listing

    if not _or_exit(lambda: listing(where, only or (), limit, as_json)):
        raise typer.Exit(1)


@tasks_app.command("check")
def tasks_check(
    where: Annotated[str, typer.Argument(help=_WHERE)],
    sandbox: Annotated[str, typer.Option(help="Where they are proven: local, bubblewrap, docker …")] = "local",
    image: Annotated[str, typer.Option(help="The container image; wins over the tasks' own.")] = "",
    only: Annotated[Optional[list[str]], typer.Option(help="Only ids like this pattern; repeat for more.")] = None,
    limit: Annotated[Optional[int], typer.Option(help="At most so many.")] = None,
    prove: Annotated[bool, typer.Option("--prove/--no-prove", help="Solve and grade them, too.")] = True,
    concurrency: Annotated[int, typer.Option(help="How many are proven at once.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Say whether tasks are in order, and prove those with a solution: it scores 1, and no change scores 0. Exit code 1 if not."""
    from turngate.cli.tasks import Check, check

    asked = Check(
        where=where,
        sandbox=sandbox,
        image=image,
        only=tuple(only or ()),
        limit=limit,
        proves=prove,
        concurrency=concurrency,
        as_json=as_json,
    )
    if not _or_exit(lambda: check(asked)):
        raise typer.Exit(1)


@contextmanager
def _told(log_format: str, asked: bool) -> Iterator[None]:
    """Log lines and spans of a command that runs rollouts."""
    from turngate.telemetry import logs, spans

    if log_format not in ("text", "json"):
        raise ConfigError(f"log_format: {log_format!r} is neither text nor json", param="log_format")
    with (
        logs.log_to_stderr("json", logging.INFO)
        if log_format == "json"
        else logs.log_to_stderr("text", logging.WARNING)
    ):
        if spans.is_enabled(asked):
            spans.start_tracing("turngate-runner")
        try:
            yield
        finally:
            spans.stop_tracing()


def _or_exit(action: Callable[[], T]) -> T:
    try:
        return action()
    except TurngateError as error:
        typer.echo(f"turngate: {error.message}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("turngate: stopped", err=True)
        raise typer.Exit(130) from None
