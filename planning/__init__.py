"""Will it fit? Memory estimates for each process of a run. Nothing in a run imports it."""
