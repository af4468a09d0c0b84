"""Share the loaded renderers."""

from tests.renderer_fixtures import renderers  # noqa: F401
