"""Figures 2 to 4: train the runs of a committed plan, several at a time on one device, and draw the figures."""
