"""The settings whose changes a run is to accept: they have to exist."""

from collections.abc import Iterator
from difflib import get_close_matches

from utils.config.reading.settings import SettingValues


def check_accepted_changes(values: SettingValues) -> Iterator[str]:
    """Refuse names that are no settings: nothing would be accepted by them."""
    for name in values["accept_changes"]:
        if name not in values:
            nearest = get_close_matches(name, values, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all settings"
            yield f"accept_changes ({values.sources['accept_changes']}): no setting {name}: {hint}"
