"""One file per question of speed; users run them on their own machine."""
