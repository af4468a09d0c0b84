#!/usr/bin/env python3
"""Install the Debian packages that tests need (Docker, bubblewrap, Chromium, PostgreSQL, PgBouncer, Slurm), and build the base image.

Run by hand or by CI (`python tools/base_image.py docker bubblewrap chromium`, as root on Debian). Tests and other tools import it.
The image `turngate-base:bookworm` is not pulled: debootstrap builds it from Debian's packages. Its tarball is kept in the cache, so
that a new Docker installation can import it in seconds. If no Docker daemon responds, one is started, and its log is also in the cache.

Uses only the standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "turngate-base:bookworm"
SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("python3", "git", "ca-certificates", "procps", "curl", "ripgrep")
USER = "agent"  # some agents refuse to work as root
RECIPE = (1, SUITE, PACKAGES, USER)  # raise the number when `_build` changes
RECIPE_LABEL = "turngate.recipe"
POSTGRES_PROGRAMS = Path("/usr/lib/postgresql")  # a folder for each version
SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
DAEMON_WAIT_S = 60
# On machines that allow no changes to their firewall, dockerd cannot create a bridge. Sandboxes do not use one.
DAEMON = ("dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none")
STORAGE = ((), ("--storage-driver", "vfs"))  # dockerd's own choice, or else a driver that works everywhere


class ImageError(Exception):
    """A package could not be installed, or the image could not be built. The message contains the failed step and its output."""


def cache() -> Path:
    """Return the cache folder, which is the same as in `parts.py`."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate").expanduser().absolute()


# ---- functions for callers ----


def missing_bubblewrap() -> str | None:
    """Return why bubblewrap cannot be used and how to install it, or None if it can be used."""
    return None if shutil.which("bwrap") else "bwrap is missing (run: python tools/base_image.py bubblewrap, as root)"


def missing_chromium() -> str | None:
    """Return why Chromium cannot be used and how to install it, or None if it can be used."""
    hint = "(run: python tools/base_image.py chromium, as root)"
    return None if shutil.which("chromium") else f"chromium is missing {hint}"


def missing_postgres() -> str | None:
    """Return why Debian's PostgreSQL cannot be used and how to install it, or None if it can be used."""
    hint = "(run: python tools/base_image.py postgres, as root)"
    return None if postgres_programs() else f"postgresql is missing {hint}"


def postgres_programs() -> Path | None:
    """Return the folder of the newest installed server's programs, which Debian keeps out of the PATH."""
    found = [server.parent for server in POSTGRES_PROGRAMS.glob("*/bin/initdb")]
    return max(found, key=lambda folder: int(folder.parent.name), default=None)


def missing_pgbouncer() -> str | None:
    """Return why PgBouncer cannot be used and how to install it, or None if it can be used."""
    hint = "(run: python tools/base_image.py pgbouncer, as root)"
    return None if shutil.which("pgbouncer") else f"pgbouncer is missing {hint}"


def missing_slurm() -> str | None:
    """Return why Slurm cannot be used and how to install it, or None if it can be used. Only root can start its daemons."""
    hint = "(run: python tools/base_image.py slurm, as root)"
    if os.geteuid() != 0:
        return f"only root can start Slurm {hint}"
    absent = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    return f"missing programs: {', '.join(absent)} {hint}" if absent else None


def missing_docker() -> str | None:
    """Return why Docker or the base image cannot be used and how to install it, or None if both can be used."""
    hint = "(run: python tools/base_image.py docker, as root)"
    if not shutil.which("docker"):
        return f"docker is missing {hint}"
    if not _daemon_answers():
        return f"no Docker daemon responds {hint}"
    if _imported() != fingerprint():
        return f"the image {IMAGE} is missing or was built from a different recipe {hint}"
    return None


def ensure_bubblewrap() -> None:
    if missing_bubblewrap():
        _install("bubblewrap")


def ensure_chromium() -> None:
    if missing_chromium():
        _install("chromium")


def ensure_postgres() -> None:
    if missing_postgres():
        _install("postgresql")


def ensure_pgbouncer() -> None:
    if missing_pgbouncer():
        _install("pgbouncer")


def ensure_slurm() -> None:
    if missing_slurm():
        _install(*SLURM_PACKAGES)


