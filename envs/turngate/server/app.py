"""The server's application. `TURNGATE_SERVICE` names the file with its settings (default: the `service.toml` next to this folder)."""

import os
from pathlib import Path

from turngate.openenv.app import SERVICE, create, serve

HERE = Path(__file__).parents[1]

app = create(Path(os.environ.get(SERVICE) or HERE / "service.toml"))


def main() -> None:
    """Run the server, for `uv run server` and `python -m server.app`. The options include --host, --port and --open."""
    serve(lambda: app)


if __name__ == "__main__":
    main()
