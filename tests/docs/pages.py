"""What the readers of each page have, and the commands and blocks that `test_run_pages.py` does not run, with the reason."""

from __future__ import annotations

from typing import NamedTuple

from tests.docs.script import Setting

_MODEL = "--engine vllm --engine-url http://127.0.0.1:8000 --model Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-8B"
_SHELL_AGENT = """--agent shell --sandbox local --set command="sh $AGENT" """
_PYTHON_SHELL_AGENT = (
    """agent="shell", sandbox="local", options={"command": "sh " + __import__("os").environ["AGENT"]}"""
)


def _record(data: str, out: str, agent: str = _SHELL_AGENT) -> str:
    """Return a command that records a group of two rollouts called `train…`."""
    return f"turngate batch --tasks examples/tasks {agent} --n 2 --name train --data {data} --out {out} {_MODEL}"


_FILL_FEED = f"""
turngate batch --tasks examples/tasks {_SHELL_AGENT} --n 8 --rounds 100 --concurrency 2 --name train --out runs/fill \\
    --gateway http://127.0.0.1:8700 > /dev/null &
"""
_OPEN_SESSION = """
curl -X POST -H "Authorization: Bearer $TURNGATE_ADMIN_KEY" http://127.0.0.1:8700/admin/sessions \\
    -d '{"id": "r-1"}' > opened.json
export SESSION_SECRET=$(python -c 'import json; print(json.load(open("opened.json"))["api_key"])')
"""
_SECRETS = 'import os\nSESSION_SECRET = SESSION_KEY = os.environ["SESSION_SECRET"]\n'
_GATEWAY_NAMES = """
import os
url, admin_key, key, session, last = "http://127.0.0.1:8700", os.environ["TURNGATE_ADMIN_KEY"], os.environ["TURNGATE_ADMIN_KEY"], "r-1", 0
"""
# The trainer's sampler, and an agent that calls the gateway once it is up.
_GATE_NAMES = """
import asyncio, contextlib, os, socket, threading, openai
import turngate.server.run as run
from turngate.client.gateway import GatewayClient

def sample(prompt, max_tokens, sampling):
    return [9707, 151645], [-0.5, -0.1]

async def call_model(url, key):
    async with GatewayClient(url, key) as client:
        opened = await client.open({"mode": "gate"})
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=opened.key, max_retries=0) as agent:
        reply = await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    print(reply.choices[0].message.content)

@contextlib.asynccontextmanager
async def run_with_agent(config, **options):
    async with original(config, **options) as gateway:
        agent = asyncio.create_task(call_model(gateway.url, gateway.admin_key))
        yield gateway
        await agent

original, run.run_embedded = run.run_embedded, run_with_agent
with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port := int("http://127.0.0.1:8700"[17:]))):
    call = call_model(f"http://127.0.0.1:{port}", os.environ["TURNGATE_ADMIN_KEY"])
    threading.Thread(target=asyncio.run, args=[call]).start()
"""
_THROTTLE_NAMES = (
    _GATEWAY_NAMES
    + """
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from turngate.agents.launch import Installation
from turngate.agents.spec import find_agent
from turngate.client.feed import Feed, FeedConfig
from turngate.client.gateway import GatewayClient
from turngate.rollout.batch import run_batch
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.throttle import TrainerThrottle
from turngate.sandboxes import get_backend
from turngate.tasks import read_tasks
stack = AsyncExitStack()
gateway = await stack.enter_async_context(GatewayClient(url, key))
connector = await stack.enter_async_context(GatewayConnector(url))
feed = await stack.enter_async_context(await Feed.open(gateway, "throttled", FeedConfig(n=2)))
plan = BatchPlan(tasks=tuple(read_tasks("examples/tasks")), agent=find_agent("shell").spec, installed=Installation(),
    options={"command": f"sh {os.environ['AGENT']}"}, backend=get_backend("local"), model="policy", folder=Path("runs/throttled"), n=2)
"""
)

_CHECK_GRADER = """
echo "Write hello.py." > task/instruction.md
printf '[turngate]\\ngrader = "grade.py:grade"\\n' > task/task.toml
turngate run --task task --agent shell -- sh -c 'echo "print(\\"hello\\")" > hello.py' | tee graded.txt
grep "reward 1" graded.txt
"""

