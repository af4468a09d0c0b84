"""Options of the commands: one class per command, and the flags that typer makes of it.

Flags that set something of the gateway are generated from `turngate.config.ServeConfig`, where each setting is described once.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

O = TypeVar("O")  # noqa: E741
DEFAULT = r"\[default: {}]"  # at the end of a help text; the backslash is for rich
ALL_SETTINGS = ("*",)
# Settings of the gateway that `turngate run` and `turngate batch` start when none is running.
RUN_SETTINGS = ("data", "engine", "engine_url", "engine_key_env", "model", "tokenizer", "script", "max_context")

WHAT, SAMPLING, SANDBOX, GATEWAY = "What to run", "Sampling", "Sandbox", "Gateway"
LIMITS, GRADING, BATCH, OUTPUT = "Limits", "Grading", "Batch", "Output"
SELECTION, FORMAT, SCORING, TRAINING = "Which rollouts", "Format", "Scoring", "Training"


def _flag(help: str, panel: str | None = None, *names: str, default: object = "", metavar: str | None = None) -> Any:
    """Describe a flag. `default` is for a default that typer cannot know."""
    shown = f" {DEFAULT.format(default)}" if default else ""
    return typer.Option(*names, help=help + shown, rich_help_panel=panel, metavar=metavar)


def _json(help: str = "Print JSON.") -> Any:
    return _flag(help, OUTPUT, "--json")


_AGENT = _flag("Agent: a name from `turngate agents`, or your own file such as ./my-agent.toml.", WHAT)
_TIMEOUT = _flag("Seconds an agent may run.", LIMITS, default="the task's, or 1800")
_MAX_TURNS = _flag("Maximum turns per session.", LIMITS)
_SET = _flag("Option of the agent, as NAME=VALUE; repeatable.", WHAT, "--set")
_LOG_FORMAT = _flag("Format of log lines: text or json. json also logs stages and outcomes.", OUTPUT)
_SPANS = _flag(
    "Send OpenTelemetry spans (extra `otel`); also on if OTEL_EXPORTER_OTLP_ENDPOINT is set.", OUTPUT, "--spans"
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    config: Annotated[Optional[Path], _flag("TOML file with any of these settings; flags win.", GATEWAY)] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # by name; None: not given


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(ServeOptions):
    gateway: Annotated[
        str, _flag("Check a running gateway instead; its key comes from TURNGATE_ADMIN_KEY.", GATEWAY)
    ] = ""
    agent: Annotated[
        Optional[list[str]],
        _flag("Agent that has to be installed; repeatable.", "What to check", default="report on all"),
    ] = None
    sandbox: Annotated[
        Optional[list[str]],
        _flag(
            "Sandbox that has to work; repeatable.",
            "What to check",
            default="report on local, bubblewrap and docker",
        ),
    ] = None
    image: Annotated[str, _flag("Container image to try the docker sandbox with.", "What to check")] = ""
    only: Annotated[Optional[list[str]], _flag("Run only this check; repeatable.", "What to check")] = None
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options that `turngate run` and `turngate batch` share."""

    agent: Annotated[str, _AGENT]
    option: Annotated[Optional[list[str]], _SET] = None
    sandbox: Annotated[
        str, _flag("Sandbox to run agents in: local, bubblewrap, docker, e2b, huggingface.", SANDBOX)
    ] = "local"
    image: Annotated[str, _flag("Container image or template.", SANDBOX, default="the task's")] = ""
    network: Annotated[str, _flag("Network of the sandbox: none (only the gateway) or open.", SANDBOX)] = "none"
    cpus: Annotated[Optional[float], _flag("CPUs of a sandbox.", SANDBOX)] = None
    memory_mb: Annotated[Optional[int], _flag("Memory of a sandbox, in megabytes.", SANDBOX)] = None
    public_url: Annotated[str, _flag("URL at which remote sandboxes reach the gateway.", SANDBOX)] = ""
    tunnel: Annotated[
        str,
        _flag("Command that opens a tunnel to {port} and prints its URL, instead of --public-url.", SANDBOX),
    ] = ""
    gateway: Annotated[str, _flag("Use a running gateway; its key comes from TURNGATE_ADMIN_KEY.", GATEWAY)] = ""
    config: Annotated[Optional[Path], _flag("TOML file with settings of the gateway.", GATEWAY)] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # by name; None: not given
    timeout: Annotated[Optional[float], _TIMEOUT] = None
    max_turns: Annotated[Optional[int], _MAX_TURNS] = None
    max_tokens: Annotated[Optional[int], _flag("Maximum sampled tokens per session.", LIMITS)] = None
    context_tokens: Annotated[
        Optional[int], _flag("Context length to configure agents with.", LIMITS, default=131072)
    ] = None
    grade: Annotated[bool, _flag("Grade the outcome with the task's grader.", GRADING, "--grade/--no-grade")] = True
    on_timeout: Annotated[str, _flag("When an agent runs out of time: grade, exclude or zero.", GRADING)] = "grade"
    on_failure: Annotated[str, _flag("When an agent ends with an error: grade, exclude or zero.", GRADING)] = "grade"
    on_limit: Annotated[str, _flag("When a session reaches a limit: grade, exclude or zero.", GRADING)] = "grade"
    on_lost: Annotated[str, _flag("When an agent destroyed what was to be graded: exclude or zero.", GRADING)] = "zero"
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(RolloutOptions):
    task: Annotated[str, _flag("Task: a folder with an instruction.md, or a text file.", WHAT)] = ""
    prompt: Annotated[str, _flag("Instruction for the agent, instead of a task.", WHAT)] = ""
    out: Annotated[Optional[Path], _flag("Folder for the agent's files and logs.", OUTPUT, default="DATA/rollouts")] = (
        None
    )
    as_json: Annotated[bool, _json("Print the outcome as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RolloutOptions):
    tasks: Annotated[
        str,
        _flag(
            "Tasks: a task folder or a folder of them, a .jsonl or .parquet file, hf://org/name, or file.py:function.",
            WHAT,
        ),
    ]
    only: Annotated[
        Optional[list[str]], _flag("Only tasks whose id matches, with * as wildcard; repeatable.", WHAT)
    ] = None
    limit: Annotated[Optional[int], _flag("Maximum number of tasks.", WHAT)] = None
    n: Annotated[int, _flag("Rollouts per task.", BATCH, "--n")] = 1
    rounds: Annotated[int, _flag("Passes over the tasks; a later command may ask for more.", BATCH)] = 1
    name: Annotated[str, _flag("Prefix of the groups' names, so that a feed can select them.", BATCH)] = ""
    seed: Annotated[Optional[int], _flag("Seed for the order of tasks and for sampling.", BATCH)] = None
    retries: Annotated[int, _flag("Retries after a fault that is not the agent's.", BATCH)] = 2
    stale_retries: Annotated[
        int, _flag("Retries when the policy has moved on too far; 0 drops such rollouts.", BATCH)
    ] = 2
    concurrency: Annotated[int, _flag("Agents that run at once.", LIMITS)] = 8
    starting: Annotated[Optional[int], _flag("Sandboxes that start at once.", LIMITS, default="twice the cores")] = None
    grading: Annotated[Optional[int], _flag("Rollouts that are graded at once.", LIMITS, default="the cores")] = None
    warm: Annotated[Optional[int], _flag("Sandboxes to start ahead of time.", LIMITS, default="the cores")] = None
    out: Annotated[Optional[Path], _flag("Folder of the batch.", OUTPUT, default="DATA/batches/FINGERPRINT")] = None
    resume: Annotated[bool, _flag("Only resume; fail if there is no such batch yet.", BATCH, "--resume")] = False
    keep_work: Annotated[bool, _flag("Keep the agents' working folders after grading.", OUTPUT, "--keep-work")] = False
    as_json: Annotated[bool, _json("Print the summary as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    tasks: Annotated[str, _flag("Tasks to train on: a folder, a file of rows, or file.py:function.", WHAT)]
    model_folder: Annotated[Path, _flag("Model: a Hugging Face folder (Llama, Qwen2, Qwen3).", WHAT)]
    out: Annotated[Path, _flag("Folder of the run; an existing run is resumed.", OUTPUT)]
    agent: Annotated[str, _AGENT] = "mini-swe-agent"
    option: Annotated[Optional[list[str]], _SET] = None
    held_out: Annotated[
        Optional[str], _flag("Tasks to evaluate on before and after training; never trained on.", WHAT)
    ] = None
    held_out_n: Annotated[int, _flag("Rollouts per held-out task.", WHAT)] = 1
    tokenizer: Annotated[Optional[str], _flag("Tokenizer folder, if not the model's.", WHAT)] = None
    steps: Annotated[int, _flag("Updates of the weights.", TRAINING)] = 100
    n: Annotated[int, _flag("Rollouts per task, which form a group.", TRAINING, "--n", "-n")] = 8
    groups: Annotated[int, _flag("Groups per update.", TRAINING)] = 4
    learning_rate: Annotated[float, _flag("Learning rate of AdamW.", TRAINING)] = 1e-5
    temperature: Annotated[float, _flag("Sampling temperature.", TRAINING)] = 1.0
    every: Annotated[int, _flag("Steps between checkpoints.", TRAINING)] = 10
    seed: Annotated[Optional[int], _flag("Seed for the order of tasks and for sampling.", TRAINING)] = None
    sandbox: Annotated[
        str, _flag("Sandbox to run agents in: local, bubblewrap, docker, e2b, huggingface.", SANDBOX)
    ] = "bubblewrap"
    concurrency: Annotated[int, _flag("Agents that run at once.", LIMITS)] = 8
    timeout: Annotated[Optional[float], _TIMEOUT] = None
    max_turns: Annotated[Optional[int], _MAX_TURNS] = None
    context_tokens: Annotated[Optional[int], _flag("Tokens of context that the engine reserves.", LIMITS)] = None
    data: Annotated[str, _flag("Folder for all recorded data.", OUTPUT, default="OUT/data")] = ""
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


@dataclass(frozen=True, kw_only=True)
class VerifyCommandOptions:
    session: Annotated[str, typer.Argument(help="Id of a session, a prefix of it, or `last`.")] = "last"
    every: Annotated[bool, _flag("Verify every session of the folder.", SELECTION, "--all")] = False
    data: Annotated[str, _flag("Data folder of the recording.", SELECTION)] = "turngate-data"
    rollouts: Annotated[
        str,
        _flag(
            "Folder with the agents' logs, or with `rollouts` folders below it, such as --out of `train`.",
            SELECTION,
            default="DATA",
        ),
    ] = ""
    engine: Annotated[str, _flag("Engine to score the sampled tokens with again: vllm or scripted.", SCORING)] = ""
    engine_url: Annotated[str, _flag("URL of that engine.", SCORING)] = ""
    engine_key_env: Annotated[str, _flag("Name of the environment variable that holds its API key.", SCORING)] = ""
    model: Annotated[str, _flag("Name of the model at that engine.", SCORING)] = ""
    policy_version: Annotated[Optional[int], _flag("Score only turns of this policy version.", SCORING)] = None
    tolerance: Annotated[float, _flag("Largest difference of a log-probability to accept.", SCORING)] = 0.02
    tokenizer: Annotated[
        str, _flag("Tokenizer to render with, if the recorded one is not on this machine.", "Rendering")
    ] = ""
    family: Annotated[
        str, _flag("template, or a family of the `renderers` package; the one that was served.", "Rendering")
    ] = ""
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    format: Annotated[str, typer.Argument(help="rows, sft, rejection, dpo, verl, slime or atif.")]
    out: Annotated[
        str,
        _flag("File to write: .jsonl or .parquet; for atif also a folder.", OUTPUT, metavar="PATH"),
    ]  # a Path would lose a trailing /, which means a folder
    data: Annotated[str, _flag("Data folder of the recording.", SELECTION)] = "turngate-data"
    group: Annotated[Optional[list[str]], _flag("Groups, with * as wildcard; repeatable.", SELECTION)] = None
    task: Annotated[Optional[list[str]], _flag("Tasks, with * as wildcard; repeatable.", SELECTION)] = None
    session: Annotated[Optional[list[str]], _flag("Sessions, with * as wildcard; repeatable.", SELECTION)] = None
    min_reward: Annotated[
        Optional[float],
        _flag("Only rollouts with at least this reward.", SELECTION, default="1 for rejection"),
    ] = None
    resolved: Annotated[bool, _flag("Only rollouts that were graded as resolved.", SELECTION, "--resolved")] = False
    unscored: Annotated[str, _flag("Rollouts without a known reward: keep (as null) or drop.", SELECTION)] = "keep"
    unfinished: Annotated[bool, _flag("Also sessions that are open or were cancelled.", SELECTION, "--unfinished")] = (
        False
    )
    form: Annotated[
        str, _flag("sft, rejection: messages, completions or tokens. dpo: messages or tokens.", FORMAT, "--as")
    ] = ""
    advantage: Annotated[str, _flag("rows: normalised, leave_one_out or none.", FORMAT)] = "normalised"
    imitate: Annotated[
        bool,
        _flag("sft, rejection: also turns without log-probabilities or with biased sampling.", FORMAT, "--imitate"),
    ] = False
    keep: Annotated[str, _flag("rejection: all of a group, or the best.", FORMAT)] = "all"
    margin: Annotated[float, _flag("dpo: least difference between the rewards of a pair.", FORMAT)] = 0.0
    pairs: Annotated[int, _flag("dpo: maximum pairs per group, widest margin first.", FORMAT)] = 4
    prompt_ids: Annotated[bool, _flag("atif: include the prompt ids of every step.", FORMAT, "--prompt-ids")] = False
    as_json: Annotated[bool, _json("Print what was written as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    config: Annotated[
        Optional[Path], _flag("TOML file with the endpoints and any other setting; flags win.", GATEWAY)
    ] = None
    data: Annotated[Optional[str], _flag("Folder for all recorded data.", GATEWAY, default="turngate-data")] = None
    sandbox: Annotated[
        Optional[str],
        _flag("Sandbox to run agents in: local, bubblewrap, docker …", SANDBOX, default="bubblewrap"),
    ] = None
    running: Annotated[Optional[int], _flag("Rollouts that run at once.", LIMITS, default=8)] = None
    http: Annotated[
        Optional[str],
        _flag(
            "Serve streamable HTTP at /mcp on this address, instead of stdin and stdout.", "HTTP", metavar="HOST:PORT"
        ),
    ] = None
    allow_host: Annotated[
        Optional[list[str]],
        _flag("Another name of this machine, or of a web page that may call it; repeatable.", "HTTP"),
    ] = None
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


_TASKS = "A task folder, a folder of them, a .jsonl or .parquet file, hf://org/name@split, or module:function."
_ONLY = _flag("Only tasks whose id matches, with * as wildcard; repeatable.")
_LIMIT = _flag("Maximum number of tasks.")


@dataclass(frozen=True, kw_only=True)
class ListTasksOptions:
    where: Annotated[str, typer.Argument(help=_TASKS)]
    only: Annotated[Optional[list[str]], _ONLY] = None
    limit: Annotated[Optional[int], _LIMIT] = None
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class CheckTasksOptions(ListTasksOptions):
    sandbox: Annotated[str, _flag("Sandbox to prove tasks in: local, bubblewrap, docker …", SANDBOX)] = "local"
    image: Annotated[str, _flag("Container image; wins over the tasks' own.", SANDBOX)] = ""
    prove: Annotated[bool, _flag("Also run and grade the tasks' solutions.", "Proof", "--prove/--no-prove")] = True
    concurrency: Annotated[int, _flag("Tasks to prove at once.", "Proof")] = 2


class OptionCommand(Generic[O]):
    """A command that takes one object with its options; typer sees a flag per option.

    The flags are computed when typer asks for them: importing this module does not load the settings.
    """

    def __init__(self, function: Callable[[O], None], options: type[O], settings: Sequence[str]) -> None:
        functools.update_wrapper(self, function, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        self._function, self._options, self._settings = function, options, settings

    def __call__(self, **values: Any) -> None:
        names = {one.name for one in fields(self._options)}  # type: ignore[arg-type]
        if self._settings:
            settings = {name: values.pop(name) for name in list(values) if name not in names}
            # A repeatable flag that was not given may be an empty list.
            values["settings"] = {name: None if value == [] else value for name, value in settings.items()}
        self._function(self._options(**values))

    @functools.cached_property
    def __signature__(self) -> inspect.Signature:
        hints = get_type_hints(self._options, include_extras=True)
        parameters = []
        for one in fields(self._options):  # type: ignore[arg-type]
            if one.name == "settings":
                parameters += _setting_parameters(self._settings)
            else:
                parameters.append(_parameter(one.name, hints[one.name], _default(one)))
        return inspect.Signature(parameters, return_annotation=None)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.annotation for name, parameter in self.__signature__.parameters.items()}


def takes(options: type[O], settings: Sequence[str] = ()) -> Callable[[Callable[[O], None]], OptionCommand[O]]:
    """Decorate a command with the flags of an options class, and with flags for these settings of the gateway."""
    return lambda function: OptionCommand(function, options, settings)


def _default(one: Field[Any]) -> Any:
    return inspect.Parameter.empty if one.default is MISSING else one.default


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _setting_parameters(names: Sequence[str]) -> list[inspect.Parameter]:
    """Build a parameter per setting. One that is not given is None, so that a file's value or the default holds."""
    import msgspec

    from turngate.config import ServeConfig

    hints = get_type_hints(ServeConfig, include_extras=True)
    settings = {one.name: one for one in msgspec.structs.fields(ServeConfig)}
    parameters = []
    for name in settings if names == ALL_SETTINGS else names:
        kind, about = get_args(hints[name])
        flag = name.replace("_", "-")
        spelling = (f"--{flag}/--no-{flag}",) if kind is bool else ()
        unnamed = [value for value in _literals(kind) if value not in about.description]
        text = about.description + (f" One of {', '.join(_literals(kind))}." if unnamed else "")
        option = _flag(text, about.extra["panel"], *spelling, default=_format_default(settings[name].default))
        parameters.append(_parameter(name, Annotated[Optional[_flag_type(kind)], option], None))
    return parameters


def _format_default(default: object) -> str:
    """Write a default for people. An empty one is left to the description."""
    if isinstance(default, int | float):
        return f"{default:g}" if default else ""
    return default if isinstance(default, str) else ""


def _literals(kind: Any) -> tuple[str, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _flag_type(kind: Any) -> Any:
    """Map the type of a setting to the type of its flag. Values of a literal are checked with the other settings."""
    if get_origin(kind) is Literal:
        return str
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind
