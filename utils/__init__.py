"""Stoker's packages; docs/internals/architecture.md shows how they hang together."""