# A program that asks the model once.
_OWN_PROGRAM = """
mkdir programs
cat > programs/mine <<'END'
#!/usr/bin/env python3
import json, os, sys, urllib.request
url, key = os.environ.get("MINE_URL") or os.environ["OPENAI_BASE_URL"], os.environ.get("MINE_KEY") or os.environ["OPENAI_API_KEY"]
body = {"model": os.environ.get("OPENAI_MODEL", sys.argv[2]), "messages": [{"role": "user", "content": sys.argv[-1] + sys.stdin.read()}]}
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
END
chmod +x programs/mine
export PATH="$PWD/programs:$PATH"
"""

# The batch that the page starts last has recorded a rollout.
_AWAIT_ROLLOUT = """
until curl -H "Authorization: Bearer $TURNGATE_ADMIN_KEY" "http://127.0.0.1:8700/admin/sessions?status=sealed" | grep '"id"'; do
    sleep 0.5
done
"""

SETTINGS = {
    "README.md": Setting(
        after=_AWAIT_ROLLOUT,
        replaced={
            "--agent mini-swe-agent --script": "--agent pi --script",  # starts in a third of the time
            "--agent mini-swe-agent --n 8 --rounds 100": f"{_SHELL_AGENT} --n 8 --rounds 100",
        },
    ),
    "docs/agents.md": Setting(
        before="echo 'print(1)' > agent.py" + _OWN_PROGRAM,
        replaced={'"""…"""': '"""print(\'done\')"""'},
        repeats="tests/cli/test_agents.py",
    ),
    "docs/batch.md": Setting(
        names=_THROTTLE_NAMES,
        is_python_last=True,
        repeats="tests/batch/test_batch.py",
        replaced={"--rounds 50": "--rounds 1", "--agent pi --n 8 --rounds": f"{_SHELL_AGENT} --n 8 --rounds"},
    ),
    "docs/configuration.md": Setting(
        files={"gateway.toml": ("toml", 0)},
        replaced={
            "/var/lib/turngate": "data",
            "http://10.0.0.1:8000": "http://127.0.0.1:8000",
            "http://10.0.0.2:8000": "http://localhost:8000",
            "/models/Qwen3-8B": "Qwen/Qwen3-8B",
        },
    ),
    "docs/deploy.md": Setting(replaced={"HF_TOKEN=…": "HF_TOKEN=none-for-a-dry-run"}),
    "docs/dialects/gemini.md": Setting(before=_OPEN_SESSION, names=_SECRETS, is_slow=True),
    "docs/dialects/responses.md": Setting(before=_OPEN_SESSION, names=_SECRETS, is_slow=True),
    "docs/doctor.md": Setting(before="echo 'port = 8701' > gateway.toml"),
    "docs/events.md": Setting(before=_OPEN_SESSION, names=_GATEWAY_NAMES),
    "docs/export.md": Setting(before=_record("turngate-data", "runs/recorded"), repeats="tests/cli/test_export.py"),
    "docs/feed.md": Setting(before=_FILL_FEED, names=_GATEWAY_NAMES, is_slow=True, repeats="tests/feed/test_feed.py"),
    "docs/gate.md": Setting(names=_GATE_NAMES),
    "docs/http-api.md": Setting(before=_OPEN_SESSION),
    "docs/mcp.md": Setting(files={"turngate.toml": ("toml", 0)}, replaced={"/models/Qwen3-8B": "Qwen/Qwen3-8B"}),
    "docs/observe.md": Setting(
        before="export ANTHROPIC_API_KEY=none", replaced={"https://api.anthropic.com": "http://127.0.0.1:8000"}
    ),
    "docs/openenv.md": Setting(replaced={"./my-agent": "sh -c 'test \"$OPENAI_API_KEY\"'"}),
    "docs/grading.md": Setting(files={"task/grade.py": ("python", 0)}, after=_CHECK_GRADER),
    "docs/local-engine.md": Setting(
        before='mkdir -p ~/models && ln -s "$TURNGATE_CACHE/models/tiny-qwen3" ~/models/SmolLM2-135M-Instruct',
        parts=("torch", "tiny-qwen3"),
        repeats="tests/engines/test_local_real.py",
    ),
    "docs/service.md": Setting(
        before="sed -i 's|/models/Qwen3-8B|Qwen/Qwen3-8B|; s|127.0.0.1:[0-9]*|127.0.0.1:8000|' examples/service.toml",
        parts=("bubblewrap",),
        repeats="tests/service/test_rollouts.py",
    ),
    # The batch is that of docs/start/evaluate.md, with another provider.
    "docs/start/collect.md": Setting(
        repeats="tests/trainers/test_export.py",
        replaced={
            "KEY=…": "KEY=none",
            "https://api.openai.com": "http://127.0.0.1:8000",
            "MODEL-NAME": "Qwen/Qwen3-8B",
            "--agent opencode --n 4 --sandbox docker": f"{_SHELL_AGENT} --n 2",
        },
    ),
    "docs/start/evaluate.md": Setting(
        replaced={
            "KEY=…": "KEY=none",
            "https://api.anthropic.com": "http://127.0.0.1:8000",
            "MODEL-NAME": "Qwen/Qwen3-8B",
            "--agent claude-code --n 4 --sandbox docker": f"{_SHELL_AGENT} --n 2",
        }
    ),
    "docs/projects.md": Setting(
        gateway=_MODEL,
        replaced={
            "$(cat turngate-data/admin-key)": "$TURNGATE_ADMIN_KEY",
            "projects create acme": "projects create acme --gateway http://127.0.0.1:8700",
            "projects change acme": "projects change acme --gateway http://127.0.0.1:8700",
            "projects delete acme": "projects delete acme --gateway http://127.0.0.1:8700",
            "--out acme.key": "--out acme.key --gateway http://127.0.0.1:8700",
            "--agent pi": _SHELL_AGENT,
        },
    ),
    # Pi runs in the first three examples.
    "docs/python.md": Setting(
        repeats="tests/api/test_docs.py",
        replaced={
            'agent="pi", model=model)': f"{_PYTHON_SHELL_AGENT}, model=model)",
            'tg.Client(model, agent="pi"': f"tg.Client(model, {_PYTHON_SHELL_AGENT}",
            'tg.open(model, agent="pi"': f"tg.open(model, {_PYTHON_SHELL_AGENT}",
        },
    ),
    "docs/retention.md": Setting(
        before=_record("turngate-data", "runs/recorded"),
        replaced={"postgresql://turngate@db.example/turngate": "turngate-data", "30d": "0m"},
    ),
    "docs/start/own-trainer.md": Setting(
        names=_GATEWAY_NAMES + "number_in_my_checkpoint, save_checkpoint = None, print\n",
        is_python_last=True,
        repeats="tests/feed/test_feed.py",
    ),
    "docs/tasks.md": Setting(
        files={"rows.jsonl": ("json", 0)}, replaced={"--image turngate-base:bookworm": "", "'django__*'": "'h*'"}
    ),
    "docs/verify.md": Setting(
        before=f"{_record('data', 'runs/other')}\n{_record('runs/first/data', 'runs/first', '--agent pi')}",
        is_slow=True,
        repeats="tests/cli/test_verify.py",
    ),
    "docs/weights.md": Setting(gateway=_MODEL),
}


