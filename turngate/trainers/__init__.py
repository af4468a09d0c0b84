"""Bridges from traces to trainers. Each imports its trainer in its own module only."""
