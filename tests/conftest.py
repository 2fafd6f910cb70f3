"""One hypothesis profile for all tests: a busy machine is no failure, and a failure repeats."""

from hypothesis import settings

settings.register_profile("branchout", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("branchout")
