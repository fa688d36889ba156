"""One file per question; users run them on their own machine."""
