"""Integrations with trainers. Each one imports its trainer only inside its own module."""
