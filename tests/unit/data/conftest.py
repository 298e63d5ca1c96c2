"""Property tests are judged by what they find, not by how fast a busy machine runs one example."""

from hypothesis import settings

settings.register_profile("data", deadline=None, max_examples=40)
settings.load_profile("data")
