"""Evaluation of networks: accuracy, many crops per image, and ensembles."""

from .accuracy import Accuracy, Score, count_correct, score
from .crops import Crops
from .ensemble import Ensemble, EnsembleReport, Member, evaluate_networks
from .predictions import Predictions, predict
from .square_crops import SquareBatches, open_squares

__all__ = [
    "Accuracy",
    "Crops",
    "Ensemble",
    "EnsembleReport",
    "Member",
    "Predictions",
    "Score",
    "SquareBatches",
    "count_correct",
    "evaluate_networks",
    "open_squares",
    "predict",
    "score",
]
