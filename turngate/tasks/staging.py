"""A task laid out in a sandbox: the same for the agent that does it and for the grader that looks at what came of it."""

from __future__ import annotations

from turngate.errors import TaskError
from turngate.sandboxes.base import Backend, Resources, Sandbox, SandboxSpec
from turngate.tasks.task import Task

IMAGELESS = ("local", "bubblewrap")  # they run on this machine's own files


def build_sandbox_spec(
    task: Task, backend: Backend, *, image: str = "", resources: Resources = Resources()
) -> SandboxSpec:
    """The sandbox that a task needs. An image or limits that are given win over the task's own."""
    if task.files is None and not image:  # then what is to be worked on is in the image
        if task.dockerfile is not None and backend.name != "docker":
            raise TaskError(
                f"task: {task.id} builds its own image (environment/Dockerfile); use --sandbox docker, or --image with a ready one",
                param="sandbox",
            )
        if task.image and backend.name in IMAGELESS:
            raise TaskError(
                f"task: {task.id} lies in the image {task.image}, and a {backend.name} sandbox has none; use --sandbox docker",
                param="sandbox",
            )
    chosen = image or task.image
    return SandboxSpec(
        image=chosen,
        dockerfile="" if chosen or task.dockerfile is None else str(task.dockerfile),
        workdir=task.workdir,
        env=task.env,
        resources=Resources(
            cpus=resources.cpus or task.cpus, memory_mb=resources.memory_mb or task.memory_mb, pids=resources.pids
        ),
        labels={"task": task.id},
    )


async def upload_files(sandbox: Sandbox, task: Task) -> None:
    if task.files is not None:
        await sandbox.upload(task.files, sandbox.workdir)


async def run_setup(sandbox: Sandbox, task: Task) -> None:
    """Run the task's own script. That it fails is the task's fault."""
    if not task.setup:
        return
    result = await sandbox.exec(["sh", "-e", "-c", task.setup], timeout_s=task.setup_timeout_s)
    if result.timed_out or result.exit_code:
        how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
        said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
        raise TaskError(f"setup.sh {how}: {said or 'it said nothing'}", param="setup.sh")
