"""Will it fit? Memory for each process, before a machine is rented. Nothing in a run imports it."""
