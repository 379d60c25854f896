"""Models as Hugging Face directories."""

from timzero.model.directory import ModelError
from timzero.model.get import PACKAGED, get

__all__ = ["PACKAGED", "ModelError", "get"]
