"""`trireme watch RUN`: shows a live or a finished run in the terminal."""
