"""What a CPU gains from: attention by products, a linear layer, dropout, threads, kept memory."""
