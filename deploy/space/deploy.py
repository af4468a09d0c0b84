#!/usr/bin/env python3
"""Put a gateway on a Hugging Face Space, or bring one up to date.

    export HF_TOKEN=… TURNGATE_ADMIN_KEY=$(openssl rand -hex 32)
    python deploy/space/deploy.py OWNER/NAME --dry-run      # what would be uploaded; asks nobody
    python deploy/space/deploy.py OWNER/NAME

Secrets come from the environment alone. They become secrets of the Space, and are in no file that is uploaded: every file is
searched for them, and for whatever else looks like a key, a database or a data folder, before anything is sent. Run with the
environment that Turngate is installed in, with its extra `huggingface`.
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
# Where each file of the Space comes from; `turngate` is a folder.
PLACES = {
    "README.md": HERE / "README.md",
    "Dockerfile": HERE / "Dockerfile",
    "requirements.txt": ROOT / "deploy" / "docker" / "requirements.txt",
    "build.txt": ROOT / "deploy" / "docker" / "build.txt",
    "pyproject.toml": ROOT / "pyproject.toml",
    "LICENSE": ROOT / "LICENSE",
    "turngate": ROOT / "turngate",
}
MARK = "turngate/__init__.py"  # a Space that has it was made by this script
NEVER = (
    ".env*",
    "admin-key",
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
LOOKS_SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{24,}|tga-[A-Za-z0-9_-]{32,}|tg-[0-9a-f]{4}[A-Za-z0-9_-]{24,}"
    rb"|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


class Refused(Exception):
    """It is not begun. The text says why, and how to mend it."""


class Failed(Exception):
    """The Hub did not do its part. The text is what it said."""


@dataclass(frozen=True)
class Wanted:
    space: str  # OWNER/NAME
    public: bool
    config: Path
    secrets: dict[str, str]  # name to value


def staged(wanted: Wanted, folder: Path, secrets: dict[str, str]) -> list[Path]:
    """Lay out what the Space is made of, and look at every file of it: none may hold a secret. Their paths in the Space."""
    for name, source in {**PLACES, "serve.toml": wanted.config}.items():
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(*CACHES))
        else:
            shutil.copyfile(source, folder / name)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for file in files:
        _look_at(file, (folder / file).read_bytes(), secrets)
    return files


def _look_at(file: Path, content: bytes, secrets: dict[str, str]) -> None:
    if any(fnmatch(part, pattern) for part in file.parts for pattern in NEVER):
        raise Refused(f"{file}: databases, keys and data folders are not uploaded; take it away first")
    for name, value in secrets.items():
        if value.encode() in content:
            raise Refused(f"{file}: holds the value of {name}; secrets are not uploaded as files")
    if found := LOOKS_SECRET.search(content):
        line = content[: found.start()].count(b"\n") + 1
        raise Refused(f"{file}: line {line} looks like a secret; it is not uploaded")


def _checked_config(file: Path, secrets: dict[str, str]) -> ServeConfig:
    try:
        config = load_config(file, {})
    except ConfigError as error:
        raise Refused(f"{file}: {error.message}") from None
    wrong = {
        "host": (config.host, "0.0.0.0"),
        "port": (config.port, PORT),
        "data": (config.data, DATA),
    }
    for name, (is_now, must_be) in wrong.items():
        if is_now != must_be:
            raise Refused(f"{file}: {name}: a Space needs {must_be!r}, not {is_now!r}")
    if config.engine_key_env and config.engine_key_env not in secrets:
        raise Refused(f"{file}: engine_key_env: give --secret {config.engine_key_env}, so that the Space has it")
    return config


def _from_environment(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        value = os.environ.get(name, "").strip()
        if not value:
            raise Refused(f"{name}: is not set; secrets come from the environment")
        if name == ADMIN_KEY and len(value) < 16:
            raise Refused(f"{name}: must have at least 16 characters")
        found[name] = value
    return found


def upload(wanted: Wanted, folder: Path, files: list[Path], token: str) -> str:
    """The Space's page."""
    try:
        import httpx2  # what huggingface_hub asks with
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise Refused(f"{error.name} is missing: pip install 'turngate[huggingface]'") from None
    try:
        return _uploaded(HfApi(token=token), wanted, folder, files)
    except HFValidationError as error:
        raise Refused(f"space: {error}") from None
    except (OSError, httpx2.HTTPError) as error:  # the Hub refuses, or is not there
        raise Failed(str(error).replace(token, "…")) from None


