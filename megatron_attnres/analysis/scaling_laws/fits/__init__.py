"""Power laws of points, how sure they are, and what one has over another."""
