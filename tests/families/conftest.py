"""torchvision can be imported, whatever test comes first: this import sees to it."""

from helpers import families  # noqa: F401
