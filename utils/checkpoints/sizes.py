"""What a checkpoint takes, in bytes and in words."""

GIB = 2**30
MARGIN = 1.02  # over the one before: logs and random states grow a little


def gib(size_bytes: float) -> str:
    """Write a size out, to the MiB below 10 GiB."""
    return f"{size_bytes / GIB:,.{1 if size_bytes >= 10 * GIB else 3}f} GiB"
