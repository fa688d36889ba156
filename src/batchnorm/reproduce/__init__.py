"""Commands that reproduce the paper's figures and test its claims."""
