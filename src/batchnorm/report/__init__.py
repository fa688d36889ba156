"""What a run leaves behind: result files with their provenance, pictures, one page of HTML."""
