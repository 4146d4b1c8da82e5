"""The version that every part reports; equal to the one in pyproject.toml (a test keeps it so)."""

VERSION = "0.1.0"