def ensure_docker() -> None:
    """Install Docker, start a daemon and import the base image, unless that has already been done."""
    if missing_docker() is None:
        return
    with _locked("docker"):
        if not (shutil.which("docker") and (_daemon_answers() or shutil.which("dockerd"))):
            _install("docker.io")
        if not _daemon_answers():
            _start_daemon()
        if _imported() != fingerprint():
            import_image()


def import_image(host: str = "") -> None:
    """Import the base image into a daemon, by default the one that `docker` uses. Build its tarball first if it is not in the cache."""
    changes = [f"USER {USER}", f"LABEL {RECIPE_LABEL}={fingerprint()}", 'CMD ["/bin/bash"]']
    options = [word for change in changes for word in ("--change", change)]
    daemon = ["--host", host] if host else []
    _run("docker: import the base image", ["docker", *daemon, "import", *options, str(_tarball()), IMAGE])


def tarball_path() -> Path:
    return cache() / "docker" / f"base-{fingerprint()}.tar"


def fingerprint() -> str:
    return hashlib.sha256(json.dumps(RECIPE).encode()).hexdigest()[:16]


# ---- the daemon ----


def _daemon_answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def _start_daemon() -> None:
    log = cache() / "docker" / "dockerd.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for storage in STORAGE:
        with log.open("ab") as out:
            daemon = subprocess.Popen(
                [*DAEMON, *storage], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + DAEMON_WAIT_S
        while daemon.poll() is None and time.monotonic() < deadline:
            if _daemon_answers():
                print(f"docker: started dockerd (process {daemon.pid}, log {log})", flush=True)
                return
            time.sleep(0.5)
        daemon.terminate()
        daemon.wait()
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise ImageError(f"dockerd did not start; the last lines of {log}:\n{tail}")


# ---- the image ----


def _imported() -> str:
    """Return the recipe of the image in the daemon, or an empty string if there is no image."""
    form = f'{{{{index .Config.Labels "{RECIPE_LABEL}"}}}}'
    done = subprocess.run(
        ["docker", "image", "inspect", "--format", form, IMAGE], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _tarball() -> Path:
    tarball = tarball_path()
    folder = tarball.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not tarball.exists():
        if not shutil.which("debootstrap"):
            _install("debootstrap")
        with tempfile.TemporaryDirectory(prefix="base-", dir=folder) as scratch:
            _build(Path(scratch), Path(scratch, "base.tar"))
            Path(scratch, "base.tar").rename(tarball)
    return tarball


def _build(scratch: Path, tarball: Path) -> None:
    root = str(scratch / "root")
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root, MIRROR]
    _run("docker: build the base image with debootstrap (takes a minute)", bootstrap)
    _run(f"docker: add the user {USER}", ["chroot", root, "useradd", "--no-create-home", "--shell", "/bin/bash", USER])
    left_out = [
        "--exclude=./var/cache/apt/*",
        "--exclude=./var/lib/apt/lists/*",
        "--exclude=./dev/*",
        "--exclude=./proc/*",
    ]
    _run("docker: pack the base image", ["tar", *left_out, "--numeric-owner", "-cf", str(tarball), "-C", root, "."])


# ---- installing and running commands ----


def _install(*packages: str) -> None:
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ImageError(
            f"{names}: not installed, and only root on Debian can install it; run as root: apt-get install {names}"
        )
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    try:
        _run(f"apt-get install {names}", command)
    except ImageError:  # the package lists may be outdated or missing
        _run("apt-get update", ["apt-get", "update"])
        _run(f"apt-get install {names}", command)


def _run(what: str, command: list[str]) -> None:
    print(what, flush=True)
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"},  # do not start services
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-20:])
        raise ImageError(
            f"{shlex.join(command)}\n  exited with status {done.returncode}; the last lines of output:\n{tail}"
        )


@contextmanager
def _locked(name: str) -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


ENSURE = {
    "docker": ensure_docker,
    "bubblewrap": ensure_bubblewrap,
    "chromium": ensure_chromium,
    "postgres": ensure_postgres,
    "pgbouncer": ensure_pgbouncer,
    "slurm": ensure_slurm,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Install the Debian packages that tests need, and build the base image."
    )
    parser.add_argument("names", nargs="+", choices=[*ENSURE], metavar="NAME", help=", ".join(ENSURE))
    try:
        for name in parser.parse_args().names:
            ENSURE[name]()
            print(f"{name}: ready", flush=True)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
