"""Stoker's packages; docs/architecture.md shows how they hang together."""
