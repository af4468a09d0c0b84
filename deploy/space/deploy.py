#!/usr/bin/env python3
"""Deploy a gateway to a Hugging Face Space, or update one.

    export HF_TOKEN=… TURNGATE_ADMIN_KEY=$(openssl rand -hex 32)
    python deploy/space/deploy.py OWNER/NAME --dry-run      # list what would be uploaded; sends nothing
    python deploy/space/deploy.py OWNER/NAME

Secrets are read only from the environment. They become secrets of the Space, and are never uploaded in a file: before anything is sent,
every file is searched for them and for anything that looks like a key, a database or a data folder. Run this with the Python environment
in which Turngate is installed with its extra `huggingface`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from turngate.config import ServeConfig, load_config
from turngate.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "deploy" / "space"
ADMIN_KEY = "TURNGATE_ADMIN_KEY"
PORT = 7860  # the README's app_port
DATA = "/data"
# The source of each file of the Space; `turngate` is a folder.
SOURCES = {
    "README.md": HERE / "README.md",
    "Dockerfile": HERE / "Dockerfile",
    "requirements.txt": ROOT / "deploy" / "docker" / "requirements.txt",
    "build.txt": ROOT / "deploy" / "docker" / "build.txt",
    "pyproject.toml": ROOT / "pyproject.toml",
    "LICENSE": ROOT / "LICENSE",
    "turngate": ROOT / "turngate",
}
MARKER = "turngate/__init__.py"  # a Space with this file was created by this script
FORBIDDEN_FILES = (
    ".env*",
    "*admin-key*",
    "*.db",
    "*.db-*",
    "*.sqlite*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "gateway.json",
)
CACHES = ("__pycache__", "*.py[co]", ".*_cache")
SECRET_PATTERN = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{24,}|tga-[A-Za-z0-9_-]{32,}|tg-[0-9a-f]{4}[A-Za-z0-9_-]{24,}"
    rb"|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


class DeployError(Exception):
    """The deployment cannot start. The message says why and what to do."""


class HubError(Exception):
    """A request to the Hugging Face Hub failed."""


@dataclass(frozen=True)
class Deployment:
    """The Space to create or update."""

    space: str  # OWNER/NAME
    public: bool
    config: Path
    secrets: dict[str, str]  # values by name


def stage_files(deployment: Deployment, folder: Path, secrets: dict[str, str]) -> list[Path]:
    """Copy the files of the Space into a folder, check that none contains a secret, and return their paths in the Space."""
    for name, source in {**SOURCES, "serve.toml": deployment.config}.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*CACHES))
        else:
            shutil.copyfile(source, folder / name)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for file in files:
        _check_file(file, (folder / file).read_bytes(), secrets)
    return files


def _check_file(file: Path, content: bytes, secrets: dict[str, str]) -> None:
    if any(fnmatch(part, pattern) for part in file.parts for pattern in FORBIDDEN_FILES):
        raise DeployError(f"{file}: databases, keys and data folders must not be uploaded; remove the file first")
    for name, value in secrets.items():
        if value.encode() in content:
            raise DeployError(f"{file} contains the value of {name}; secrets must not be uploaded in files")
    if found := SECRET_PATTERN.search(content):
        line = content[: found.start()].count(b"\n") + 1
        raise DeployError(f"{file}, line {line}: this looks like a secret, which must not be uploaded; remove it")


def _load_config(file: Path, secrets: dict[str, str]) -> ServeConfig:
    try:
        config = load_config(file, {})
    except ConfigError as error:
        raise DeployError(f"{file}: {error.message}") from None
    required = {
        "host": (config.host, "0.0.0.0"),
        "port": (config.port, PORT),
        "data": (config.data, DATA),
    }
    for name, (value, needed) in required.items():
        if value != needed:
            raise DeployError(f"{file}: {name} must be {needed!r} on a Space, not {value!r}")
    if config.engine_key_env and config.engine_key_env not in secrets:
        raise DeployError(
            f"{file}: engine_key_env names a variable that the Space does not have; pass --secret {config.engine_key_env}"
        )
    return config


def _read_secrets(names: list[str]) -> dict[str, str]:
    secrets = {}
    for name in names:
        value = os.environ.get(name, "").strip()
        if not value:
            raise DeployError(f"{name} is not set; set it in the environment")
        if name == ADMIN_KEY and len(value) < 16:
            raise DeployError(f"{name} must have at least 16 characters")
        secrets[name] = value
    return secrets


def upload(deployment: Deployment, folder: Path, files: list[Path], token: str) -> str:
    """Upload the files, and return the URL of the Space."""
    try:
        import httpx2  # the HTTP client of huggingface_hub
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise DeployError(f"{error.name} is not installed; run pip install 'turngate[huggingface]'") from None
    try:
        return _commit_files(HfApi(token=token), deployment, folder, files)
    except HFValidationError as error:
        raise DeployError(f"space: {error}") from None
    except (OSError, httpx2.HTTPError) as error:  # the Hub rejected the request or is unreachable
        raise HubError(str(error).replace(token, "…")) from None


def _commit_files(api: HfApi, deployment: Deployment, folder: Path, files: list[Path]) -> str:
    """Upload all files in one commit, so that the Space is built only once."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    url = api.create_repo(
        deployment.space, repo_type="space", space_sdk="docker", private=not deployment.public, exist_ok=True
    )
    existing = set(api.list_repo_files(deployment.space, repo_type="space")) - {".gitattributes"}
    if existing - {"README.md"} and MARKER not in existing:
        raise DeployError(
            f"{deployment.space}: this Space was not created by Turngate; choose a different name, or delete it first"
        )
    for name, value in deployment.secrets.items():
        api.add_space_secret(deployment.space, name, value)
    names = {file.as_posix() for file in files}
    api.create_commit(
        deployment.space,
        [
            *(CommitOperationAdd(name, folder / name) for name in sorted(names)),
            *(CommitOperationDelete(name) for name in sorted(existing - names)),
        ],
        repo_type="space",
        commit_message="Update Turngate",
    )
    return str(url)


