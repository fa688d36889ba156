"""Training the paper's network: recipes, the loop, checkpoints."""

from ..jobs import Stopped
from .loop import train
from .recipe import RECIPES, Recipe
from .run import Options, Result

__all__ = ["RECIPES", "Options", "Recipe", "Result", "Stopped", "train"]
