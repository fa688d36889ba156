"""The paper's figures, tables and claims: one file and one command each."""
