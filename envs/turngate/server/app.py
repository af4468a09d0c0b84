"""The server's application. `TURNGATE_SERVICE` names its settings; without it they are the `service.toml` beside this folder."""

import os
from pathlib import Path

from turngate.openenv.app import SERVICE, create, serve

HERE = Path(__file__).parents[1]

app = create(Path(os.environ.get(SERVICE) or HERE / "service.toml"))


def main() -> None:
    """`uv run server`, `python -m server.app`: with --host, --port and --open."""
    serve(lambda: app)


if __name__ == "__main__":
    main()
