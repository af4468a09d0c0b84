"""Command-line options: classes from which `option_command.py` creates the flags of many commands, and flags that other commands share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from turngate.cli.option_command import BATCH, WHAT
from turngate.cli.option_command import describe_flag as _flag

ALL_SETTINGS = ("*",)
SERVE_SETTINGS = ("*", "-cell")  # all settings except those of a cell
DEFAULT_AGENT = "mini-swe-agent"
# Settings for the gateway that `turngate run` and `turngate batch` start if none is running.
RUN_SETTINGS = ("data", "engine", "engine_url", "engine_key_env", "model", "tokenizer", "script", "max_context")

SAMPLING, SANDBOX, GATEWAY = "Sampling", "Sandbox", "Gateway"
LIMITS, GRADING, OUTPUT = "Limits", "Grading", "Output"
CLUSTER, ALARMS = "Cluster", "Alarms"
SELECTION, FORMAT, SCORING, TRAINING, TEACHER = "Which rollouts", "Format", "Scoring", "Training", "Teacher"


def _json(help: str = "Print JSON.") -> Any:
    return _flag(help, OUTPUT, "--json")


_AGENT = _flag(
    "Agent to run: a name from `turngate agents`, or the path to an agent file such as ./my-agent.toml.", WHAT
)
_TIMEOUT = _flag("Time limit for the agent, in seconds.", LIMITS, default="the task's time limit, or 1800")
_MAX_TURNS = _flag("Maximum number of turns per session.", LIMITS)
_SET = _flag("Set an option of the agent, as NAME=VALUE; repeatable.", WHAT, "--set")
_LOG_FORMAT = _flag("Log format: text or json; json also logs stages and outcomes.", OUTPUT)
_SPANS = _flag(
    "Send OpenTelemetry spans (needs the `otel` extra). Setting OTEL_EXPORTER_OTLP_ENDPOINT also enables this.",
    OUTPUT,
    "--spans",
)


_RAY = _flag(
    "Run the rollouts on the Ray cluster at this address. Without a value, or with auto, use this machine's cluster. Needs "
    "the `ray` extra, and the URL of a PostgreSQL database as --data.",
    CLUSTER,
    metavar="[ADDRESS]",
)
_RAY_LABEL = _flag("Run only on Ray nodes with this label, as NAME=VALUE; repeatable.", CLUSTER)


def _biasing(setting: str) -> str:
    return f"{setting}. Turns sampled with it are not trained."


def _truncating(setting: str) -> str:
    return f"{setting}. Turns sampled with it are trained only in rows with sampling masks."


GatewayFlag = Annotated[str, typer.Option(help="URL of the gateway. Set TURNGATE_ADMIN_KEY to its key.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
GATEWAY_URL = "http://127.0.0.1:8700"
_USE_GATEWAY = "URL of a running gateway to use instead of starting one. Set TURNGATE_ADMIN_KEY to its key."


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    config: Annotated[Optional[Path], _flag("TOML file with any of these settings; flags override it.", GATEWAY)] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # by name; None means that the flag was not passed


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(ServeOptions):
    gateway: Annotated[
        str,
        _flag(
            "URL of a running gateway to check instead of these settings. Set TURNGATE_ADMIN_KEY to its key.", GATEWAY
        ),
    ] = ""
    agent: Annotated[
        Optional[list[str]],
        _flag("Agent that must be installed; repeatable.", "What to check", default="report on all agents"),
    ] = None
    sandbox: Annotated[
        Optional[list[str]],
        _flag(
            "Sandbox that must work; repeatable.",
            "What to check",
            default="report on local, bubblewrap and docker",
        ),
    ] = None
    image: Annotated[str, _flag("Container image to test the docker sandbox with.", "What to check")] = ""
    only: Annotated[Optional[list[str]], _flag("Run only this check; repeatable.", "What to check")] = None
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options that `turngate run` and `turngate batch` share."""

    agent: Annotated[str, _AGENT]
    option: Annotated[Optional[list[str]], _SET] = None
    sandbox: Annotated[
        str, _flag("Sandbox to run agents in: local, bubblewrap, docker, e2b or huggingface.", SANDBOX)
    ] = "local"
    image: Annotated[str, _flag("Container image, or sandbox template.", SANDBOX, default="the task's image")] = ""
    network: Annotated[str, _flag("Network access of the sandbox: none (gateway only) or open.", SANDBOX)] = "none"
    cpus: Annotated[Optional[float], _flag("CPU limit per sandbox.", SANDBOX)] = None
    memory_mb: Annotated[Optional[int], _flag("Memory limit per sandbox, in megabytes.", SANDBOX)] = None
    disk_mb: Annotated[Optional[int], _flag("Disk limit per sandbox, in megabytes.", SANDBOX, default=16384)] = None
    public_url: Annotated[str, _flag("URL at which remote sandboxes reach the gateway.", SANDBOX)] = ""
    tunnel: Annotated[
        str,
        _flag(
            "Command that opens a tunnel to the gateway and prints the tunnel's URL. {port} in the command is replaced by the gateway's "
            "port. An alternative to --public-url.",
            SANDBOX,
        ),
    ] = ""
    gateway: Annotated[str, _flag(_USE_GATEWAY, GATEWAY)] = ""
    config: Annotated[Optional[Path], _flag("TOML file with gateway settings; flags override it.", GATEWAY)] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # by name; None means that the flag was not passed
    timeout: Annotated[Optional[float], _TIMEOUT] = None
    max_turns: Annotated[Optional[int], _MAX_TURNS] = None
    max_tokens: Annotated[Optional[int], _flag("Maximum number of sampled tokens per session.", LIMITS)] = None
    context_tokens: Annotated[
        Optional[int],
        _flag("Context length that the agent is configured for, in tokens.", LIMITS, default=131072),
    ] = None
    sampling: Annotated[
        str,
        _flag(
            "neutral: ignore the sampling settings that the agent requests, so that turns can be trained. Settings then come from the "
            "flags below, or else from the agent file; the default temperature is 1. agent: sample as the agent requests, for evaluations.",
            SAMPLING,
        ),
    ] = "neutral"
    temperature: Annotated[
        Optional[float],
        _flag("Temperature, regardless of what the agent requests.", SAMPLING, default="the agent file's, or 1"),
    ] = None
    top_p: Annotated[Optional[float], _flag(_truncating("Top-p"), SAMPLING)] = None
    top_k: Annotated[Optional[int], _flag(_truncating("Top-k"), SAMPLING)] = None
    min_p: Annotated[Optional[float], _flag(_truncating("Min-p"), SAMPLING)] = None
    presence_penalty: Annotated[Optional[float], _flag(_biasing("Presence penalty"), SAMPLING)] = None
    frequency_penalty: Annotated[Optional[float], _flag(_biasing("Frequency penalty"), SAMPLING)] = None
    repetition_penalty: Annotated[Optional[float], _flag(_biasing("Repetition penalty"), SAMPLING)] = None
    min_tokens: Annotated[Optional[int], _flag(_biasing("Minimum number of tokens per turn"), SAMPLING)] = None
    grade: Annotated[bool, _flag("Grade the result with the task's grader.", GRADING, "--grade/--no-grade")] = True
    on_refused: Annotated[
        str,
        _flag(
            "What to do if one of the agent's model calls is refused (docs/concepts.md): exclude (the rollout from training) or train "
            "(on the rollout).",
            GRADING,
        ),
    ] = "exclude"
    on_timeout: Annotated[
        str,
        _flag(
            "What to do if the agent times out: grade (its work), exclude (the rollout) or zero (the rollout's reward).",
            GRADING,
        ),
    ] = "grade"
    on_failure: Annotated[
        str,
        _flag(
            "What to do if the agent exits with an error: grade (its work), exclude (the rollout) or zero (the rollout's reward).",
            GRADING,
        ),
    ] = "grade"
    on_limit: Annotated[
        str,
        _flag(
            "What to do if the session or the sandbox reaches a limit: grade (the agent's work), exclude (the rollout) or zero "
            "(the rollout's reward).",
            GRADING,
        ),
    ] = "grade"
    on_lost: Annotated[
        str,
        _flag(
            "What to do if there is nothing to grade because the agent broke its sandbox or left too much data to copy: exclude "
            "(the rollout) or zero (the rollout's reward).",
            GRADING,
        ),
    ] = "zero"
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(RolloutOptions):
    agent: Annotated[str, _AGENT] = DEFAULT_AGENT
    command: Annotated[
        Optional[list[str]],
        typer.Argument(
            help="Command for `--agent shell`: everything after --. Needs neither --task nor --prompt.",
            metavar="-- COMMAND",
            show_default=False,
        ),
    ] = None
    task: Annotated[
        Optional[str],
        _flag(
            "Task to run: a folder with an instruction.md, or a text file.",
            WHAT,
            default="a small bundled task, unless --prompt or a command is passed",
        ),
    ] = None
    prompt: Annotated[Optional[str], _flag("Instruction for the agent, in place of --task.", WHAT)] = None
    seed: Annotated[Optional[int], _flag("Seed for sampling.", SAMPLING)] = None
    out: Annotated[Optional[Path], _flag("Folder for the agent's files and logs.", OUTPUT, default="DATA/rollouts")] = (
        None
    )
    as_json: Annotated[bool, _json("Print the outcome as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RolloutOptions):
    tasks: Annotated[
        str,
        _flag(
            "Tasks to run: a task folder, a folder of task folders, a .jsonl or .parquet file, hf://org/name, or "
            "file.py:function.",
            WHAT,
        ),
    ]
    only: Annotated[
        Optional[list[str]], _flag("Run only tasks whose id matches this pattern; * is a wildcard; repeatable.", WHAT)
    ] = None
    limit: Annotated[Optional[int], _flag("Maximum number of tasks.", WHAT)] = None
    n: Annotated[int, _flag("Number of rollouts per task.", BATCH, "--n", "-n")] = 1
    rounds: Annotated[int, _flag("Number of passes over the tasks. You can raise it to extend a batch.", BATCH)] = 1
    name: Annotated[str, _flag("Prefix for group names, by which a feed can select the groups.", BATCH)] = ""
    seed: Annotated[Optional[int], _flag("Seed for the task order and for sampling.", BATCH)] = None
    retries: Annotated[int, _flag("Retries per rollout after a fault that was not the agent's.", BATCH)] = 2
    stale_retries: Annotated[
        int,
        _flag("Retries per rollout that became stale because of policy updates; 0 excludes such rollouts.", BATCH),
    ] = 2
    concurrency: Annotated[int, _flag("Maximum number of agents running at the same time.", LIMITS)] = 8
    starting: Annotated[
        Optional[int],
        _flag(
            "Maximum number of sandboxes starting at the same time.", LIMITS, default="twice the number of CPU cores"
        ),
    ] = None
    grading: Annotated[
        Optional[int],
        _flag("Maximum number of rollouts graded at the same time.", LIMITS, default="the number of CPU cores"),
    ] = None
    warm: Annotated[
        Optional[int],
        _flag("Number of sandboxes to start ahead of time.", LIMITS, default="the number of CPU cores"),
    ] = None
    ray: Annotated[str, _RAY] = ""
    ray_label: Annotated[Optional[list[str]], _RAY_LABEL] = None
    out: Annotated[Optional[Path], _flag("Folder for the batch.", OUTPUT, default="DATA/batches/FINGERPRINT")] = None
    resume: Annotated[bool, _flag("Only resume an existing batch; fail if there is none.", BATCH, "--resume")] = False
    reuse_grades: Annotated[
        bool,
        _flag(
            "Grade identical work in a group only once. This applies to tasks that are graded by a repository's tests.",
            LIMITS,
            "--reuse-grades",
        ),
    ] = False
    keep_work: Annotated[bool, _flag("Keep the agents' working folders after grading.", OUTPUT, "--keep-work")] = False
    as_json: Annotated[bool, _json("Print the summary as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    tasks: Annotated[
        str,
        _flag(
            "Tasks to train on: a task folder, a folder of task folders, a .jsonl or .parquet file, hf://org/name, or "
            "file.py:function.",
            WHAT,
        ),
    ]
    model_folder: Annotated[Path, _flag("Model to train: a Hugging Face folder (Llama, Qwen2 or Qwen3).", WHAT)]
    out: Annotated[Path, _flag("Folder for the run. If it contains a run, that run is resumed.", OUTPUT)]
    agent: Annotated[str, _AGENT] = DEFAULT_AGENT
    option: Annotated[Optional[list[str]], _SET] = None
    held_out: Annotated[
        Optional[str], _flag("Tasks to evaluate before and after training; never trained on.", WHAT)
    ] = None
    held_out_n: Annotated[int, _flag("Number of rollouts per held-out task.", WHAT)] = 1
    tokenizer: Annotated[Optional[str], _flag("Tokenizer folder.", WHAT, default="the model folder")] = None
    steps: Annotated[int, _flag("Number of training steps.", TRAINING)] = 100
    n: Annotated[int, _flag("Number of rollouts per task; together they form a group.", TRAINING, "--n", "-n")] = 8
    groups: Annotated[int, _flag("Number of groups per step.", TRAINING)] = 4
    learning_rate: Annotated[float, _flag("Learning rate of AdamW.", TRAINING)] = 1e-5
    temperature: Annotated[float, _flag("Sampling temperature.", TRAINING)] = 1.0
    every: Annotated[int, _flag("Number of steps between checkpoints.", TRAINING)] = 10
    seed: Annotated[Optional[int], _flag("Seed for the task order and for sampling.", TRAINING)] = None
    sandbox: Annotated[
        str, _flag("Sandbox to run agents in: local, bubblewrap, docker, e2b or huggingface.", SANDBOX)
    ] = "bubblewrap"
    concurrency: Annotated[int, _flag("Maximum number of agents running at the same time.", LIMITS)] = 8
    timeout: Annotated[Optional[float], _TIMEOUT] = None
    max_turns: Annotated[Optional[int], _MAX_TURNS] = None
    context_tokens: Annotated[
        Optional[int],
        _flag(
            "Context length in tokens, for the engine and for the agent's configuration.",
            LIMITS,
            default="the model's maximum for the engine, 131072 for the agent",
        ),
    ] = None
    ray: Annotated[str, _RAY] = ""
    ray_label: Annotated[Optional[list[str]], _RAY_LABEL] = None
    engine_host: Annotated[
        str,
        _flag(
            "With --ray: address at which the nodes reach the engine on this machine.",
            CLUSTER,
            default="this machine's address on its default route",
        ),
    ] = ""
    mismatch_difference: Annotated[
        float,
        _flag(
            "Count a token as different if the log-probabilities that trainer and engine compute for it with the same weights differ by "
            "more than this.",
            ALARMS,
        ),
    ] = 0.2
    mismatch_share: Annotated[
        float,
        _flag(
            "Raise an alarm if more than this share of tokens counts as different (see --mismatch-difference); 0 turns it off.",
            ALARMS,
        ),
    ] = 0.05
    mismatch_kl: Annotated[
        float,
        _flag(
            "Raise an alarm if trainer and engine, with the same weights, diverge by more than this many nats per token; 0 turns it off.",
            ALARMS,
        ),
    ] = 0.01
    stale_kl: Annotated[
        float,
        _flag(
            "Raise an alarm if the trainer's policy diverges by more than this many nats per token from the older weights that sampled "
            "the tokens; 0 turns it off.",
            ALARMS,
        ),
    ] = 0.1
    data: Annotated[
        str,
        _flag("Folder for all recorded data; with --ray, URL of a PostgreSQL database.", OUTPUT, default="OUT/data"),
    ] = ""
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


@dataclass(frozen=True, kw_only=True)
class VerifyCommandOptions:
    session: Annotated[str, typer.Argument(help="Session id, a unique prefix of one, or `last`.")] = "last"
    every: Annotated[bool, _flag("Verify every session of --data.", SELECTION, "--all")] = False
    data: Annotated[str, _flag("Data folder, or postgresql:// address of a shared store.", SELECTION)] = "turngate-data"
    rollouts: Annotated[
        str,
        _flag(
            "Folder with the agents' logs, or a folder that contains `rollouts` folders, such as the --out folder of `train`.",
            SELECTION,
            default="DATA, or the current folder for a shared store",
        ),
    ] = ""
    engine: Annotated[str, _flag("Scoring engine, which recomputes log-probabilities: vllm or scripted.", SCORING)] = ""
    engine_url: Annotated[str, _flag("URL of the scoring engine.", SCORING)] = ""
    engine_key_env: Annotated[
        str, _flag("Name of the environment variable with the scoring engine's API key.", SCORING)
    ] = ""
    model: Annotated[str, _flag("Model name on the scoring engine.", SCORING)] = ""
    policy_version: Annotated[Optional[int], _flag("Score only turns sampled at this policy version.", SCORING)] = None
    tolerance: Annotated[float, _flag("Maximum accepted difference between log-probabilities.", SCORING)] = 0.02
    tokenizer: Annotated[
        str,
        _flag(
            "Tokenizer to render with, if the sessions' own tokenizer is not on this machine.",
            "Rendering",
        ),
    ] = ""
    family: Annotated[
        str,
        _flag(
            "Renderer family that the sessions were served with: template, or a family from the `renderers` package.",
            "Rendering",
        ),
    ] = ""
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    format: Annotated[
        str, typer.Argument(help="Output format: rows, tree, sft, rejection, dpo, verl, slime, areal, tinker or atif.")
    ]
    out: Annotated[
        str,
        _flag("File to write, ending in .jsonl or .parquet; atif also accepts a folder.", OUTPUT, metavar="PATH"),
    ]  # a str, because a Path would lose the trailing / that marks a folder
    data: Annotated[str, _flag("Data folder, or postgresql:// address of a shared store.", SELECTION)] = "turngate-data"
    group: Annotated[
        Optional[list[str]], _flag("Export only groups with this name; * is a wildcard; repeatable.", SELECTION)
    ] = None
    task: Annotated[
        Optional[list[str]],
        _flag("Export only rollouts of tasks with this id; * is a wildcard; repeatable.", SELECTION),
    ] = None
    session: Annotated[
        Optional[list[str]], _flag("Export only sessions with this id; * is a wildcard; repeatable.", SELECTION)
    ] = None
    min_reward: Annotated[
        Optional[float],
        _flag(
            "Export only rollouts with at least this reward.",
            SELECTION,
            default="1 for rejection, otherwise no minimum",
        ),
    ] = None
    resolved: Annotated[bool, _flag("Export only rollouts graded as resolved.", SELECTION, "--resolved")] = False
    unscored: Annotated[
        str, _flag("For rollouts without a known reward: keep (with a null reward) or drop.", SELECTION)
    ] = "keep"
    unfinished: Annotated[
        bool, _flag("Also export sessions that are open, cancelled or superseded.", SELECTION, "--unfinished")
    ] = False
    form: Annotated[
        str,
        _flag(
            "Form of each record. For sft and rejection: messages, completions or tokens; for dpo: messages or tokens.",
            FORMAT,
            "--as",
        ),
    ] = ""
    advantage: Annotated[
        str, _flag("rows, tree, tinker: method for computing advantages (normalised, leave_one_out or none).", FORMAT)
    ] = "normalised"
    imitate: Annotated[
        bool,
        _flag(
            "sft, rejection: also include turns without log-probabilities or with biased sampling.", FORMAT, "--imitate"
        ),
    ] = False
    keep: Annotated[
        str,
        _flag(
            "rejection: accepted rollouts of a group to keep: all, or only the one with the highest reward (best).",
            FORMAT,
        ),
    ] = "all"
    margin: Annotated[float, _flag("dpo: minimum reward difference within a pair.", FORMAT)] = 0.0
    pairs: Annotated[
        int,
        _flag("dpo: maximum number of pairs per group; those with the largest reward differences are kept.", FORMAT),
    ] = 4
    prompt_ids: Annotated[bool, _flag("atif: include the prompt ids of every step.", FORMAT, "--prompt-ids")] = False
    side: Annotated[
        list[str] | None,
        _flag("rows, tree, verl, slime: name of side data to include, such as routed_experts; repeatable.", FORMAT),
    ] = None
    turn_rewards: Annotated[bool, _flag("rows, tree, verl, slime: include turn rewards.", FORMAT, "--turn-rewards")] = (
        False
    )
    credit: Annotated[
        str,
        _flag(
            "rows, tree: include turn advantages, which compare each turn with turns of the same index (turn_index) or with all "
            "turns of the group (all_turns).",
            FORMAT,
        ),
    ] = ""
    gamma: Annotated[
        float, _flag("rows, tree: discount for later rewards in turn advantages, from 0 to 1.", FORMAT)
    ] = 1.0
    teacher: Annotated[
        str, _flag("rows, tree: engine of a teacher that scores the sampled tokens: vllm, sglang or local.", TEACHER)
    ] = ""
    teacher_url: Annotated[
        str, _flag("URL of the teacher's server. Set TURNGATE_TEACHER_KEY to its API key.", TEACHER)
    ] = ""
    teacher_model: Annotated[
        str, _flag("The teacher's name on the server, or the model folder of a local teacher.", TEACHER)
    ] = ""
    teacher_version: Annotated[
        str, _flag("Version of the teacher's weights. Scores are cached per version.", TEACHER)
    ] = ""
    teacher_top_k: Annotated[
        int, _flag("Number of the teacher's most likely tokens to export for each sampled token.", TEACHER)
    ] = 0
    teacher_concurrency: Annotated[int, _flag("Maximum number of concurrent calls to the teacher.", TEACHER)] = 8
    teacher_tokenizer: Annotated[
        str, _flag("The teacher's tokenizer folder, if its server cannot decode ids.", TEACHER)
    ] = ""
    teacher_cache: Annotated[
        Optional[Path], _flag("File that caches the scores.", TEACHER, default="DATA/teacher-scores.db")
    ] = None
    tokenizer: Annotated[
        str,
        _flag(
            "Tokenizer of the recorded ids, if the sessions' own tokenizer is not on this machine.",
            TEACHER,
        ),
    ] = ""
    as_json: Annotated[bool, _json("Print the summary as JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    config: Annotated[
        Optional[Path], _flag("TOML file with the endpoints and other settings; flags override it.", GATEWAY)
    ] = None
    data: Annotated[Optional[str], _flag("Folder for all recorded data.", GATEWAY, default="turngate-data")] = None
    sandbox: Annotated[
        Optional[str],
        _flag("Sandbox to run agents in, such as local, bubblewrap or docker.", SANDBOX, default="bubblewrap"),
    ] = None
    running: Annotated[
        Optional[int], _flag("Maximum number of rollouts running at the same time.", LIMITS, default=8)
    ] = None
    http: Annotated[
        Optional[str],
        _flag(
            "Serve streamable HTTP at /mcp on this address instead of stdin and stdout.", "HTTP", metavar="HOST:PORT"
        ),
    ] = None
    allow_host: Annotated[
        Optional[list[str]],
        _flag("Additional host name to accept in the Host and Origin headers; repeatable.", "HTTP"),
    ] = None
    log_format: Annotated[str, _LOG_FORMAT] = "text"
    spans: Annotated[bool, _SPANS] = False


_TASKS = "Task folder, folder of task folders, .jsonl or .parquet file, hf://org/name@split, or file.py:function."
_ONLY = _flag("Include only tasks whose id matches this pattern; * is a wildcard; repeatable.")
_LIMIT = _flag("Maximum number of tasks.")


@dataclass(frozen=True, kw_only=True)
class ListTasksOptions:
    where: Annotated[str, typer.Argument(help=_TASKS)]
    only: Annotated[Optional[list[str]], _ONLY] = None
    limit: Annotated[Optional[int], _LIMIT] = None
    as_json: Annotated[bool, _json()] = False


@dataclass(frozen=True, kw_only=True)
class CheckTasksOptions(ListTasksOptions):
    sandbox: Annotated[str, _flag("Sandbox to prove tasks in, such as local, bubblewrap or docker.", SANDBOX)] = "local"
    image: Annotated[str, _flag("Container image to use instead of the tasks' own images.", SANDBOX)] = ""
    prove: Annotated[
        bool,
        _flag(
            "Grade each task twice: once with its solution applied, and once with nothing done.",
            "Proof",
            "--prove/--no-prove",
        ),
    ] = True
    concurrency: Annotated[int, _flag("Maximum number of tasks proven at the same time.", "Proof")] = 2


@dataclass(frozen=True, kw_only=True)
class MakeRepairsOptions:
    sources: Annotated[
        list[str],
        typer.Argument(help="Packages with tests: folders, or releases on the package index as NAME==VERSION."),
    ]
    out: Annotated[Path, _flag("Folder for the tasks: train.jsonl, held-out.jsonl and packages.json.", OUTPUT)]
    per_package: Annotated[int, _flag("Maximum number of tasks per package.", "Which tasks")] = 40
    held_out: Annotated[float, _flag("Fraction of the packages to hold out from training.", "Which tasks")] = 0.25
    seed: Annotated[int, _flag("Seed for choosing bugs and splitting packages.", "Which tasks")] = 0
    hint: Annotated[
        str,
        _flag(
            "What the instruction names: only the failing tests (tests), or also the bug's file (file) or function (function).",
            FORMAT,
        ),
    ] = "file"
    sandbox: Annotated[str, _flag("Sandbox to run the tests in, such as local, bubblewrap or docker.", SANDBOX)] = (
        "local"
    )
    image: Annotated[str, _flag("Container image with python3 and pytest.", SANDBOX)] = ""
    concurrency: Annotated[int, _flag("Maximum number of bugs tried at the same time.", LIMITS)] = 2
