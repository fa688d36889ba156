"""Figure 4: one network, many crops, many networks; the networks are run by a plan that is written down first."""
