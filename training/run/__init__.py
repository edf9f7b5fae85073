"""One attempt of a run, from the command line to the exit code."""
