"""Runs by a plan that is written down first: side by side on one device, over many sittings, one result file each."""
