"""Load renderers once."""

from tests.renderer_fixtures import renderers  # noqa: F401
