"""The paper's figures, tables and claims, one file each; each is also a command."""
