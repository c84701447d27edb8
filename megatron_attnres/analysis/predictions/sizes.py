"""Bytes for people."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: int) -> str:
    """Three or more digits and a binary unit: 512 B, 3.16 GiB."""
    size, power = float(num_bytes), 0
    while size >= 1000 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    digits = 0 if power == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} {_UNITS[power]}"
