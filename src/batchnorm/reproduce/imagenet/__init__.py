"""Figures 2 to 4: runs by a plan that is committed first, several at a time on one device, one result file each."""
