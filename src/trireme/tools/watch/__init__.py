"""`trireme watch RUN`: a live or a finished run in the terminal."""
