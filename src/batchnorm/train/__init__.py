"""Training the paper's network: recipes, the loop, checkpoints."""

from .loop import train
from .recipe import RECIPES, Recipe
from .run import Options, Result, Stopped

__all__ = ["RECIPES", "Options", "Recipe", "Result", "Stopped", "train"]
