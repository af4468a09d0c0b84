"""Loaders that build tasks from folders, files, data sets on the Hugging Face hub, and Python functions."""
