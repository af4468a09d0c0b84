"""Harbor task folders: what becomes a task, what is refused, and the `[turngate]` table."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.errors import TaskError
from turngate.tasks import load_task
from turngate.tasks.task import Function, Rubric, Script, Solution
from turngate.trace.tool_schema import HostTool

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"


def write_task(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"instruction.md": "Do it.", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FULL = """
schema_version = "1.4"
[task]
name = "org/fix-it"
[metadata]
difficulty = "easy"
made = 2024-05-01
[agent]
timeout_sec = 90
user = "agent"
[verifier]
timeout_sec = 45.5
env = { MODE = "strict", KEY = "${MY_KEY}", OTHER = "${NOT_THERE:-none}" }
[environment]
build_timeout_sec = 600.0
docker_image = "debian:bookworm"
cpus = 2
memory = "2G"
storage = "10G"
network_mode = "public"
workdir = "/srv/app"
env = { LANG = "C" }
[solution]
env = { HOW = "well" }
"""


def test_every_part_of_harbor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    folder = write_task(
        tmp_path / "fix-it",
        {"task.toml": FULL, "tests/test.sh": "true", "solution/solve.sh": "true", "environment/Dockerfile": "FROM x"},
    )
    task = load_task(folder)
    assert (task.image, task.dockerfile, task.workdir) == ("debian:bookworm", folder / "environment", "/srv/app")
    assert (task.cpus, task.memory_mb, task.timeout_s, task.env) == (2, 2048, 90.0, {"LANG": "C"})
    assert task.grader == Script(
        files=folder / "tests", timeout_s=45.5, env={"MODE": "strict", "KEY": "sesame", "OTHER": "none"}
    )
    assert task.solution == Solution(files=folder / "solution", env={"HOW": "well"})
    assert task.metadata == {"difficulty": "easy", "made": "2024-05-01"}


def test_run_script_becomes_probe(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path, {"tests/test.sh": "true", "tests/run.sh": "true"}))
    assert isinstance(task.grader, Script)
    assert task.grader.probe == ("bash", "/tests/run.sh") and task.grader.command == ("bash", "/tests/test.sh")
    assert task.grader.timeout_s == 600.0, "Harbor's default"


def test_turngate_table(tmp_path: Path) -> None:
    text = """
    [turngate]
    setup_timeout_sec = 5
    workdir = "/work"
    [[turngate.tools]]
    name = "answer"
    description = "Say the answer."
    schema = { type = "object", properties = { text = { type = "string" } } }
    [[turngate.rubric]]
    name = "style"
    script = "style.sh"
    [[turngate.rubric]]
    name = "speed"
    weight = 3
    function = "speed.py:grade"
    """
    task = load_task(write_task(tmp_path, {"task.toml": text, "tests/style.sh": "true", "speed.py": ""}))
    assert (task.setup_timeout_s, task.workdir) == (5.0, "/work")
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    assert task.tools == (HostTool(name="answer", description="Say the answer.", schema=schema),)
    assert isinstance(task.grader, Rubric)
    style, speed = task.grader.parts
    assert isinstance(style.grader, Script) and style.grader.command == ("bash", "/tests/style.sh")
    assert isinstance(speed.grader, Function) and speed.grader.name == f"{tmp_path / 'speed.py'}:grade"
    assert (style.weight, speed.weight) == (1.0, 3.0)


def test_folder_of_tasks_names_them(tmp_path: Path) -> None:
    for name in ("d", "b", "a", "c"):
        write_task(tmp_path / name, {})
    with pytest.raises(TaskError) as refused:
        load_task(tmp_path)
    assert refused.value.message == (
        f"task: {tmp_path} is not a task, but a folder of tasks (a, b, c, …); specify one of them, such as {tmp_path}/a, or run them all "
        f"with `turngate batch --tasks {tmp_path}`"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"empty has no instruction.md; add one"):
        load_task(tmp_path / "empty")


def test_exit_code_and_function_graders(tmp_path: Path) -> None:
    script_task = load_task(
        write_task(tmp_path / "a", {"task.toml": '[turngate]\ndecides = "exit code"', "tests/test.sh": "true"})
    )
    assert isinstance(script_task.grader, Script) and script_task.grader.decides == "exit code"
    function_task = load_task(
        write_task(tmp_path / "b", {"task.toml": '[turngate]\ngrader = "my.module:grade"\n[verifier]\ntimeout_sec = 9'})
    )
    assert function_task.grader == Function(name="my.module:grade", timeout_s=9.0)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"task.toml": "[turngate]\nsetup_timeout = 5"},
            r"turngate.setup_timeout is not a known setting; did you mean",
        ),
        ({"task.toml": '[turngate]\ndecides = "luck"'}, r"turngate.decides must be one of .*, not 'luck'"),
        ({"task.toml": '[turngate]\ngrader = "grade"'}, "must be module:function or file.py:function, not 'grade'"),
        ({"task.toml": '[turngate]\ngrader = "no.py:grade"'}, r"refers to .*no\.py, which does not exist"),
        ({"task.toml": "[[turngate.rubric]]\nname = 'a'"}, "either 'script'"),
        (
            {"task.toml": "[[turngate.rubric]]\nname = 'a'\nscript = '../x.sh'"},
            r"refers to '\.\./x\.sh', which is not a file in",
        ),
        (
            {"task.toml": "[[turngate.rubric]]\nname = 'a'\nweight = 0\nfunction='a:b'"},
            "weight must be a number greater than 0",
        ),
        (
            {
                "task.toml": "[[turngate.rubric]]\nname = 'a'\nfunction='a:b'\n[[turngate.rubric]]\nname = 'a'\nfunction='a:b'"
            },
            "two entries named 'a'",
        ),
        (
            {"task.toml": "[[turngate.tools]]\nname = 'answer'\ndescription = 'Say it.'\nschema = { type = 'string' }"},
            r"tools\[0\].schema must be a JSON schema of type 'object'",
        ),
        (
            {"task.toml": "[[turngate.tools]]\nname = 'An Answer'\ndescription = 'Say it.'\nschema = {}"},
            "turngate.tools",
        ),
        ({"task.toml": "[turngate]\nworkdir = 'app'"}, "turngate.workdir must be an absolute path"),
        (
            {"task.toml": "[environment]\nmemory = 'much'"},
            "environment.memory must be a size like '2G' or '512M', not 'much'",
        ),
        ({"task.toml": "[environment]\nmemory = '1G'\nmemory_mb = 512"}, "but memory_mb is 512"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "environment.os"),
        ({"task.toml": "[verifier.environment]\ncpus = 1"}, "verifier.environment"),
        ({"task.toml": "[[steps]]\nname = 'one'"}, "steps is not supported"),
        ({"environment/docker-compose.yaml": ""}, "several containers"),
        (
            {"task.toml": "[verifier]\nenv = { A = '${NOT_SET_ANYWHERE}' }", "tests/test.sh": ""},
            "NOT_SET_ANYWHERE, which is not set",
        ),
        (
            {"task.toml": "[environment]\nenv = { A = '${TURNGATE_ADMIN_KEY:-}' }"},
            "must not refer to TURNGATE_ADMIN_KEY",
        ),
        ({"task.toml": "[environment]\nenv = { A = '${PGPASSWORD:-}' }"}, "must not refer to PGPASSWORD"),
        ({"tests/check.py": ""}, "has no test.sh"),
        ({"solution/answer.txt": ""}, "has no solve.sh"),
    ],
)
def test_invalid_folder_error_names_problem(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        load_task(write_task(tmp_path / "t", files))


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_examples_are_complete(name: str) -> None:
    task = load_task(EXAMPLES / name)
    assert task.grader is not None and task.solution is not None and task.files is not None
    assert task.timeout_s and task.metadata
