"""The list of all tested published models."""

from dense import DENSE
from experts import EXPERTS
from hybrid import HYBRID, MULTIMODAL

MODELS = [*DENSE, *EXPERTS, *HYBRID, *MULTIMODAL]