def deploy(deployment: Deployment, dry_run: bool, stage: Path | None) -> None:
    config = _load_config(deployment.config, deployment.secrets)
    with tempfile.TemporaryDirectory(prefix="turngate-space-") as temporary:
        folder = stage or Path(temporary)
        if stage is not None:
            if stage.exists() and any(stage.iterdir()):
                raise DeployError(f"stage folder {stage} is not empty; choose an empty one")
            stage.mkdir(parents=True, exist_ok=True)
        token = os.environ.get("HF_TOKEN", "").strip()
        files = stage_files(deployment, folder, {**deployment.secrets, **({"HF_TOKEN": token} if token else {})})
        size = sum((folder / file).stat().st_size for file in files)
        print(f"{deployment.space}: a {'public' if deployment.public else 'private'} Space, engine {config.engine}")
        if dry_run:
            for file in files:
                print(f"  {(folder / file).stat().st_size:>9,}  {file}")
        print(f"  {len(files)} files, {size:,} bytes; secrets: {', '.join(deployment.secrets)}")
        if dry_run:
            print("nothing was sent")
            return
        if not token:
            raise DeployError("HF_TOKEN is not set; set it to a token that can write to the Space")
        print(upload(deployment, folder, files, token))
    if not deployment.public:
        print(
            "It is private: callers must send a Hugging Face token where model calls send their key. For agents, use --public."
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Deploy a Turngate gateway to a Hugging Face Space.")
    parser.add_argument("space", nargs="?", help="OWNER/NAME of the Space; prompted for if omitted")
    parser.add_argument(
        "--public", action="store_true", help="make the Space reachable by everyone; access still needs a key"
    )
    parser.add_argument("--config", type=Path, default=HERE / "serve.toml", help="serve.toml to use")
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable to add to the secrets of the Space",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded, and send nothing")
    parser.add_argument("--stage", type=Path, metavar="FOLDER", help="copy the files to this folder and keep them")
    return parser.parse_args()


def main() -> int:
    options = _parse_arguments()
    space = options.space or (input("OWNER/NAME of the Space: ").strip() if sys.stdin.isatty() else "")
    try:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", space):
            raise DeployError(f"space must be OWNER/NAME, not {space!r}")
        secrets = _read_secrets([ADMIN_KEY, *options.secret])
        deploy(Deployment(space, options.public, options.config, secrets), options.dry_run, options.stage)
    except DeployError as error:
        print(f"deploy: {error}", file=sys.stderr)
        return 2
    except HubError as error:
        print(f"deploy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
