"""Set up a task in a sandbox, in the same way for the agent and for the grader."""

from __future__ import annotations

from turngate.errors import TaskError
from turngate.sandboxes.base import Backend, Resources, Sandbox, SandboxSpec
from turngate.tasks.task import Task

IMAGELESS = ("local", "bubblewrap")  # sandboxes that use this machine's own files


def build_sandbox_spec(
    task: Task, backend: Backend, *, image: str = "", resources: Resources = Resources()
) -> SandboxSpec:
    """Build the spec of the sandbox that a task needs. `image` and `resources` take precedence over the task's own settings.

    Raise `TaskError` if this kind of sandbox cannot use the task's image or Dockerfile.
    """
    if task.files is None and not image:  # the agent's files are in the image
        if task.dockerfile is not None and backend.name != "docker":
            built = (
                ""
                if backend.name in IMAGELESS
                else ", or replace the Dockerfile with a built image ('docker_image' in task.toml)"
            )
            raise TaskError(
                f"task: {task.id} needs its own image (environment/Dockerfile); use the docker sandbox{built}",
                param="sandbox",
            )
        if task.image and backend.name in IMAGELESS:
            raise TaskError(
                f"task: {task.id} needs the image {task.image}, but a {backend.name} sandbox cannot run images; use the docker sandbox",
                param="sandbox",
            )
    chosen = image or task.image
    return SandboxSpec(
        image=chosen,
        dockerfile="" if chosen or task.dockerfile is None else str(task.dockerfile),
        workdir=task.workdir,
        env=task.env,
        resources=Resources(
            cpus=resources.cpus or task.cpus,
            memory_mb=resources.memory_mb or task.memory_mb,
            pids=resources.pids,
            disk_mb=resources.disk_mb,
            open_files=resources.open_files,
        ),
        labels={"task": task.id},
    )


async def upload_files(sandbox: Sandbox, task: Task) -> None:
    if task.files is not None:
        await sandbox.upload(task.files, sandbox.workdir)


async def run_setup(sandbox: Sandbox, task: Task) -> None:
    """Run the task's setup script. Raise `TaskError` if it fails."""
    if not task.setup:
        return
    result = await sandbox.exec(["sh", "-e", "-c", task.setup], timeout_s=task.setup_timeout_s)
    if result.timed_out or result.exit_code:
        failure = (
            f"took longer than {task.setup_timeout_s:g} s"
            if result.timed_out
            else f"failed with exit code {result.exit_code}"
        )
        output = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
        ending = f": {output}" if output else " and printed nothing"
        raise TaskError(f"the setup script {failure}{ending}", param="setup.sh")
