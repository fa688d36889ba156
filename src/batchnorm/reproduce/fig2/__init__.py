"""Figures 2 and 3: the paper's networks on images, run by a plan that is written down first."""