def _uploaded(api: HfApi, wanted: Wanted, folder: Path, files: list[Path]) -> str:
    """One commit, so that the Space is built once, of all of it."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    made = api.create_repo(
        wanted.space, repo_type="space", space_sdk="docker", private=not wanted.public, exist_ok=True
    )
    there = set(api.list_repo_files(wanted.space, repo_type="space")) - {".gitattributes"}
    if there - {"README.md"} and MARK not in there:
        raise Refused(f"{wanted.space}: this Space holds something else; choose another name, or delete it first")
    for name, value in wanted.secrets.items():
        api.add_space_secret(wanted.space, name, value)
    names = {file.as_posix() for file in files}
    api.create_commit(
        wanted.space,
        [
            *(CommitOperationAdd(name, folder / name) for name in sorted(names)),
            *(CommitOperationDelete(name) for name in sorted(there - names)),
        ],
        repo_type="space",
        commit_message="Turngate, as it is now",
    )
    return str(made)


def deploy(wanted: Wanted, dry_run: bool, stage: Path | None) -> None:
    config = _checked_config(wanted.config, wanted.secrets)
    with tempfile.TemporaryDirectory(prefix="turngate-space-") as temporary:
        folder = stage or Path(temporary)
        if stage is not None:
            if stage.exists() and any(stage.iterdir()):
                raise Refused(f"stage: {stage} is not empty")
            stage.mkdir(parents=True, exist_ok=True)
        token = os.environ.get("HF_TOKEN", "").strip()
        files = staged(wanted, folder, {**wanted.secrets, **({"HF_TOKEN": token} if token else {})})
        size = sum((folder / file).stat().st_size for file in files)
        print(f"{wanted.space}: a {'public' if wanted.public else 'private'} Space, engine {config.engine}")
        if dry_run:
            for file in files:
                print(f"  {(folder / file).stat().st_size:>9,}  {file}")
        print(f"  {len(files)} files, {size:,} bytes; secrets: {', '.join(wanted.secrets)}")
        if dry_run:
            print("nothing was sent")
            return
        if not token:
            raise Refused("HF_TOKEN: is not set; it has to hold a token that may write to the Space")
        print(upload(wanted, folder, files, token))
    if not wanted.public:
        print(
            "It is private: who calls it has to send a Hugging Face token where model calls send their key. For agents, use --public."
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put a Turngate gateway on a Hugging Face Space.")
    parser.add_argument("space", nargs="?", help="OWNER/NAME of the Space; asked for if left out")
    parser.add_argument("--public", action="store_true", help="everybody may reach it; keys keep everybody out")
    parser.add_argument("--config", type=Path, default=HERE / "serve.toml", help="another serve.toml")
    parser.add_argument(
        "--secret", action="append", default=[], metavar="NAME", help="an environment variable that the Space gets too"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be uploaded, and send nothing")
    parser.add_argument("--stage", type=Path, metavar="FOLDER", help="lay the files out here, and keep them")
    return parser.parse_args()


def main() -> int:
    asked = _arguments()
    space = asked.space or (input("OWNER/NAME of the Space: ").strip() if sys.stdin.isatty() else "")
    try:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", space):
            raise Refused(f"space: {space!r} is not OWNER/NAME")
        secrets = _from_environment([ADMIN_KEY, *asked.secret])
        deploy(Wanted(space, asked.public, asked.config, secrets), asked.dry_run, asked.stage)
    except Refused as refused:
        print(f"deploy: {refused}", file=sys.stderr)
        return 2
    except Failed as failed:
        print(f"deploy: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
