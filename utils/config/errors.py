"""The one exception type for the user's mistakes."""

from collections.abc import Sequence


class ConfigurationError(ValueError):
    """Settings or data that cannot work: what was given, why it cannot work, what to do.

    Carries every fault found, so that one start shows them all. Scripts print it without a
    traceback on rank 0 and exit with code 2.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))
