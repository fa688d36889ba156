"""The paper's figures, tables and claims, each with its own command."""
