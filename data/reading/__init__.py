"""Files become rows of text: from a disk, a server, a store or the Hub; for both ways to train."""
