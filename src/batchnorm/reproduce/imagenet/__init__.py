"""Figures 2 to 4: train the runs of a plan, optionally several at a time on one device, and make the figures."""