class Unrun(NamedTuple):
    """A command or a Python block that the page's script leaves out. Its flags and imports are checked all the same."""

    page: str
    start: str  # of the command or of the block
    reason: str
    test: str = ""  # the file with the test that runs it in another way


NEEDS_POSTGRES = "needs a PostgreSQL server of your own"
NEEDS_DOCKER = "builds images or needs a registry"
NEEDS_TRL = "needs TRL, which has its own environment"
NEEDS_OPENENV = "needs OpenEnv, which has its own environment"
NEEDS_VERIFIERS = "needs verifiers, which has its own environment"
NEEDS_SYSTEMD = "installs a system service"
NEEDS_RAY = "needs Ray, which has its own environment"
TOO_LONG = "takes minutes"
NEEDS_TEACHER = "needs a second engine"

UNRUN = [
    Unrun("README.md", "python examples/trl/async_grpo.py", NEEDS_TRL, "tests/trainers/test_trl.py"),
    Unrun("docs/cells.md", "pip install", NEEDS_POSTGRES),
    Unrun("docs/cells.md", "createdb", NEEDS_POSTGRES),
    Unrun("docs/cells.md", "turngate cell --shared", NEEDS_POSTGRES, "tests/cells/test_cell.py"),
    Unrun("docs/cells.md", "turngate doctor --shared", NEEDS_POSTGRES, "tests/cells/test_cell.py"),
    Unrun("docs/cluster.md", "createuser", NEEDS_POSTGRES, "tests/cluster/test_ray_batch.py"),
    Unrun("docs/cluster.md", "ray start", NEEDS_RAY, "tests/cluster/test_ray_batch.py"),
    Unrun("docs/cluster.md", "turngate batch --ray", NEEDS_RAY, "tests/cluster/test_ray_batch.py"),
    Unrun("docs/cluster.md", "turngate train --ray", NEEDS_RAY, "tests/cluster/test_train.py"),
    Unrun("docs/cluster.md", "import turngate as tg", NEEDS_RAY, "tests/cluster/test_api.py"),
    Unrun("docs/cluster.md", "import ray", NEEDS_RAY, "tests/cluster/test_groups.py"),
    Unrun("docs/cluster.md", "make demo-cluster", TOO_LONG, "tests/cluster/test_demo.py"),
    Unrun("docs/comparison.md", "make gauntlet", TOO_LONG, "tests/gauntlet/test_turngate.py"),
    Unrun("docs/deploy.md", "mkdir -m 700 deploy/secrets", NEEDS_DOCKER, "tests/deploy/test_image.py"),
    Unrun("docs/deploy.md", "MODEL=Qwen/Qwen3-8B docker compose", NEEDS_DOCKER, "tests/deploy/test_files.py"),
    Unrun("docs/deploy.md", "docker ", NEEDS_DOCKER, "tests/deploy/test_image.py"),
    Unrun("docs/deploy.md", "pip download", "needs the package index"),
    Unrun("docs/deploy.md", "openssl rand -hex 32 | kubectl", "needs a cluster"),
    Unrun("docs/deploy.md", "kubectl apply", "needs a cluster", "tests/deploy/test_files.py"),
    Unrun("docs/deploy.md", "python3 -m venv /opt", NEEDS_SYSTEMD),
    Unrun("docs/deploy.md", "install ", NEEDS_SYSTEMD, "tests/deploy/test_files.py"),
    Unrun("docs/deploy.md", "(umask 077", NEEDS_SYSTEMD),
    Unrun(
        "docs/deploy.md",
        ".venv/bin/python deploy/space/deploy.py OWNER/NAME --public",
        "needs a Hugging Face token",
        "tests/deploy/test_space.py",
    ),
    Unrun("docs/doctor.md", "turngate doctor --agent claude-code", "needs an image of your own"),
    Unrun(
        "docs/export.md",
        "turngate export rows --out rows.jsonl --teacher",
        NEEDS_TEACHER,
        "tests/trainers/test_teacher.py",
    ),
    Unrun("docs/feed.md", "logprobs = [compute_logprobs", "needs a trainer", "tests/feed/test_mismatch.py"),
    Unrun("docs/feed.md", "async with await Feed.open(gateway", "continues another block", "tests/feed/test_trees.py"),
    Unrun(
        "docs/feed.md",
        'config = FeedConfig(n=8, side=("sampling_mask"',
        "needs recorded masks",
        "tests/trainers/test_sampling_masks.py",
    ),
    Unrun("docs/feed.md", "from turngate.trainers.teacher", NEEDS_TEACHER, "tests/trainers/test_teacher.py"),
    Unrun("docs/gauntlet.md", "make gauntlet", TOO_LONG, "tests/gauntlet/test_turngate.py"),
    Unrun(
        "docs/gauntlet.md",
        ".venv/bin/python -m gauntlet --gateway",
        "installs a peer",
        "tests/gauntlet/test_turngate.py",
    ),
    Unrun(
        "docs/gauntlet.md",
        ".venv/bin/python -m gauntlet --engine-port",
        "needs a gateway of yours",
        "tests/gauntlet/test_external.py",
    ),
    Unrun("docs/host-tools.md", "async for event", "answers a call that waits", "tests/server/test_tools.py"),
    Unrun("docs/index.md", "git clone", "needs the network"),
    Unrun("docs/index.md", "make setup", TOO_LONG),
    Unrun("docs/mcp.md", "import ", "runs against a service of the test", "tests/mcp/test_docs.py"),
    Unrun("docs/openenv.md", "from openenv", NEEDS_OPENENV, "tests/trainers/test_openenv_real.py"),
    Unrun(
        "docs/openenv-environment.md", "python -m turngate.openenv", NEEDS_OPENENV, "tests/openenv/test_openenv_env.py"
    ),
    Unrun("docs/openenv-environment.md", "from ", NEEDS_OPENENV, "tests/openenv/test_openenv_env.py"),
    Unrun("docs/openenv-environment.md", "cd envs/turngate", NEEDS_OPENENV, "tests/openenv/test_openenv_env.py"),
    Unrun("docs/openenv-environment.md", "openenv ", NEEDS_OPENENV),
    Unrun("docs/openenv-environment.md", "python -m pip wheel", "builds a wheel", "tests/test_dist.py"),
    Unrun("docs/projects.md", "turngate batch --ray", NEEDS_RAY, "tests/projects/test_cells.py"),
    Unrun("docs/remote-sandboxes.md", "turngate run --sandbox e2b", "needs an E2B key", "tests/sandboxes/test_e2b.py"),
    Unrun("docs/shared-store.md", "createdb", NEEDS_POSTGRES, "tests/store/shared/test_gateway.py"),
    Unrun(
        "docs/shared-store.md", "turngate serve --data postgresql", NEEDS_POSTGRES, "tests/store/shared/test_gateway.py"
    ),
    Unrun("docs/shared-store.md", "pg_dump", NEEDS_POSTGRES, "tests/cells/test_restore.py"),
    Unrun("docs/shared-store.md", "pg_basebackup", NEEDS_POSTGRES, "tests/cells/test_restore.py"),
    Unrun("docs/shared-store.md", "python bench/fill_shared_store.py", TOO_LONG),
    Unrun("docs/shared-store.md", "python bench/shared_store_pages.py", TOO_LONG),
    Unrun("docs/sandboxes.md", "turngate run --sandbox e2b", "needs an E2B key", "tests/sandboxes/test_e2b.py"),
    Unrun("docs/scale.md", ".venv/bin/python -m bench.scale", TOO_LONG, "tests/bench/test_scale_model.py"),
    Unrun("docs/speed.md", "make ", TOO_LONG),
    Unrun("docs/speed.md", ".venv/bin/python bench", TOO_LONG),
    Unrun("docs/start/prime-rl.md", "vf-eval", NEEDS_VERIFIERS, "tests/trainers/test_verifiers.py"),
    Unrun("docs/start/trl.md", "from turngate.client.protocol", NEEDS_TRL, "tests/trainers/test_trl.py"),
    Unrun("docs/swe.md", "turngate tasks check", "needs images of gigabytes", "tests/swe/test_swe.py"),
    Unrun("docs/swe.md", "turngate batch --tasks rows.jsonl", "needs images of gigabytes", "tests/swe/test_swe.py"),
    Unrun("docs/swe.md", "python tools/swe_tasks.py --out", TOO_LONG, "tests/swe/test_tool.py"),
    Unrun("docs/tasks.md", "turngate tasks check hf://", "needs the Hugging Face Hub", "tests/tasks/test_swe.py"),
    Unrun(
        "docs/weights.md", "turngate serve --data postgresql", NEEDS_POSTGRES, "tests/gateway/test_shared_engines.py"
    ),
    Unrun("docs/weights.md", "turngate cell --shared", NEEDS_POSTGRES, "tests/gateway/test_shared_engines.py"),
    Unrun("docs/weights.md", "turngate engines add", "needs a second engine", "tests/server/test_engines.py"),
    Unrun("docs/weights.md", "turngate engines drain", "needs a second engine", "tests/server/test_engines.py"),
    Unrun("docs/weights.md", "turngate engines remove", "needs a second engine", "tests/server/test_engines.py"),
    Unrun("docs/testing.md", "make ", "runs these tests"),
    Unrun("docs/reliability.md", "make chaos", TOO_LONG, "tests/chaos/test_faults.py"),
    Unrun("docs/reliability.md", ".venv/bin/python bench/load.py", TOO_LONG),
    Unrun("docs/tasks.md", "turngate tasks make", "needs the package index", "tests/tasks/repairs/test_make.py"),
    Unrun(
        "docs/tasks.md", "turngate tasks check repairs", "needs the package index", "tests/tasks/repairs/test_make.py"
    ),
    Unrun("docs/training-coder.md", "", "needs an H200", "tests/trainers/test_coder_example.py"),
    Unrun("docs/training-h200.md", "", "needs an H200", "tests/trainers/test_h200_example.py"),
    Unrun("docs/training.md", "turngate train", TOO_LONG, "tests/cli/test_train.py"),
    Unrun("docs/training.md", "make demo", TOO_LONG, "tests/trainers/test_demo.py"),
    Unrun("docs/training.md", "from turngate.engines.local", TOO_LONG, "tests/trainers/test_training.py"),
    Unrun("docs/training.md", "from rich", TOO_LONG, "tests/trainers/test_demo.py"),
    Unrun("docs/trl.md", "python examples/trl", NEEDS_TRL, "tests/trainers/test_trl.py"),
    Unrun("docs/trl.md", "from turngate", NEEDS_TRL, "tests/trainers/test_trl.py"),
    Unrun("docs/verifiers.md", "vf-eval", NEEDS_VERIFIERS, "tests/trainers/test_verifiers.py"),
    Unrun("docs/verifiers.md", "from turngate", NEEDS_VERIFIERS, "tests/trainers/test_verifiers.py"),
]
