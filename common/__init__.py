"""What every room uses: printing, files that are made once, and bytes from elsewhere."""
