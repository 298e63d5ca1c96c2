"""What a checkpoint takes, in bytes and in words."""

MARGIN = 1.02  # over the one before: logs and random states grow a little
UNITS = ("KiB", "MiB", "GiB")


def readable(size_bytes: float) -> str:
    """Write a size out in its largest unit, to one decimal.

    >>> readable(1000), readable(5 * 2**20), readable(1.5 * 2**40)
    ('1.0 KiB', '5.0 MiB', '1,536.0 GiB')
    """
    size = size_bytes / 1024
    for unit in UNITS:
        if size < 1023.95 or unit == UNITS[-1]:
            break
        size /= 1024
    return f"{size:,.1f} {unit}"
