"""Training: recipes, the training loop, checkpoints and saved runs."""

from ..jobs import Stopped
from .loop import train
from .metrics import Result
from .options import Options
from .recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Options", "Recipe", "Result", "Stopped", "train"]
